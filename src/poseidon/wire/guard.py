"""Guards a ZeroMQ transport: authenticates connections, counts refusals, notices peers that left without a goodbye.

One thread answers ZeroMQ's authentication requests (ZAP, RFC 27), before any message of a connection is read, and
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
"""The end of a connection may be seen while its goodbye is still queued behind other messages."""

Check = Callable[[str, Sequence[bytes]], int | None]
"""Returns the rank that the credentials of a mechanism prove, or None."""


class ConnectionObserver(Protocol):
    """Receives the guard's events, on its thread."""

    def connected(self, peer: int) -> None:
        """Note that a connection to ``peer`` is open."""

    def rejected(self, peer: int, why: str) -> None:
        """Note that the listener of ``peer`` refused this rank."""

    def disconnected(self, peer: int) -> None:
        """Note that the connection to ``peer`` has been gone for a while."""

    def refused(self, reason: str, message: str) -> None:
        """Note that a stranger's connection was refused."""


class Guard:
    """Watches the listening sockets and those of each peer; create it before any of them binds or connects."""

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
        """Peers whose connection has ended, and when to report them."""
        self._thread = threading.Thread(target=self._run, name="poseidon-wire-guard", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread to end, after the context was terminated."""
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
                _FAILED[kind], f"a connection to {event['endpoint'].decode()} spoke another protocol"
            )

    def _answer(self, request: Sequence[bytes]) -> None:
        """Accept a connection if its credentials prove a rank."""
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
            self._observer.rejected(peer, "it has another secret")
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
