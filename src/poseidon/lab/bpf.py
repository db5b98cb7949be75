"""Small programs for the kernel that look at a machine's packets and drop or damage them: just enough of eBPF.

A program is a list of instructions made here, so neither a compiler nor ``tc`` is needed. It hangs at the machine's
port of the lab's switch, where packets arrive that the machine has sent.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from poseidon.errors import ConfigError

_MAP_CREATE, _MAP_LOOKUP, _MAP_UPDATE, _PROG_LOAD = 0, 1, 2, 5
_ARRAY_MAP, _CLASSIFIER = 2, 3
_SYSCALL = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "ppc64le": 361, "s390x": 351}
_LICENSE = b"GPL\0"
_LOG_BYTES = 1 << 16

# Helpers of the kernel, by number.
_LOOK_UP, _RANDOM, _STORE, _LOAD = 1, 7, 9, 26
# What becomes of the packet.
_PASS, _DROP = -1, 2

_FRAME = -78
"""Where the packet's first bytes lie on the program's stack; so that its IP addresses are aligned."""
_HEADERS = 54
"""Ethernet, IPv4 and TCP without options."""
_KEY, _BYTE = -8, -16
"""Other places on the stack."""


@dataclass(frozen=True)
class Flow:
    """Which of a machine's TCP packets: those to one address, those of connections with one port, or all."""

    peer: str = ""
    """An IPv4 address; empty: any."""
    port: int = 0
    """At either end; 0: any."""


class Counter:
    """A number that a program in the kernel and this process share."""

    def __init__(self, value: int) -> None:
        attributes = struct.pack("<IIIII", _ARRAY_MAP, 4, 8, 1, 0)
        self.fd = _bpf(_MAP_CREATE, attributes, "make a counter")
        key, content = ctypes.create_string_buffer(4), ctypes.create_string_buffer(struct.pack("<q", value), 8)
        _bpf(_MAP_UPDATE, _element(self.fd, key, content), "set a counter")

    @property
    def value(self) -> int:
        """The number now."""
        key, content = ctypes.create_string_buffer(4), ctypes.create_string_buffer(8)
        _bpf(_MAP_LOOKUP, _element(self.fd, key, content), "read a counter")
        return int(struct.unpack("<q", content.raw)[0])

    def close(self) -> None:
        """Forget it here; a program that uses it keeps it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def load(instructions: Sequence[bytes | str | tuple[bytes, str]]) -> int:
    """Hand a program to the kernel; return its file descriptor."""
    code = _assemble(instructions)
    text, license_text = ctypes.create_string_buffer(code, len(code)), ctypes.create_string_buffer(_LICENSE)
    log = ctypes.create_string_buffer(_LOG_BYTES)
    attributes = struct.pack(
        "<IIQQIIQI",
        _CLASSIFIER,
        len(code) // 8,
        ctypes.addressof(text),
        ctypes.addressof(license_text),
        0,
        0,
        0,
        0,
    )
    try:
        return _bpf(_PROG_LOAD, attributes, "load a program")
    except OSError:
        # Once more, for the verifier's reasons.
        attributes = attributes[:24] + struct.pack("<IIQI", 1, _LOG_BYTES, ctypes.addressof(log), 0)
        try:
            return _bpf(_PROG_LOAD, attributes, "load a program")
        except OSError as again:
            lines = log.value.decode(errors="replace").strip().splitlines()
            reason = lines[-2] if len(lines) > 1 else ""
            raise ConfigError(
                f"the kernel does not load a program for packets ({again.strerror}) {reason}".rstrip()
                + "; half-open, lossy and flip need CONFIG_BPF_SYSCALL, and root outside of user namespaces"
            ) from None


def dropping(flow: Flow) -> list[bytes | str | tuple[bytes, str]]:
    """Return a program that drops what established connections carry; new ones may still begin to open."""
    return [*_select(flow), _move_value(0, _DROP), _exit(), "pass", _move_value(0, _PASS), _exit()]


def losing(share: float) -> list[bytes | str | tuple[bytes, str]]:
    """Return a program that drops a share of all packets, each by chance."""
    if not 0 < share < 1:
        raise ConfigError(f"a lossy link loses a share of its packets between 0 and 1, such as 0.02, not {share:g}")
    return [
        _call(_RANDOM),
        (_jump32_if_at_least(0, round(share * (2**32 - 1))), "pass"),
        _move_value(0, _DROP),
        _exit(),
        "pass",
        _move_value(0, _PASS),
        _exit(),
    ]


def flipping(flow: Flow, counter: Counter) -> list[bytes | str | tuple[bytes, str]]:
    """Return a program that flips one bit of the payload in as many packets as the counter says, and counts down.

    A checksum that the sender's card would have added is not there yet on an emulated link, so the receiver believes
    the packet. It is what a failing card or switch does between two checksums.
    """
    return [
        *_select(flow),
        # r7: bytes of TCP's header. r8: bytes of payload.
        _load(7, 8, _FRAME + 46),
        _shift_right(7, 4),
        _shift_left(7, 2),
        _load(8, 16, _FRAME + 16),
        _from_big_endian16(8),
        _add_value(8, -20),
        _subtract(8, 7),
        (_jump_if_at_most(8, 0), "pass"),
        # r7: where in the packet.
        _call(_RANDOM),
        _modulo(0, 8),
        _add(7, 0),
        _add_value(7, 34),
        # r8: the counter. One less to flip, unless there is none.
        _store_value32(_KEY, 0),
        *_load_map(1, counter.fd),
        _move(2, 10),
        _add_value(2, _KEY),
        _call(_LOOK_UP),
        (_jump_if_equal(0, 0), "pass"),
        _move(8, 0),
        _load_at(1, 8),
        (_jump_if_at_most(1, 0), "pass"),
        _move_value(1, -1),
        _fetch_add(8, 1),
        (_jump_if_at_most(1, 0), "pass"),
        # r9: which bit.
        _call(_RANDOM),
        _and_value(0, 7),
        _move_value(9, 1),
        _shift_left_by(9, 0),
        _move(1, 6),
        _move(2, 7),
        _move(3, 10),
        _add_value(3, _BYTE),
        _move_value(4, 1),
        _call(_LOAD),
        (_jump_if_other(0, 0), "failed"),
        _load(1, 8, _BYTE),
        _xor(1, 9),
        _store8(_BYTE, 1),
        _move(1, 6),
        _move(2, 7),
        _move(3, 10),
        _add_value(3, _BYTE),
        _move_value(4, 1),
        _move_value(5, 0),
        _call(_STORE),
        (_jump_if_equal(0, 0), "pass"),
        "failed",
        _move_value(1, 1),
        _fetch_add(8, 1),
        "pass",
        _move_value(0, _PASS),
        _exit(),
    ]


def _select(flow: Flow) -> list[bytes | str | tuple[bytes, str]]:
    """Go on with packets of the flow's established connections, to ``pass`` with all others."""
    start: list[bytes | str | tuple[bytes, str]] = [
        _move(6, 1),
        _move_value(2, 0),
        _move(3, 10),
        _add_value(3, _FRAME),
        _move_value(4, _HEADERS),
        _call(_LOAD),
        (_jump_if_other(0, 0), "pass"),
        # IPv4 without options, TCP, and no packet that opens a connection.
        _load(0, 16, _FRAME + 12),
        (_jump_if_other(0, _network16(0x0800)), "pass"),
        _load(0, 8, _FRAME + 14),
        (_jump_if_other(0, 0x45), "pass"),
        _load(0, 8, _FRAME + 23),
        (_jump_if_other(0, 6), "pass"),
        _load(0, 8, _FRAME + 47),
        (_jump_if_set(0, 0x02), "pass"),
    ]
    if flow.peer:
        (address,) = struct.unpack("=i", bytes(map(int, flow.peer.split("."))))
        start += [_load(0, 32, _FRAME + 30), (_jump32_if_other(0, address), "pass")]
    if flow.port:
        port = _network16(flow.port)
        start += [
            _load(0, 16, _FRAME + 34),
            (_jump_if_equal(0, port), "match"),
            _load(0, 16, _FRAME + 36),
            (_jump_if_other(0, port), "pass"),
            "match",
        ]
    return start


# Instructions: a code, two registers, an offset and a value.


def _assemble(instructions: Sequence[bytes | str | tuple[bytes, str]]) -> bytes:
    """Return the program's bytes; a text is a label, and a jump comes with the label that it goes to."""
    labels: dict[str, int] = {}
    lines: list[tuple[bytes, str]] = []
    for instruction in instructions:
        if isinstance(instruction, str):
            labels[instruction] = len(lines)
        else:
            lines.append((instruction, "") if isinstance(instruction, bytes) else instruction)
    code = b""
    for place, (line, label) in enumerate(lines):
        code += line[:2] + struct.pack("<h", labels[label] - place - 1) + line[4:] if label else line
    return code


def _instruction(code: int, target: int = 0, source: int = 0, offset: int = 0, value: int = 0) -> bytes:
    return struct.pack("<BBhi", code, target | source << 4, offset, value)


def _move(target: int, source: int) -> bytes:
    return _instruction(0xBF, target, source)


def _move_value(target: int, value: int) -> bytes:
    return _instruction(0xB7, target, value=value)


def _add(target: int, source: int) -> bytes:
    return _instruction(0x0F, target, source)


def _add_value(target: int, value: int) -> bytes:
    return _instruction(0x07, target, value=value)


def _subtract(target: int, source: int) -> bytes:
    return _instruction(0x1F, target, source)


def _modulo(target: int, source: int) -> bytes:
    return _instruction(0x9F, target, source)


def _and_value(target: int, value: int) -> bytes:
    return _instruction(0x57, target, value=value)


def _xor(target: int, source: int) -> bytes:
    return _instruction(0xAF, target, source)


def _shift_left(target: int, value: int) -> bytes:
    return _instruction(0x67, target, value=value)


def _shift_left_by(target: int, source: int) -> bytes:
    return _instruction(0x6F, target, source)


def _shift_right(target: int, value: int) -> bytes:
    return _instruction(0x77, target, value=value)


def _from_big_endian16(target: int) -> bytes:
    return _instruction(0xDC, target, value=16)


def _load(target: int, bits: int, offset: int) -> bytes:
    """From the stack."""
    return _instruction({8: 0x71, 16: 0x69, 32: 0x61, 64: 0x79}[bits], target, 10, offset)


def _load_at(target: int, source: int) -> bytes:
    """64 bits from where a register points."""
    return _instruction(0x79, target, source)


def _store8(offset: int, source: int) -> bytes:
    return _instruction(0x73, 10, source, offset)


def _store_value32(offset: int, value: int) -> bytes:
    return _instruction(0x62, 10, 0, offset, value)


def _fetch_add(target: int, source: int) -> bytes:
    """Add a register to the 64 bits where another points, and get what was there."""
    return _instruction(0xDB, target, source, 0, 0x01)


def _load_map(target: int, fd: int) -> list[bytes]:
    return [_instruction(0x18, target, 1, value=fd), _instruction(0)]


def _call(helper: int) -> bytes:
    return _instruction(0x85, value=helper)


def _exit() -> bytes:
    return _instruction(0x95)


def _jump_if_equal(target: int, value: int) -> bytes:
    return _instruction(0x15, target, value=value)


def _jump_if_other(target: int, value: int) -> bytes:
    return _instruction(0x55, target, value=value)


def _jump32_if_other(target: int, value: int) -> bytes:
    return _instruction(0x56, target, value=value)


def _jump32_if_at_least(target: int, value: int) -> bytes:
    """Unsigned, so the value's upper half is written as a negative number."""
    return _instruction(0x36, target, value=value if value < 2**31 else value - 2**32)


def _jump_if_set(target: int, value: int) -> bytes:
    return _instruction(0x45, target, value=value)


def _jump_if_at_most(target: int, value: int) -> bytes:
    """Signed."""
    return _instruction(0xD5, target, value=value)


def _network16(value: int) -> int:
    return int(struct.unpack("=H", struct.pack(">H", value))[0])


# The system call.


def _element(fd: int, key: ctypes.Array[ctypes.c_char], content: ctypes.Array[ctypes.c_char]) -> bytes:
    return struct.pack("<IIQQQ", fd, 0, ctypes.addressof(key), ctypes.addressof(content), 0)


def _bpf(command: int, attributes: bytes, what: str) -> int:
    number = _SYSCALL.get(platform.machine())
    if number is None:
        raise ConfigError(f"half-open, lossy and flip are not known for processors of kind {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    # Newer kernels have more fields, all of which may be zero.
    buffer = ctypes.create_string_buffer(attributes.ljust(128, b"\0"), 128)
    result = int(libc.syscall(number, command, buffer, 128))
    if result < 0:
        error = ctypes.get_errno()
        if command != _PROG_LOAD:
            raise ConfigError(
                f"cannot {what} in the kernel ({os.strerror(error)}); half-open, lossy and flip need "
                "CONFIG_BPF_SYSCALL, and root outside of user namespaces"
            )
        raise OSError(error, os.strerror(error))
    return result
