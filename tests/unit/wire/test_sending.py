"""One peer's sending threads, when they fail."""

from __future__ import annotations

import socket
import threading
import time

from poseidon.wire.sending import Outgoing, PeerSender
from poseidon.wire.share import BufferShare


def test_a_failure_is_told_before_the_peer_can_notice_it() -> None:
    here, there = socket.socketpair()
    there.setblocking(False)
    seen: list[tuple[str, str]] = []
    is_told = threading.Event()

    def note(_peer: int, error: Exception) -> None:
        try:
            what = f"{there.recv(1)!r}"
        except BlockingIOError:
            what = "nothing"
        seen.append((type(error).__name__, what))
        is_told.set()

    sender = PeerSender(1, [here], None, BufferShare(1 << 16, ()), note)
    with there:

        def fail() -> None:
            raise ZeroDivisionError

        sender.put(Outgoing(b"", memoryview(b""), on_sent=fail))
        assert is_told.wait(30)
        sender.join(time.monotonic() + 30)
        assert seen == [("ZeroDivisionError", "nothing")]
        assert there.recv(1) == b"", "the connection ends all the same"
