"""The wire between machines over ZeroMQ, with connections from every rank to every rank.

Each rank listens on one address with a PULL socket per receive thread, and has PUSH sockets to all ranks, itself
included. A connection is accepted only if it proves a rank with the job's secret. Payloads are sent without a copy and
arrive in memory that handlers may keep.
"""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import zmq
from zmq.utils import z85

from poseidon.errors import FrameError, WireError
from poseidon.wire.address import Address, listening_ip
from poseidon.wire.guard import Guard
from poseidon.wire.message import SIZE, Header, Kind, check_payload, pack, unpack
from poseidon.wire.network import LAST, NetworkTransport
from poseidon.wire.outbox import Outgoing
from poseidon.wire.sending import Pacer, Sender
from poseidon.wire.settings import WireSettings

GOODBYE_S = 2.0
"""How long a goodbye may take to leave."""


class ZeroMQTransport(NetworkTransport):
    """One rank's connections over ZeroMQ."""

    def __init__(self, rank: int, size: int, secret: bytes, settings: WireSettings | None = None) -> None:
        super().__init__(rank, size, secret, settings or WireSettings())
        self._news = threading.Condition()
        self._open: dict[int, int] = dict.fromkeys(range(size), 0)
        self._rejected: dict[int, str] = {}
        self.listen(Kind.BYE, self._hear_goodbye)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=self.settings.io_threads)
        self._listeners = [self._make_listener() for _ in range(self.settings.receive_threads)]
        self._outlets = [[self._make_outlet() for _ in range(self.settings.streams_per_peer)] for _ in range(self.size)]
        self._pacer = Pacer(self.settings.cap_mbit) if self.settings.cap_mbit else None
        self._senders = [
            Sender(outlets, self.settings.in_flight_bytes, self._pacer, self._notify) for outlets in self._outlets
        ]
        peers = {outlet: peer for peer, outlets in enumerate(self._outlets) for outlet in outlets}
        self._guard = Guard(self._context, self._make_check(), self._listeners, peers, self)
        self.address = str(self._bind())
        self._threads = [
            threading.Thread(target=self._receive, args=(listener,), name=f"poseidon-wire-{number}", daemon=True)
            for number, listener in enumerate(self._listeners)
        ]
        for thread in self._threads:
            thread.start()
        if self._pacer is not None:
            self._pacer.start(self._senders)

    def connect(self, addresses: Sequence[str]) -> None:
        """Connect to all ranks, given their addresses by rank; blocks until every connection is open."""
        if len(addresses) != self.size:
            raise WireError(f"rank {self.rank} was given {len(addresses)} addresses for {self.size} ranks")
        for peer, text in enumerate(addresses):
            address = Address.parse(text)
            for stream, outlet in enumerate(self._outlets[peer]):
                self._identify(outlet, peer, address.nonce)
                outlet.connect(address.endpoint(self.rank, stream))
        with self._news:
            self._news.wait_for(lambda: self._rejected or not self._unreached(), self.settings.connect_timeout_s)
            if self._rejected:
                peer, why = next(iter(self._rejected.items()))
                raise WireError(
                    f"rank {peer} at {addresses[peer]} refused rank {self.rank}: {why}; use the same on all workers"
                )
            if unreached := self._unreached():
                raise WireError(
                    f"rank {self.rank} could not connect to ranks {unreached} within "
                    f"{self.settings.connect_timeout_s:g} s (rank {unreached[0]} is at {addresses[unreached[0]]}); "
                    "check that their machines are up and that no firewall is in between"
                )
        self._is_connected = True

    def _queue(self, peer: int, message: Outgoing) -> None:
        self._senders[peer].send(message)

    def close(self) -> None:
        """Queue a goodbye to all, wait until everything has left, and end all threads."""
        if self._is_closed:
            return
        self._is_closed = True
        deadline = time.monotonic() + self.settings.close_timeout_s
        if self._is_connected:
            goodbye = pack(Header(Kind.BYE, self.rank, 0, 0, 0, 0))
            for sender in self._senders:
                sender.send(Outgoing(goodbye, memoryview(b""), LAST))
            with self._news:
                self._news.wait_for(self._is_flushed, max(0.0, deadline - time.monotonic()))
        if self._pacer is not None:
            self._pacer.close()
        for peer, sender in enumerate(self._senders):
            # Large payloads have left. What may still be queued is small, and a peer that is gone does not need it.
            listens = self._is_connected and peer not in self._departed
            sender.close(min(GOODBYE_S, max(0.0, deadline - time.monotonic())) if listens else 0.0)
        # Wakes the threads, which close their own sockets, and returns when all are closed and flushed.
        self._context.term()
        for thread in self._threads:
            thread.join()
        self._guard.join()

    # Events from the guard, on its thread.

    def connected(self, peer: int) -> None:
        """Count an open connection to ``peer``."""
        with self._news:
            self._open[peer] += 1
            self._news.notify_all()

    def rejected(self, peer: int, why: str) -> None:
        """Remember that ``peer`` refused this rank."""
        with self._news:
            self._rejected[peer] = why
            self._news.notify_all()

    def disconnected(self, peer: int) -> None:
        """Report that ``peer`` is gone, unless it said goodbye or this transport is closing."""
        if peer in self._departed or self._is_closed or not self._is_connected:
            return
        self._departed.add(peer)
        self._tell_lost(peer, f"its connection to rank {self.rank} ended")

    def refused(self, reason: str, message: str) -> None:
        """Count a connection that was refused."""
        self._refuse(reason, message)

    # Sockets.

    def _make_listener(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PULL)
        socket.rcvhwm = self.settings.receive_queue
        socket.maxmsgsize = self.settings.max_message_bytes
        socket.handshake_ivl = 10_000
        socket.zap_domain = b"poseidon"
        if self.settings.encrypt:
            socket.curve_publickey, socket.curve_secretkey = self._secret.keys("listener", self._nonce, self.rank)
            socket.curve_server = True
        else:
            socket.plain_server = True
        return socket

    def _make_outlet(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        # The outbox limits what is queued; a second limit here would block the sender.
        socket.sndhwm = 0
        socket.sndbuf = self.settings.send_buffer_bytes
        socket.tcp_maxrt = int(self.settings.lost_after_s * 1000)
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = max(1, int(self.settings.lost_after_s / 4))
        socket.tcp_keepalive_cnt = 3
        socket.reconnect_ivl_max = 5_000
        return socket

    def _bind(self) -> Address:
        ip = listening_ip(self.settings)
        try:
            ports = tuple(listener.bind_to_random_port(f"tcp://{ip}") for listener in self._listeners)
        except zmq.ZMQError as error:
            self._is_closed = True
            for socket in (*self._listeners, *(outlet for outlets in self._outlets for outlet in outlets)):
                socket.close(linger=0)
            self._context.term()
            self._guard.join()
            raise WireError(f"rank {self.rank} cannot listen on {ip}: {error}; is it this machine's address?") from None
        return Address(ip, ports, self._nonce)

    def _identify(self, outlet: zmq.Socket[bytes], peer: int, nonce: str) -> None:
        """Give a socket the credentials that prove this rank to ``peer``."""
        if self.settings.encrypt:
            outlet.curve_publickey, outlet.curve_secretkey = self._secret.keys("sender", "", self.rank)
            outlet.curve_serverkey = self._secret.keys("listener", nonce, peer)[0]
        else:
            outlet.plain_username = str(self.rank).encode()
            outlet.plain_password = self._secret.password(nonce, self.rank, peer).encode()

    def _make_check(self) -> Callable[[str, Sequence[bytes]], int | None]:
        """Return the function that maps credentials to the rank they prove."""
        if self.settings.encrypt:
            keys = {z85.decode(self._secret.keys("sender", "", rank)[0]): rank for rank in range(self.size)}
            return lambda mechanism, credentials: keys.get(credentials[0]) if mechanism == "CURVE" else None
        passwords = {
            str(rank).encode(): self._secret.password(self._nonce, rank, self.rank).encode()
            for rank in range(self.size)
        }

        def check(mechanism: str, credentials: Sequence[bytes]) -> int | None:
            if mechanism != "PLAIN" or len(credentials) != 2 or credentials[0] not in passwords:
                return None
            return int(credentials[0]) if hmac.compare_digest(passwords[credentials[0]], credentials[1]) else None

        return check

    # Waiting.

    def _unreached(self) -> list[int]:
        return [peer for peer, count in self._open.items() if count < self.settings.streams_per_peer]

    def _is_flushed(self) -> bool:
        return all(sender.is_idle or peer in self._departed for peer, sender in enumerate(self._senders))

    def _notify(self) -> None:
        if self._is_closed:
            with self._news:
                self._news.notify_all()

    # Receiving.

    def _receive(self, listener: zmq.Socket[bytes]) -> None:
        """Deliver the messages of one socket until the context ends."""
        nothing = zmq.Frame(b"")
        try:
            while True:
                head = listener.recv(copy=False)
                payload = listener.recv(copy=False) if head.more else nothing
                try:
                    self._accept(head, payload)
                except FrameError as error:
                    self._refuse(error.reason, str(error))
                    _skip_rest(listener, payload)
        except zmq.ContextTerminated:
            listener.close(linger=0)

    def _accept(self, head: zmq.Frame, payload: zmq.Frame) -> None:
        """Check one message and pass it to its handler."""
        if payload.more:
            raise FrameError("parts", "a message has more than two parts")
        if len(head) != SIZE:
            raise FrameError("header size", f"a header has {len(head)} bytes; expected {SIZE}")
        view = payload.buffer
        header = unpack(head.bytes, view.nbytes)
        if head.get("User-Id") != str(header.sender):
            raise FrameError("sender", f"rank {head.get('User-Id')} sent a message in the name of {header.sender}")
        check_payload(header, view)
        place = self._place(header)
        if place is not None:
            np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(view, np.uint8))
            view = place
        self._deliver(header, view)

    def _hear_goodbye(self, header: Header, _payload: memoryview) -> None:
        self._departed.add(header.sender)
        self._notify()


def _skip_rest(listener: zmq.Socket[bytes], part: zmq.Frame) -> None:
    while part.more:
        part = listener.recv(copy=False)
