"""Large payloads beside TLS: they come as they were, or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import struct
import termios
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import NamedTuple

import pytest

from poseidon.errors import FrameError
from poseidon.wire import sealing, tls
from poseidon.wire.handshake import Credentials
from poseidon.wire.reading import LOW_WATER_BYTES, read_into, read_large, sealed_bulk_bytes, widen
from poseidon.wire.sealing import BLOCK_BYTES, SEALED_BYTES, TAG_BYTES, Seal, blocks_of
from poseidon.wire.sending import unacknowledged
from poseidon.wire.tls import TlsSocket
from poseidon.wire.writing import write_large, write_message

pytest.importorskip("cryptography", "50", reason="sealing needs cryptography 50 or newer")
KEY, SECRET = bytes(range(32)), b"0123456789abcdef"
PATIENCE_S = 30.0
SIZES = [SEALED_BYTES, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 5 * BLOCK_BYTES + 77]


def payload_of(size: int) -> memoryview:
    return memoryview(bytes(range(251)) * (size // 251 + 1))[:size]


def sealed(seal: Seal, payload: memoryview) -> list[bytes]:
    return [bytes(seal.close(block)) for block in blocks_of(payload)]


def opened(seal: Seal, blocks: list[bytes]) -> bytes:
    data = b""
    for block in blocks:
        seal.room(len(block) - TAG_BYTES)[:] = block
        memory = bytearray(len(block) - TAG_BYTES)
        seal.open(memoryview(memory))
        data += memory
    return data


@pytest.mark.parametrize("size", [1, *SIZES])
def test_what_was_sealed_opens_and_is_not_readable(size: int) -> None:
    payload = payload_of(size)
    blocks = sealed(Seal(KEY), payload)
    assert sum(map(len, blocks)) == size + TAG_BYTES * len(blocks)
    assert opened(Seal(KEY), blocks) == payload
    assert size < 100 or bytes(payload[:100]) not in b"".join(blocks)


@pytest.mark.parametrize("place", [0, 1000, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + TAG_BYTES - 1])
def test_one_changed_bit_opens_nothing(place: int) -> None:
    (block,) = sealed(Seal(KEY), payload_of(BLOCK_BYTES))
    damaged = bytearray(block)
    damaged[place] ^= 4
    seal, memory = Seal(KEY), bytearray(b"x") * BLOCK_BYTES
    seal.room(BLOCK_BYTES)[:] = damaged
    with pytest.raises(FrameError, match="changed on its way") as failure:
        seal.open(memoryview(memory))
    assert failure.value.reason == "seal"
    assert not any(memory), "what nobody vouches for stays in the destination"


def test_blocks_open_once_in_their_order_with_their_key() -> None:
    first, second, third = sealed(Seal(KEY), payload_of(3 * BLOCK_BYTES))
    for wrong in ([second], [first, third], [first, first]):
        with pytest.raises(FrameError):
            opened(Seal(KEY), wrong)
    with pytest.raises(FrameError):
        opened(Seal(KEY[::-1]), [first])


def test_equal_payloads_look_different() -> None:
    seal = Seal(KEY)
    assert sealed(seal, payload_of(5000)) != sealed(seal, payload_of(5000))


def test_a_key_is_replaced_after_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "BLOCKS_PER_KEY", 2)
    seal = Seal(KEY)
    blocks = [sealed(seal, payload_of(1000))[0] for _ in range(7)]
    assert len(set(blocks)) == 7, "a nonce came twice under one key"
    assert opened(Seal(KEY), blocks) == bytes(payload_of(1000)) * 7
    monkeypatch.setattr(sealing, "BLOCKS_PER_KEY", 100)
    with pytest.raises(FrameError):
        opened(Seal(KEY), blocks)


def test_so_much_is_always_left_to_come_that_the_reader_is_woken() -> None:
    for size in range(SEALED_BYTES, 8 * BLOCK_BYTES, 9973):
        bulk = sealed_bulk_bytes(size)
        assert bulk % BLOCK_BYTES == 0
        assert bulk <= max(0, size - LOW_WATER_BYTES)


class Ends(NamedTuple):
    """Both ends of an authenticated connection."""

    entering: TlsSocket
    listening: TlsSocket
    thread: ThreadPoolExecutor


@contextlib.contextmanager
def connected(monkeypatch: pytest.MonkeyPatch, can_enter: bool = True, can_listen: bool = True) -> Iterator[Ends]:
    cipher = sealing.find_cipher()
    credentials = []
    for can_seal in (can_enter, can_listen):
        with monkeypatch.context() as patch:
            patch.setattr(tls, "find_cipher", lambda can_seal=can_seal: cipher if can_seal else None)
            credentials.append(Credentials(SECRET, encrypt=True))
    with contextlib.ExitStack() as ends:
        listener = ends.enter_context(socket.create_server(("127.0.0.1", 0)))
        thread = ends.enter_context(ThreadPoolExecutor(1))
        plain = [socket.create_connection(listener.getsockname()), listener.accept()[0]]
        entering, listening = (
            ends.enter_context(one.wrap(end, is_listener=bool(number)))
            for number, (one, end) in enumerate(zip(credentials, plain, strict=True))
        )
        welcomed = thread.submit(credentials[1].welcome, listening, 0, 2, monotonic() + PATIENCE_S)
        credentials[0].enter(entering, 1, 0, monotonic() + PATIENCE_S)
        assert welcomed.result(PATIENCE_S) == 1
        assert isinstance(entering, TlsSocket)
        assert isinstance(listening, TlsSocket)
        for end in (entering, listening):
            end.settimeout(None)
        # A read that never ends by itself ends here, so that a thread can be joined.
        ends.callback(_shut, listening)
        widen(listening)
        yield Ends(entering, listening, thread)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


@pytest.mark.parametrize("held_bytes", [1, 1000, BLOCK_BYTES, BLOCK_BYTES + TAG_BYTES + 1, LOW_WATER_BYTES + 5])
def test_the_end_of_a_sealed_payload_waits_for_nothing_behind_it(
    held_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(monkeypatch) as ends:
        assert ends.entering.sealing is not None
        payload = payload_of(4 * LOW_WATER_BYTES + 5000)
        data = b"".join(sealed(ends.entering.sealing, payload))
        memory = bytearray(len(payload))
        reading = ends.thread.submit(read_large, ends.listening, memoryview(memory))
        socket.socket.sendall(ends.entering, data[:-held_bytes])
        # All that came is read but what the reader is not woken for.
        while unacknowledged(ends.entering) or _unread(ends.listening) > LOW_WATER_BYTES:
            assert not reading.done()
            select.select([], [], [], 0.001)
        socket.socket.sendall(ends.entering, data[-held_bytes:])
        assert reading.result(PATIENCE_S) == len(payload)
        assert memory == payload


def _unread(connection: socket.socket) -> int:
    (count,) = struct.unpack("i", fcntl.ioctl(connection, termios.FIONREAD, bytes(4)))
    return int(count)


@pytest.mark.parametrize("version", ["49.1.0", "3.4.8", "none"])
def test_a_package_that_is_too_old_or_broken_is_not_used(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(_name: str) -> str:
        return version

    monkeypatch.setattr(sealing.metadata, "version", find)
    sealing.find_cipher.cache_clear()
    try:
        assert sealing.find_cipher() is None
    finally:
        sealing.find_cipher.cache_clear()


def test_the_kernel_does_no_tls_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(monkeypatch) as ends:
        assert not ends.entering.context.options & 8
        assert not ends.listening.context.options & 8


@pytest.mark.parametrize(("can_enter", "can_listen"), [(True, True), (True, False), (False, True), (False, False)])
def test_messages_of_all_sizes_follow_each_other(
    can_enter: bool, can_listen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(monkeypatch, can_enter, can_listen) as ends:
        assert (ends.entering.sealing is not None) == (can_enter and can_listen) == (ends.listening.opening is not None)
        sizes = [0, 5, SEALED_BYTES - 1, *SIZES, 3, 3 * LOW_WATER_BYTES, 0]

        def send() -> None:
            for number, size in enumerate(sizes):
                write_message(ends.entering, bytes([number]) * 40, payload_of(size))

        sending = ends.thread.submit(send)
        for number, size in enumerate(sizes):
            head, memory = bytearray(40), bytearray(size)
            assert read_into(ends.listening, memoryview(head)) == 40
            assert head == bytes([number]) * 40
            assert read_large(ends.listening, memoryview(memory)) == size
            assert memory == payload_of(size)
        sending.result(PATIENCE_S)
        # And the other way, as a state comes to a joining worker.
        back = payload_of(2 * BLOCK_BYTES + 9)
        sending = ends.thread.submit(write_large, ends.listening, back)
        memory = bytearray(len(back))
        assert read_large(ends.entering, memoryview(memory)) == len(back)
        assert memory == back


def test_the_two_directions_and_two_connections_have_keys_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(monkeypatch) as one, connected(monkeypatch) as other:
        seals = [one.entering.sealing, one.listening.sealing, other.entering.sealing, other.listening.sealing]
        payload = payload_of(1000)
        assert len({bytes(seal.close(payload)) for seal in seals if seal is not None}) == 4


def test_a_payload_that_ends_early_is_told_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(monkeypatch) as ends:
        assert ends.entering.sealing is not None
        whole = bytes(ends.entering.sealing.close(payload_of(BLOCK_BYTES)))
        socket.socket.sendall(ends.entering, whole + whole[:1000])
        socket.socket.shutdown(ends.entering, socket.SHUT_RDWR)
        assert read_large(ends.listening, memoryview(bytearray(3 * BLOCK_BYTES))) == BLOCK_BYTES


def test_bytes_that_somebody_else_put_in_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(monkeypatch) as ends:
        junk = bytes(BLOCK_BYTES + TAG_BYTES)
        writing = threading.Thread(target=socket.socket.sendall, args=(ends.entering, junk))
        writing.start()
        with pytest.raises(FrameError, match="changed on its way"):
            read_large(ends.listening, memoryview(bytearray(BLOCK_BYTES)))
        writing.join(PATIENCE_S)
