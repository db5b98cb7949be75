"""Closes listeners that are not ours to strangers: those of torch's store and of gloo.

Neither asks who connects, and gloo keeps every connection that says nothing, until the process has no descriptors left.
Both listen for as long as their process lives. So once all workers are connected the kernel drops what others send to
such a listener: a filter on the socket (classic BPF, which needs no privileges) reads where a packet comes from.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

_SO_ATTACH_FILTER = 26
_NETWORK_HEADER = 0xFFF00000
"""Added to an offset: counted from the IP header (SKF_NET_OFF)."""
_LOAD_WORD, _LOAD_BYTE, _SHIFT_RIGHT, _IF_EQUAL, _JUMP, _RETURN = 0x20, 0x30, 0x74, 0x15, 0x05, 0x06
_ALL_OF_IT = 0xFFFFFFFF
Instruction = tuple[int, int, int, int]


@contextlib.contextmanager
def shut_afterwards(kept_port: int | None = None) -> Iterator[None]:
    """Let nobody connect, from the end of the context on, to what gloo opens inside, but at ``kept_port``.

    gloo listens at any free port of one address. What another thread of the process may open meanwhile is not touched
    if it listens everywhere, at a chosen port, or inside the machine, where no stranger comes from.
    """
    before = socket_inodes()
    yield
    for inode, found in open_sockets().items():
        with found:
            if inode not in before and is_listening(found):
                address, port = found.getsockname()[:2]
                if port != kept_port and _is_free_port(port) and not _is_shielded(address):
                    admit_only(found, ())


def admit_only_peers(port: int) -> None:
    """Let only those addresses connect to this process's listener at ``port`` from which somebody is connected now."""
    with contextlib.ExitStack() as closing:
        found = [closing.enter_context(one) for one in open_sockets().values()]
        inet = [one for one in found if one.family in (socket.AF_INET, socket.AF_INET6)]
        peers = set()
        for one in inet:
            # One that is not connected has no peer.
            with contextlib.suppress(OSError):
                if one.getsockname()[1] == port and not is_listening(one):
                    peers.add(one.getpeername()[0])
        for one in inet:
            if is_listening(one) and one.getsockname()[1] == port:
                admit_only(one, peers)


def admit_only(listener: socket.socket, addresses: Collection[str]) -> None:
    """Let the kernel drop what comes to a listener from elsewhere; where it cannot, nothing changes."""
    program = compile_filter(addresses)
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    held = ctypes.create_string_buffer(code, len(code))
    request = struct.pack("@HP", len(program), ctypes.addressof(held))
    with contextlib.suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, request)


def compile_filter(addresses: Collection[str]) -> list[Instruction]:
    """Return the program that accepts packets from these addresses: operation, two jumps, constant. Pure."""
    parsed = sorted({_plain(address) for address in addresses}, key=lambda one: one.packed)
    old = [one for one in parsed if one.version == 4]
    new = [one for one in parsed if one.version == 6]
    for_old: list[Instruction] = [(_LOAD_WORD, 0, 0, _NETWORK_HEADER + 12)]
    for one in old:
        for_old += [(_IF_EQUAL, 0, 1, int(one)), (_RETURN, 0, 0, _ALL_OF_IT)]
    for_old.append((_RETURN, 0, 0, 0))
    for_new: list[Instruction] = []
    for address in new:
        words = struct.unpack("!4I", address.packed)
        for place, word in enumerate(words):
            # Past the rest of this address: two instructions for each further word, and the return.
            for_new += [
                (_LOAD_WORD, 0, 0, _NETWORK_HEADER + 8 + 4 * place),
                (_IF_EQUAL, 0, 2 * (3 - place) + 1, word),
            ]
        for_new.append((_RETURN, 0, 0, _ALL_OF_IT))
    for_new.append((_RETURN, 0, 0, 0))
    version: list[Instruction] = [
        (_LOAD_BYTE, 0, 0, _NETWORK_HEADER),
        (_SHIFT_RIGHT, 0, 0, 4),
        (_IF_EQUAL, 0, 1, 6),
        (_JUMP, 0, 0, len(for_old)),
    ]
    return [*version, *for_old, *for_new]


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    # A listener for both families shows IPv4 peers so.
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return mapped or parsed


def _is_free_port(port: int) -> bool:
    """Return whether a port is of those that the system chooses."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    return first <= port <= last


def _is_shielded(address: str) -> bool:
    """Return whether a listener's address is all of the machine's, which gloo never uses, or none that others reach."""
    parsed = _plain(address)
    return parsed.is_unspecified or parsed.is_loopback


def socket_inodes() -> set[int]:
    """Return the numbers of this process's sockets."""
    return set(_sockets())


def _sockets() -> dict[int, int]:
    """Return this process's sockets: descriptors by inode."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        # Some are closed meanwhile, such as the one that lists them.
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            if target.startswith("socket:["):
                found[int(target[8:-1])] = int(entry.name)
    return found


def open_sockets() -> dict[int, socket.socket]:
    """Return copies of this process's sockets, by inode; to be closed."""
    found = {}
    for inode, handle in _sockets().items():
        with contextlib.suppress(OSError):
            copy = socket.socket(fileno=os.dup(handle))
            os.set_inheritable(copy.fileno(), False)
            found[inode] = copy
    return found


def is_listening(one: socket.socket) -> bool:
    """Return whether a socket is a listener of the network."""
    if one.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
