"""What a handshake that fails is called."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from poseidon.errors import FrameError
from poseidon.wire.handshake import _CHALLENGE, _CLAIM, _MAGIC, challenge, claim
from poseidon.wire.secret import JobSecret

OURS, THEIRS = JobSecret(b"sixteen bytes or more"), JobSecret(b"another secret, as long")


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def soon(limit_s: float = 5.0) -> float:
    return time.monotonic() + limit_s


def test_another_secret_is_called_so_at_both_ends(ends) -> None:
    near, far = ends
    with ThreadPoolExecutor(1) as threads:
        listening = threads.submit(challenge, far, THEIRS, 0, 2, soon())
        with pytest.raises(FrameError, match="rank 0 refused rank 1: it has another secret") as caught:
            claim(near, OURS, 1, 0, soon())
        assert caught.value.reason == "wrong secret"
        with pytest.raises(FrameError, match="a connection as rank 1 does not know this job's secret"):
            listening.result()


def test_a_listener_that_only_pretends_is_found(ends) -> None:
    near, far = ends
    far.sendall(_CHALLENGE.pack(_MAGIC, bytes(16)) + b"x" * 32)
    with pytest.raises(FrameError, match="the listener of rank 0 does not know this job's secret"):
        claim(near, OURS, 1, 0, soon())


def test_a_listener_that_falls_silent_is_slow_and_has_no_other_secret(ends) -> None:
    near, far = ends
    far.sendall(_CHALLENGE.pack(_MAGIC, bytes(16)))
    with pytest.raises(FrameError, match="only 0 of 32 bytes of a handshake came in time") as caught:
        claim(near, OURS, 1, 0, soon(0.05))
    assert caught.value.reason == "slow handshake"


def test_a_listener_that_goes_away_has_no_other_secret(ends) -> None:
    near, far = ends
    far.sendall(_CHALLENGE.pack(_MAGIC, bytes(16)))
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(FrameError, match="a connection ended inside a handshake") as caught:
        claim(near, OURS, 1, 0, soon())
    assert caught.value.reason == "handshake"
    assert len(far.recv(1000)) == _CLAIM.size
