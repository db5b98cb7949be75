"""A payload comes in whole, however it was cut up, and its end waits for nothing behind it."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from poseidon.wire.reading import LOW_WATER_BYTES, read_large, widen

PATIENCE_S = 30.0


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of a connection over loopback; a read that never ends fails the test."""
    with contextlib.ExitStack() as ends:
        listener = ends.enter_context(socket.create_server(("127.0.0.1", 0)))
        sender = ends.enter_context(socket.create_connection(listener.getsockname()))
        receiver = ends.enter_context(listener.accept()[0])
        receiver.settimeout(PATIENCE_S)
        yield sender, receiver


@contextlib.contextmanager
def sending(sender: socket.socket, payload: bytes, piece: int, *, is_last: bool = False) -> Iterator[None]:
    """Send ``payload`` in pieces meanwhile, and end the connection behind the last."""

    def send() -> None:
        for start in range(0, len(payload), piece):
            sender.sendall(payload[start : start + piece])
        if is_last:
            sender.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=send)
    thread.start()
    yield
    thread.join()


def payload_of(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


@pytest.mark.parametrize(
    "size",
    [0, 1, LOW_WATER_BYTES, 2 * LOW_WATER_BYTES - 1, 2 * LOW_WATER_BYTES, 2 * LOW_WATER_BYTES + 1, 5_000_011],
)
@pytest.mark.parametrize("piece", [1_000_003, 8 << 20])
def test_the_end_of_a_payload_waits_for_nothing_behind_it(size, piece):
    sent = payload_of(size)
    memory = bytearray(size)
    with connected() as (sender, receiver):
        with sending(sender, sent, piece):
            # The connection stays open and silent behind the payload.
            assert read_large(receiver, memoryview(memory)) == size
        # And the next message, however short, is seen at once.
        sender.sendall(b"next")
        assert receiver.recv(10) == b"next"
    assert bytes(memory) == sent


@pytest.mark.parametrize("came", [0, 1000, LOW_WATER_BYTES + 7, 3 * LOW_WATER_BYTES, 4 * LOW_WATER_BYTES - 1])
def test_a_payload_cut_short_is_told_apart(came):
    size = 4 * LOW_WATER_BYTES
    with connected() as (sender, receiver), sending(sender, payload_of(came), size, is_last=True):
        assert read_large(receiver, memoryview(bytearray(size))) == came


def test_a_widened_connection_holds_more_than_it_wakes_for():
    with connected() as (sender, receiver):
        widen(receiver)
        assert receiver.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) > 2 * LOW_WATER_BYTES
        # Yet a single byte is seen at once.
        sender.sendall(b"x")
        assert receiver.recv(10) == b"x"
