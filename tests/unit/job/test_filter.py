"""Listeners that are closed to strangers: what the kernel does, and what the program says."""

from __future__ import annotations

import socket
import struct
from contextlib import closing

import pytest

from poseidon.job.filter import Instruction, admit_only, admit_only_peers, compile_filter, shut_afterwards

SHORT_S = 0.15


def _can_connect(place: tuple[str, int], source: str) -> bool:
    try:
        socket.create_connection(place, SHORT_S, (source, 0)).close()
    except TimeoutError:
        return False
    return True


def _accepts(program: list[Instruction], packet: bytes) -> bool:
    """Run a program as the kernel would."""
    at, value = 0, 0
    while True:
        operation, if_true, if_false, constant = program[at]
        offset = (constant - 0xFFF00000) % 2**32
        at += 1
        if operation == 0x20:
            (value,) = struct.unpack_from("!I", packet, offset)
        elif operation == 0x30:
            value = packet[offset]
        elif operation == 0x74:
            value >>= constant
        elif operation == 0x15:
            at += if_true if value == constant else if_false
        elif operation == 0x05:
            at += constant
        else:
            assert operation == 0x06
            return bool(constant)


def _packet(source: str) -> bytes:
    if ":" in source:
        return b"\x60" + bytes(7) + socket.inet_pton(socket.AF_INET6, source) + bytes(40)
    return b"\x45" + bytes(11) + socket.inet_aton(source) + bytes(40)


@pytest.mark.parametrize(
    "admitted",
    [
        (),
        ("10.0.0.1",),
        ("10.0.0.1", "10.0.0.2", "::ffff:10.0.0.3"),
        ("fe80::1%eth0", "fd00::1"),
        ("fd00::1", "10.0.0.2"),
    ],
)
def test_a_program_accepts_its_addresses_and_no_others(admitted: tuple[str, ...]) -> None:
    program = compile_filter(admitted)
    plain = {address.partition("%")[0].removeprefix("::ffff:") for address in admitted}
    for source in ("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "fe80::1", "fd00::1", "fd00::2", "fd00:0:0:1::1"):
        assert _accepts(program, _packet(source)) == (source in plain), source


def test_a_listener_is_closed_to_all_but_some() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        place = listener.getsockname()
        assert _can_connect(place, "127.0.0.2")
        admit_only(listener, ("127.0.0.1",))
        assert _can_connect(place, "127.0.0.1")
        assert not _can_connect(place, "127.0.0.2")


def test_what_listens_inside_is_shut_and_its_connections_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    # This machine may have no other address.
    monkeypatch.setattr("poseidon.job.filter._is_shielded", lambda address: address == "127.0.0.9")
    with closing(socket.create_server(("127.0.0.1", 0))) as before:
        with shut_afterwards():
            inside = socket.create_server(("127.0.0.1", 0))
            shielded = socket.create_server(("127.0.0.9", 0))
            client = socket.create_connection(inside.getsockname(), SHORT_S)
            served, _ = inside.accept()
        with inside, client, served, shielded:
            assert _can_connect(shielded.getsockname(), "127.0.0.1")
            assert _can_connect(before.getsockname(), "127.0.0.1")
            assert not _can_connect(inside.getsockname(), "127.0.0.1")
            client.sendall(b"still here")
            assert served.recv(10) == b"still here"


def test_whoever_is_connected_may_come_again_and_nobody_else() -> None:
    # Sockets of other kinds are left alone.
    one, other = socket.socketpair()
    with closing(socket.create_server(("127.0.0.1", 0))) as listener, one, other:
        place = listener.getsockname()
        with socket.create_connection(place, SHORT_S, ("127.0.0.3", 0)), listener.accept()[0]:
            admit_only_peers(place[1])
            assert _can_connect(place, "127.0.0.3")
            assert not _can_connect(place, "127.0.0.2")
