"""A payload comes in whole, however it was cut up, and its end waits for nothing behind it."""

import contextlib
import fcntl
import socket
import ssl
import struct
import termios
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from patience import comes_true
from poseidon.wire.reading import LOW_WATER_BYTES, read_large, widen
from poseidon.wire.secret import JobSecret
from poseidon.wire.tls import RECORD_BYTES, Tls

PATIENCE_S = 30.0
HELD_BACK_BYTES = 70_000
"""Less than a receiver of large payloads is woken for."""


class Reader:
    """Both ends of a connection over loopback, and a thread that may read from it."""

    def __init__(self, sender: socket.socket, receiver: socket.socket, thread: ThreadPoolExecutor) -> None:
        self.sender = sender
        self.receiver = receiver
        self._thread = thread

    def read(self, size: int) -> tuple[Future[int], bytearray]:
        memory = bytearray(size)
        return self._thread.submit(read_large, self.receiver, memoryview(memory)), memory

    def all_is_read(self, unread_bytes: int = 0) -> bool:
        """Whether nothing is under way and no more than ``unread_bytes`` wait to be read."""
        return _ask(self.sender, termios.TIOCOUTQ) == 0 and _ask(self.receiver, termios.FIONREAD) <= unread_bytes


def _ask(connection: socket.socket, question: int) -> int:
    (answer,) = struct.unpack("i", fcntl.ioctl(connection, question, bytes(4)))
    return int(answer)


@pytest.fixture
def reader() -> Iterator[Reader]:
    with contextlib.ExitStack() as ends:
        listener = ends.enter_context(socket.create_server(("127.0.0.1", 0)))
        thread = ends.enter_context(ThreadPoolExecutor(1))
        sender = ends.enter_context(socket.create_connection(listener.getsockname()))
        receiver = ends.enter_context(listener.accept()[0])
        # A read that never ends by itself ends here, so that the thread can be joined.
        ends.callback(lambda: _shut(receiver))
        yield Reader(sender, receiver, thread)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def payload_of(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


@pytest.mark.parametrize(
    "size",
    [0, 1, LOW_WATER_BYTES, 2 * LOW_WATER_BYTES - 1, 2 * LOW_WATER_BYTES, 2 * LOW_WATER_BYTES + 1, 5_000_011],
)
def test_the_end_of_a_payload_waits_for_nothing_behind_it(reader, size):
    sent = payload_of(size)
    future, memory = reader.read(size)
    first = max(0, size - HELD_BACK_BYTES)
    reader.sender.sendall(sent[:first])
    # Few bytes are left, and they come in many packets; the connection stays open and silent behind them.
    # Where the low-water mark is used, the kernel may hold less than that back until the rest has come.
    held_bytes = LOW_WATER_BYTES - 1 if size >= 2 * LOW_WATER_BYTES else 0
    assert comes_true(lambda: reader.all_is_read(held_bytes), PATIENCE_S)
    for start in range(first, size, 1000):
        reader.sender.sendall(sent[start : start + 1000])
    assert future.result(PATIENCE_S) == size
    assert bytes(memory) == sent
    # And the next message, however short, is seen at once.
    future, memory = reader.read(4)
    reader.sender.sendall(b"next")
    assert future.result(PATIENCE_S) == 4
    assert bytes(memory) == b"next"


@pytest.mark.parametrize("came", [0, 1000, LOW_WATER_BYTES + 7, 3 * LOW_WATER_BYTES, 4 * LOW_WATER_BYTES - 1])
def test_a_payload_cut_short_is_told_apart(reader, came):
    future, _ = reader.read(4 * LOW_WATER_BYTES)
    reader.sender.sendall(payload_of(came))
    reader.sender.shutdown(socket.SHUT_WR)
    assert future.result(PATIENCE_S) == came


def test_a_thread_that_waits_for_much_can_be_ended(reader):
    future, _ = reader.read(4 * LOW_WATER_BYTES)
    reader.sender.sendall(bytes(1000))
    _shut(reader.receiver)
    assert future.result(PATIENCE_S) < 4 * LOW_WATER_BYTES


def test_a_widened_connection_holds_more_than_it_wakes_for(reader):
    level = socket.SOL_SOCKET
    before = reader.receiver.getsockopt(level, socket.SO_RCVBUF)
    widen(reader.receiver)
    assert reader.receiver.getsockopt(level, socket.SO_RCVLOWAT) == 1
    after = reader.receiver.getsockopt(level, socket.SO_RCVBUF)
    reader.receiver.setsockopt(level, socket.SO_RCVLOWAT, LOW_WATER_BYTES)
    if reader.receiver.getsockopt(level, socket.SO_RCVLOWAT) < LOW_WATER_BYTES:
        pytest.skip("this system's receive buffers are too small to wait for much")
    # Asking for more than was there before is what widens it.
    assert after >= before
    assert after > 2 * LOW_WATER_BYTES


def test_an_encrypted_payload_comes_in_whole_wherever_a_record_is_cut(reader):
    tls = Tls(JobSecret(b"0123456789abcdef"))
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    line = tls._connecting.wrap_bio(received, sent, server_side=False)
    reader.receiver = tls.wrap(reader.receiver, is_listener=True)
    hands = reader._thread.submit(Tls.shake_hands, reader.receiver, "the test", time.monotonic() + PATIENCE_S)
    while True:
        try:
            line.do_handshake()
            break
        except ssl.SSLWantReadError:
            reader.sender.sendall(sent.read())
            received.write(reader.sender.recv(1 << 16))
    reader.sender.sendall(sent.read())
    hands.result(PATIENCE_S)
    reader.receiver.settimeout(None)
    widen(reader.receiver)
    # A record begins with a little more than the low-water mark to come, and less is left in the middle of it.
    payload = payload_of(2 * LOW_WATER_BYTES + 5000)
    future, memory = reader.read(len(payload))
    line.write(payload)
    data = sent.read()
    cut = LOW_WATER_BYTES // RECORD_BYTES * (RECORD_BYTES + 22) + 10_000
    reader.sender.sendall(data[:cut])
    assert comes_true(reader.all_is_read, PATIENCE_S)
    reader.sender.sendall(data[cut:])
    with contextlib.closing(reader.receiver):
        assert future.result(PATIENCE_S) == len(payload)
    assert memory == payload
