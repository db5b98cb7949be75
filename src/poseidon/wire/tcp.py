"""The wire between machines over TCP: the least work per byte that Python can do.

A thread per connection blocks in the kernel, which moves a whole payload in one call, directly between the socket and
its memory. Both ends of a connection prove that they know the job's secret (``handshake.py``); with ``encrypt``, TLS
carries everything (``tls.py``).

Whatever a peer does wrong once it is known, a message that is damaged, unexpected or cannot be handled, ends its
connection, and the peer counts as lost: what it sends next could not be trusted.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import zlib
from collections.abc import Callable, Sequence

from poseidon.errors import FrameError, WireError
from poseidon.wire.address import Address, listening_ip
from poseidon.wire.cap import SharedBucket
from poseidon.wire.handshake import Credentials
from poseidon.wire.message import CHECKED, SIZE, Header, Kind, check_payload, pack, unpack
from poseidon.wire.pool import Pool
from poseidon.wire.reading import read_into, read_large, widen
from poseidon.wire.sending import CUT_S, Outgoing, PeerSender, shut
from poseidon.wire.settings import LARGEST_BUFFER_BYTES, WireSettings
from poseidon.wire.share import BufferShare
from poseidon.wire.transport import Transport

_log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
"""For a whole handshake, however slowly its bytes come."""
RETRY_S = 0.2
STRANGERS = 64
"""Connections that may be in a handshake at a time; a further one ends the oldest, which has had the most time."""


class TcpTransport(Transport):
    """One rank's connections over TCP, with a thread for each incoming and each outgoing one.

    It listens at ``address`` from construction on, and can send after ``connect``.
    """

    def __init__(self, rank: int, size: int, secret: bytes, settings: WireSettings | None = None) -> None:
        super().__init__(rank, size)
        self.settings = settings or WireSettings()
        self._credentials = Credentials(secret, self.settings.encrypt)
        self.listen(Kind.BYE, self._hear_goodbye)
        cap_mbit = self.settings.cap_mbit
        self._bucket = SharedBucket(cap_mbit) if cap_mbit else None
        self._senders: list[PeerSender] = []
        self._pool = Pool()
        self._lock = threading.Lock()
        self._departed: set[int] = set()
        """Ranks that said goodbye or were reported lost."""
        self._incoming: dict[socket.socket, threading.Thread] = {}
        self._strangers: dict[socket.socket, None] = {}
        """Connections in a handshake, the oldest first."""
        self._announced: frozenset[str] = frozenset()
        """Addresses of the job's machines; once they are known, nobody else gets as far as a handshake."""
        self._is_connected = False
        self._is_closed = False
        self._closing = threading.Event()
        ip = listening_ip(self.settings)
        try:
            self._listener = socket.create_server((ip, 0), backlog=size * self.settings.streams_per_peer + STRANGERS)
        except OSError as error:
            raise WireError(f"rank {rank} cannot listen on {ip}: {error}; is it this machine's address?") from None
        self.address = str(Address(ip, self._listener.getsockname()[1], self.settings.encrypt))
        self._door = threading.Thread(target=self._admit, name="poseidon-wire-door", daemon=True)
        self._door.start()

    def connect(self, addresses: Sequence[str]) -> None:
        """Connect to all ranks, given their addresses by rank; blocks until every connection is open."""
        if len(addresses) != self.size:
            raise WireError(f"rank {self.rank} was given {len(addresses)} addresses for {self.size} ranks")
        deadline = time.monotonic() + self.settings.connect_timeout_s
        parsed = [Address.parse(text) for text in addresses]
        self._check_encryption(parsed)
        self._announced = frozenset(address.ip for address in parsed)
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

    def _check_encryption(self, addresses: Sequence[Address]) -> None:
        for peer, address in enumerate(addresses):
            if address.is_encrypted != self.settings.encrypt:
                one, other = ("encrypts", "does not") if self.settings.encrypt else ("does not encrypt", "does")
                raise WireError(
                    f"rank {self.rank} {one} and rank {peer} {other}; set POSEIDON_WIRE_ENCRYPT alike on all workers"
                )

    def _check_sendable(self, peer: int, header: Header) -> None:
        if header.length > self.settings.max_message_bytes:
            raise WireError(
                f"{header.kind.name} payload has {header.length} bytes; the wire's limit is "
                f"{self.settings.max_message_bytes} (setting max_message_bytes): send it in pieces"
            )
        if self._is_closed or not self._is_connected:
            state = "is closed" if self._is_closed else "is not connected yet"
            raise WireError(f"rank {self.rank} cannot send {header.kind.name} to rank {peer}: its transport {state}")

    def _send(
        self, peer: int, header: Header, payload: memoryview, priority: int, on_sent: Callable[[], None] | None
    ) -> None:
        if self.settings.payload_checksum and payload.nbytes:
            header = header._replace(flags=header.flags | CHECKED, checksum=zlib.crc32(payload))
        self._senders[peer].put(Outgoing(pack(header), payload, priority, on_sent))

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
        self._closing.set()
        shut(self._listener)
        self._listener.close()
        with self._lock:
            threads = [*self._incoming.values(), self._door]
            for connection in self._incoming:
                shut(connection)
        # A handler that never returns ends with the process.
        last = time.monotonic() + CUT_S
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, last - time.monotonic()))

    # Incoming.

    def _admit(self) -> None:
        """Accept connections until the listener is closed."""
        while not self._closing.is_set():
            try:
                connection, (ip, _) = self._listener.accept()
            except OSError as error:
                # Too many open files, or a connection that has ended already: others may fare better.
                if not self._closing.wait(RETRY_S):
                    self._refuse("accept", f"the listener could not accept a connection: {error}")
                continue
            if self._announced and ip not in self._announced:
                self._refuse("stranger", f"a connection came from {ip}, where no worker of this job is")
                connection.close()
                continue
            self._let_in(connection)

    def _let_in(self, plain: socket.socket) -> None:
        """Start a thread for a connection, which may still be anybody's."""
        connection, is_crowded = plain, False
        try:
            connection = self._credentials.wrap(plain, is_listener=True)
            thread = threading.Thread(target=self._serve, args=(connection,), name="poseidon-wire-in", daemon=True)
            with self._lock:
                if self._closing.is_set():
                    connection.close()
                    return
                is_crowded = len(self._strangers) >= STRANGERS
                if is_crowded:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    shut(oldest)
                self._strangers[connection] = None
                self._incoming[connection] = thread
                thread.start()
        except (OSError, RuntimeError) as error:
            # It has ended already, or there can be no more threads.
            connection.close()
            with self._lock:
                self._strangers.pop(connection, None)
                self._incoming.pop(connection, None)
            self._refuse("accept", f"a connection could not be served: {error}")
        if is_crowded:
            self._refuse("too many strangers", f"more than {STRANGERS} connections are in a handshake")

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
            if sender >= 0 or not self._is_closed:
                self._refuse(error.reason, why)
        except OSError as error:
            why = str(error)
            if sender < 0 and not self._is_closed:
                self._refuse("handshake", f"a connection ended inside its handshake: {error}")
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            _log.exception("rank %d cannot go on receiving from rank %d", self.rank, sender)
        finally:
            with self._lock:
                self._strangers.pop(connection, None)
                self._incoming.pop(connection, None)
        if sender >= 0:
            self._lose(sender, why)

    def _welcome(self, connection: socket.socket) -> int:
        sender = self._credentials.welcome(connection, self.rank, self.size, time.monotonic() + HANDSHAKE_S)
        with self._lock:
            self._strangers.pop(connection, None)
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
        """Read one payload and deliver it."""
        payload = self._place(header)
        if payload is None:
            payload = self._pool.lend(header.length)
        if read_large(connection, payload) < header.length:
            raise FrameError("truncated", f"the connection of rank {header.sender} ended inside a payload")
        check_payload(header, payload)
        self._deliver(header, payload)

    def _hear_goodbye(self, header: Header, _payload: memoryview) -> None:
        self._departed.add(header.sender)

    # Outgoing.

    def _open(self, peer: int, address: Address, deadline: float) -> socket.socket:
        """Return an authenticated connection to ``peer``."""
        while True:
            try:
                return self._try_to_open(peer, address, deadline)
            except FrameError as error:
                if error.reason not in ("handshake", "slow handshake"):
                    raise WireError(f"{error}; use the same on all workers") from None
                problem: Exception = error
            except OSError as error:
                problem = error
            # Where many strangers are at the door, a connection may have to try again; nothing else recovers sooner.
            is_hopeless = isinstance(problem, OSError) and not isinstance(problem, ConnectionResetError)
            if is_hopeless or time.monotonic() + RETRY_S > deadline:
                failure = WireError(
                    f"rank {self.rank} could not connect to rank {peer} at {address.ip}:{address.port} within "
                    f"{self.settings.connect_timeout_s:g} s: {problem}; check that its machine is up and that no "
                    "firewall is in between"
                )
                failure.peer = peer
                raise failure from None
            time.sleep(RETRY_S)

    def _try_to_open(self, peer: int, address: Address, deadline: float) -> socket.socket:
        with contextlib.ExitStack() as undo:
            plain = undo.enter_context(
                socket.create_connection(
                    (address.ip, address.port),
                    timeout=max(0.1, deadline - time.monotonic()),
                    source_address=(listening_ip(self.settings), 0),
                )
            )
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = undo.enter_context(self._credentials.wrap(plain, is_listener=False))
            self._credentials.enter(connection, self.rank, peer, deadline)
            undo.pop_all()
        connection.settimeout(None)
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
