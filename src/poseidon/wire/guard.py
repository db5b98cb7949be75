"""The door of a transport: who may connect, what was turned away, and which peer went without a goodbye.

One thread answers ZeroMQ's questions about new connections (ZAP, RFC 27) before any of their messages is read, and
follows the events of all sockets.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_FAILED = {
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "handshake",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "handshake",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "wrong secret",
}
_EVENTS = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED
for _event in _FAILED:
    _EVENTS |= _event

GOODBYE_GRACE_S = 1.0
"""A goodbye may be queued behind other messages when the connection's end is seen already."""

Check = Callable[[str, Sequence[bytes]], int | None]
"""Returns the rank that a mechanism's credentials prove, or None."""


class ConnectionObserver(Protocol):
    """What the guard tells; all on its thread."""

    def connected(self, peer: int) -> None:
        """Report that a connection to ``peer`` is open."""

    def rejected(self, peer: int, why: str) -> None:
        """Report that ``peer`` turned this rank away."""

    def disconnected(self, peer: int) -> None:
        """Report that ``peer`` has been without connection for a while."""

    def refused(self, reason: str, message: str) -> None:
        """Report that a stranger was turned away."""


class Guard:
    """Watches the listening sockets and those of each peer; made before any of them binds or connects."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        check: Check,
        listeners: Sequence[zmq.Socket[bytes]],
        peers: Mapping[zmq.Socket[bytes], int],
        observer: ConnectionObserver,
    ) -> None:
        self._check = check
        self._observer = observer
        self._door = context.socket(zmq.REP)
        self._door.bind(_ZAP_ENDPOINT)
        self._listeners = [socket.get_monitor_socket(_EVENTS) for socket in listeners]
        self._peers = {socket.get_monitor_socket(_EVENTS): peer for socket, peer in peers.items()}
        self._missing: dict[int, float] = {}
        """Peers whose connection ended, and when to report them."""
        self._thread = threading.Thread(target=self._run, name="poseidon-wire-guard", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread to end; the context must have been terminated."""
        self._thread.join()

    def _run(self) -> None:
        poller = zmq.Poller()
        sockets = [self._door, *self._listeners, *self._peers]
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        try:
            while True:
                for socket, _ in poller.poll(self._patience_ms()):
                    self._serve(socket)
                self._report_missing()
        except zmq.ContextTerminated:
            for socket in sockets:
                socket.close(linger=0)

    def _serve(self, socket: zmq.Socket[bytes]) -> None:
        if socket is self._door:
            self._answer(socket.recv_multipart())
            return
        event = parse_monitor_message(socket.recv_multipart())
        kind = zmq.Event(event["event"])
        if socket in self._peers:
            self._see_peer(self._peers[socket], kind)
        elif kind in _FAILED and _FAILED[kind] != "wrong secret":
            self._observer.refused(
                _FAILED[kind], f"a connection to {event['endpoint'].decode()} spoke another language"
            )

    def _answer(self, request: Sequence[bytes]) -> None:
        """Let a connection in if its credentials prove a rank."""
        version, number, _domain, address, _identity, mechanism, *credentials = request
        rank = self._check(mechanism.decode(), credentials)
        if rank is None:
            self._observer.refused(
                "wrong secret", f"a connection from {address.decode()} does not know this job's secret"
            )
            self._door.send_multipart([version, number, b"400", b"refused", b"", b""])
        else:
            self._door.send_multipart([version, number, b"200", b"OK", str(rank).encode(), b""])

    def _see_peer(self, peer: int, kind: zmq.Event) -> None:
        if kind == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._missing.pop(peer, None)
            self._observer.connected(peer)
        elif kind == zmq.Event.HANDSHAKE_FAILED_AUTH:
            self._observer.rejected(peer, "it was given another secret")
        elif kind == zmq.Event.DISCONNECTED:
            self._missing.setdefault(peer, time.monotonic() + GOODBYE_GRACE_S)

    def _patience_ms(self) -> int | None:
        if not self._missing:
            return None
        return max(0, int((min(self._missing.values()) - time.monotonic()) * 1000)) + 1

    def _report_missing(self) -> None:
        now = time.monotonic()
        for peer in [peer for peer, when in self._missing.items() if when <= now]:
            del self._missing[peer]
            self._observer.disconnected(peer)
