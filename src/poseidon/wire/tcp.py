"""The wire between machines over plain TCP: the least work per byte that Python can do.

A thread per connection blocks in the kernel, which moves a whole payload in one call, directly between the socket and
its memory. Nothing is encrypted; both ends of a connection prove that they know the job's secret.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence

from poseidon.errors import ConfigError, FrameError, WireError
from poseidon.wire.address import Address, listening_ip
from poseidon.wire.cap import SharedBucket
from poseidon.wire.handshake import challenge, claim
from poseidon.wire.message import SIZE, Header, Kind, check_payload, pack, unpack
from poseidon.wire.network import LAST, NetworkTransport
from poseidon.wire.outbox import Outgoing
from poseidon.wire.pool import Pool
from poseidon.wire.reading import read_into, read_large, widen
from poseidon.wire.settings import LARGEST_BUFFER_BYTES, WireSettings
from poseidon.wire.share import BufferShare

HANDSHAKE_S = 10.0
RETRY_S = 0.2
STRANGERS = 64
"""Connections that may be in a handshake at a time; further ones are closed at once."""


class TcpTransport(NetworkTransport):
    """One rank's connections over TCP, with a thread for each incoming and each outgoing one."""

    def __init__(self, rank: int, size: int, secret: bytes, settings: WireSettings | None = None) -> None:
        super().__init__(rank, size, secret, settings or WireSettings())
        if self.settings.encrypt:
            raise ConfigError("the tcp carrier does not encrypt; choose the zeromq carrier with encrypt")
        self.listen(Kind.BYE, self._hear_goodbye)
        cap_mbit = self.settings.cap_mbit
        self._bucket = SharedBucket(cap_mbit) if cap_mbit else None
        self._senders: list[PeerSender] = []
        self._pool = Pool()
        self._lock = threading.Lock()
        self._incoming: dict[socket.socket, threading.Thread] = {}
        self._strangers = threading.BoundedSemaphore(STRANGERS)
        ip = listening_ip(self.settings)
        try:
            self._listener = socket.create_server((ip, 0), backlog=size * self.settings.streams_per_peer + STRANGERS)
        except OSError as error:
            raise WireError(f"rank {rank} cannot listen on {ip}: {error}; is it this machine's address?") from None
        self.address = str(Address(ip, (self._listener.getsockname()[1],), self._nonce))
        self._door = threading.Thread(target=self._admit, name="poseidon-wire-door", daemon=True)
        self._door.start()

    def connect(self, addresses: Sequence[str]) -> None:
        """Connect to all ranks, given their addresses by rank; blocks until every connection is open."""
        if len(addresses) != self.size:
            raise WireError(f"rank {self.rank} was given {len(addresses)} addresses for {self.size} ranks")
        deadline = time.monotonic() + self.settings.connect_timeout_s
        parsed = [Address.parse(text) for text in addresses]
        beyond = [peer for peer, address in enumerate(parsed) if address.ip != parsed[self.rank].ip]
        buffer_bytes = self.settings.send_buffer_bytes
        link = BufferShare(buffer_bytes, beyond if self.settings.balance else ())
        # Inside a machine packets are as large as the buffers of slow links, and would wait for each other in them.
        inside = BufferShare(max(buffer_bytes, LARGEST_BUFFER_BYTES), ())
        for peer, address in enumerate(parsed):
            streams = [self._open(peer, address, deadline) for _ in range(self.settings.streams_per_peer)]
            share = link if peer in beyond else inside
            self._senders.append(PeerSender(peer, streams, self._bucket, share, self._lose))
        self._is_connected = True

    def _queue(self, peer: int, message: Outgoing) -> None:
        self._senders[peer].put(message)

    def close(self) -> None:
        """Queue a goodbye to all, wait until everything has left, and end all threads."""
        if self._is_closed:
            return
        self._is_closed = True
        deadline = time.monotonic() + self.settings.close_timeout_s
        for sender in self._senders:
            sender.finish(pack(Header(Kind.BYE, self.rank, 0, 0, 0, 0)))
        for sender in self._senders:
            sender.join(deadline)
        _end(self._listener)
        self._door.join()
        with self._lock:
            incoming = dict(self._incoming)
        for connection in incoming:
            _end(connection)
        for thread in incoming.values():
            thread.join()

    # Incoming.

    def _admit(self) -> None:
        """Accept connections until the listener is closed."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if not self._strangers.acquire(blocking=False):
                self._refuse("too many strangers", f"more than {STRANGERS} connections are in a handshake")
                connection.close()
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="poseidon-wire-in", daemon=True)
            with self._lock:
                self._incoming[connection] = thread
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        """Receive on one connection until it ends."""
        sender = -1
        why = "its connection ended"
        try:
            with contextlib.closing(connection):
                sender = self._welcome(connection)
                self._receive(connection, sender)
        except FrameError as error:
            why = str(error)
            self._refuse(error.reason, why)
        except OSError as error:
            why = str(error)
            if sender < 0 and not self._is_closed:
                self._refuse("handshake", f"a connection ended inside its handshake: {error}")
        finally:
            with self._lock:
                self._incoming.pop(connection, None)
        if sender >= 0:
            self._lose(sender, why)

    def _welcome(self, connection: socket.socket) -> int:
        try:
            connection.settimeout(HANDSHAKE_S)
            sender = challenge(connection, self._secret, self.rank, self.size)
        finally:
            self._strangers.release()
        connection.settimeout(None)
        self._set_patience(connection)
        widen(connection)
        return sender

    def _receive(self, connection: socket.socket, sender: int) -> None:
        """Deliver the messages of ``sender`` until the connection ends or breaks the protocol."""
        head = bytearray(SIZE)
        view = memoryview(head)
        while (came := read_into(connection, view)) == SIZE:
            header = unpack(view)
            if header.sender != sender:
                raise FrameError("sender", f"rank {sender} sent a message in the name of {header.sender}")
            if header.length > self.settings.max_message_bytes:
                raise FrameError(
                    "length",
                    f"rank {sender} announced {header.length} bytes; the limit is {self.settings.max_message_bytes}",
                )
            self._take(connection, header)
        if came:
            raise FrameError("truncated", f"the connection of rank {sender} ended inside a header")

    def _take(self, connection: socket.socket, header: Header) -> None:
        """Read one payload and deliver it; a refused one is read too, to find the message after it."""
        refusal: FrameError | None = None
        payload: memoryview | None = None
        try:
            payload = self._place(header)
        except FrameError as error:
            refusal = error
        if payload is None:
            payload = self._pool.lend(header.length)
        if read_large(connection, payload) < header.length:
            raise FrameError("truncated", f"the connection of rank {header.sender} ended inside a payload")
        try:
            if refusal is not None:
                raise refusal
            check_payload(header, payload)
        except FrameError as error:
            self._refuse(error.reason, str(error))
        else:
            self._deliver(header, payload)

    def _hear_goodbye(self, header: Header, _payload: memoryview) -> None:
        self._departed.add(header.sender)

    # Outgoing.

    def _open(self, peer: int, address: Address, deadline: float) -> socket.socket:
        """Return an authenticated connection to ``peer``."""
        place = f"{address.ip}:{address.ports[0]}"
        while True:
            try:
                return self._try_to_open(peer, address, deadline)
            except FrameError as error:
                if error.reason != "handshake":
                    raise WireError(f"{error}; use the same on all workers") from None
                problem: Exception = error
            except OSError as error:
                problem = error
            # Too many strangers are gone after HANDSHAKE_S; nothing else recovers sooner.
            if isinstance(problem, OSError) or time.monotonic() + RETRY_S > deadline:
                raise WireError(
                    f"rank {self.rank} could not connect to rank {peer} at {place} within "
                    f"{self.settings.connect_timeout_s:g} s: {problem}; check that its machine is up and that no "
                    "firewall is in between"
                ) from None
            time.sleep(RETRY_S)

    def _try_to_open(self, peer: int, address: Address, deadline: float) -> socket.socket:
        with contextlib.ExitStack() as undo:
            connection = undo.enter_context(
                socket.create_connection(
                    (address.ip, address.ports[0]),
                    timeout=max(0.1, deadline - time.monotonic()),
                    source_address=(listening_ip(self.settings), 0),
                )
            )
            claim(connection, self._secret, self.rank, peer)
            undo.pop_all()
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.settings.congestion:
            # A kernel that does not have it, or reserves it for privileged users, keeps its own.
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, self.settings.congestion.encode())
        self._set_patience(connection)
        return connection

    def _set_patience(self, connection: socket.socket) -> None:
        """Let the kernel end the connection when the other machine does not answer for too long."""
        lost_after_s = self.settings.lost_after_s
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(lost_after_s * 1000))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(lost_after_s / 4)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(lost_after_s / 4)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)

    def _lose(self, peer: int, why: str) -> None:
        """Report that ``peer`` is gone, unless it said goodbye or this transport is closing."""
        with self._lock:
            if peer in self._departed or self._is_closed:
                return
            self._departed.add(peer)
        self._tell_lost(peer, why)


class PeerSender:
    """Sends to one peer: messages wait by urgency for the next free connection.

    A connection's thread hands over one message at a time, so an urgent one waits for the bytes in the kernel's buffer
    and for the rest of one message.
    """

    def __init__(
        self,
        peer: int,
        connections: Sequence[socket.socket],
        bucket: SharedBucket | None,
        share: BufferShare,
        on_broken: Callable[[int, str], None],
    ) -> None:
        self._peer = peer
        self._connections = connections
        self._bucket = bucket
        self._share = share
        self._buffer_bytes = dict.fromkeys(connections, 0)
        self._on_broken = on_broken
        self._is_broken = False
        self._numbers = itertools.count()
        self._heap: list[tuple[int, int, Outgoing]] = []
        self._lock = threading.Lock()
        # One token per message in the heap: a counter to wait on, a tenth as costly as a Semaphore or PriorityQueue.
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(connection,), name=f"poseidon-wire-to-{peer}", daemon=True)
            for connection in connections
        ]
        for thread in self._threads:
            thread.start()

    def put(self, message: Outgoing) -> None:
        """Queue a message; drop it if the peer is gone."""
        if not self._is_broken:
            self._share.add(self._peer, message.payload.nbytes)
            with self._lock:
                heapq.heappush(self._heap, (message.priority, next(self._numbers), message))
            self._tokens.put(None)

    def finish(self, goodbye: bytes) -> None:
        """End every connection with ``goodbye``, after what is queued."""
        for _ in self._threads:
            self.put(Outgoing(goodbye, memoryview(b""), LAST))

    def join(self, deadline: float) -> None:
        """Wait for the threads to end; after ``deadline`` cut their connections."""
        for connection, thread in zip(self._connections, self._threads, strict=True):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                # It is blocked in the connection, or in the queue behind others that are.
                _end(connection)
                self.put(Outgoing(b"", memoryview(b""), LAST))
                thread.join()

    def _run(self, connection: socket.socket) -> None:
        try:
            with contextlib.closing(connection):
                while self._send_next(connection):
                    pass
        except OSError as error:
            self._is_broken = True
            self._share.drop(self._peer)
            self._on_broken(self._peer, str(error))

    def _send_next(self, connection: socket.socket) -> bool:
        """Send the most urgent message, waiting for one if necessary; return False after the last."""
        self._tokens.get()
        with self._lock:
            priority, _, message = heapq.heappop(self._heap)
        payload = message.payload
        if self._bucket is not None:
            self._bucket.spend(SIZE + payload.nbytes)
        self._fit_buffer(connection)
        sent = connection.sendmsg([message.head, payload], [], socket.MSG_NOSIGNAL) - len(message.head)
        if sent < 0:
            raise OSError("the connection was cut inside a header")
        if sent < payload.nbytes:
            connection.sendall(payload[sent:])
        self._share.add(self._peer, -payload.nbytes)
        if message.on_sent is not None:
            message.on_sent()
        return priority != LAST

    def _fit_buffer(self, connection: socket.socket) -> None:
        """Give a connection the share of the link that its peer should have for the next message."""
        wanted = self._share.buffer_bytes(self._peer)
        if wanted != self._buffer_bytes[connection]:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, wanted)
            self._buffer_bytes[connection] = wanted


def _end(connection: socket.socket) -> None:
    """Close a connection that a thread is blocked in; closing alone would not wake the thread."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
