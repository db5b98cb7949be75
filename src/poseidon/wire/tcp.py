"""The wire between machines over TCP: the least work per byte that Python can do.

A thread per connection blocks in the kernel, which moves a whole payload in one call, directly between the socket and
its memory. Both ends of a connection prove that they know the job's secret (``handshake.py``); with ``encrypt``, TLS
carries everything (``tls.py``) but large payloads, which are sealed beside it (``sealing.py``).

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
from collections import Counter
from collections.abc import Callable, Sequence

from poseidon import failpoints
from poseidon.errors import FrameError, WireError, describe
from poseidon.wire.address import Address, listening_ip
from poseidon.wire.cap import SharedBucket
from poseidon.wire.door import Door, enter, listen, set_patience
from poseidon.wire.handshake import Credentials
from poseidon.wire.message import CHECKED, SIZE, Header, Kind, check_payload, pack, unpack
from poseidon.wire.pool import Pool
from poseidon.wire.reading import read_into, read_large, widen
from poseidon.wire.sending import FIRST, Outgoing, PeerSender, shut
from poseidon.wire.settings import LARGEST_BUFFER_BYTES, WireSettings
from poseidon.wire.share import BufferShare
from poseidon.wire.transport import Transport

_log = logging.getLogger(__name__)

GIVING_UP_BYTES = 1000
"""Of the reason for giving up, for the others."""
OWN_FAULTS = ("handler", "placer")
"""Reasons to refuse a message that lie here, and not in its sender."""


class TcpTransport(Transport):
    """One rank's connections over TCP, with a thread for each incoming and each outgoing one.

    It listens at ``address`` from construction on, and can send after ``connect``.
    """

    def __init__(self, rank: int, size: int, secret: bytes, settings: WireSettings | None = None) -> None:
        super().__init__(rank, size)
        self.settings = settings or WireSettings()
        self.max_message_bytes = self.settings.max_message_bytes
        self._credentials = Credentials(secret, self.settings.encrypt)
        self.listen(Kind.BYE, self._hear_goodbye)
        cap_mbit = self.settings.cap_mbit
        self._bucket = SharedBucket(cap_mbit) if cap_mbit else None
        self._senders: list[PeerSender] = []
        self._pool = Pool()
        self._lock = threading.Lock()
        self._departed: set[int] = set()
        """Ranks that said goodbye or were reported lost."""
        self._culprit: int | None = None
        """Because of whom this rank cannot go on: the first that it lost, or itself."""
        self._accuser = rank
        """Who noticed it first: this rank, or one that told it."""
        self._has_given_up = False
        self._ended: Counter[int] = Counter()
        """How many of each peer's connections have ended."""
        self._is_connected = False
        self._is_closed = False
        ip = listening_ip(self.settings)
        listener = listen(rank, ip, size * self.settings.streams_per_peer)
        self.address = str(Address(ip, listener.getsockname()[1], self.settings.encrypt))
        self._door = Door(listener, self._credentials, rank, size, self._serve, self._refuse)

    def connect(self, addresses: Sequence[str]) -> None:
        """Connect to all ranks, given their addresses by rank; blocks until every connection is open."""
        if len(addresses) != self.size:
            raise WireError(f"rank {self.rank} was given {len(addresses)} addresses for {self.size} ranks")
        deadline = time.monotonic() + self.settings.connect_timeout_s
        parsed = [Address.parse(text) for text in addresses]
        self._check_encryption(parsed)
        self._door.announced = frozenset(address.ip for address in parsed)
        beyond = [peer for peer, address in enumerate(parsed) if address.ip != parsed[self.rank].ip]
        buffer_bytes = self.settings.send_buffer_bytes
        link = BufferShare(buffer_bytes, beyond if self.settings.balance else ())
        # Inside a machine packets are as large as the buffers of slow links, and would wait for each other in them.
        inside = BufferShare(max(buffer_bytes, LARGEST_BUFFER_BYTES), ())
        for peer, address in enumerate(parsed):
            streams = [self._open(peer, address, deadline) for _ in range(self.settings.streams_per_peer)]
            share = link if peer in beyond else inside
            self._senders.append(PeerSender(peer, streams, self._bucket, share, self._lose_by))
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
        self,
        peers: Sequence[int],
        header: Header,
        payload: memoryview,
        priority: int,
        on_sent: Callable[[], None] | None,
    ) -> None:
        if self.settings.payload_checksum and payload.nbytes:
            header = header._replace(flags=header.flags | CHECKED, checksum=zlib.crc32(payload))
        message = Outgoing(pack(header), payload, priority, on_sent)
        for peer in peers:
            self._senders[peer].put(message)

    def waiting(self) -> tuple[int, int]:
        """Return how many messages wait in this rank's queues, and their bytes; any thread may ask."""
        sizes = [size for sender in list(self._senders) for size in sender.waiting()]
        return len(sizes), sum(sizes)

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
        self._door.close(ends_served=True)

    # Incoming.

    def _serve(self, connection: socket.socket, sender: int) -> None:
        """Receive on one connection until it ends."""
        with contextlib.closing(connection):
            try:
                set_patience(connection, self.settings.lost_after_s)
                widen(connection)
                self._receive(connection, sender)
            except Exception as error:
                # Told before the peer can notice, as in ``sending.py``.
                if isinstance(error, FrameError):
                    self._refuse(error.reason, str(error))
                elif not isinstance(error, OSError):
                    _log.exception("rank %d cannot go on receiving from rank %d", self.rank, sender)
                self._lose_by(sender, error)
            else:
                self._lose(sender, "its connection ended")
                self._note_end(sender)

    def _receive(self, connection: socket.socket, sender: int) -> None:
        """Deliver the messages of ``sender`` until the connection ends or breaks the protocol."""
        head = bytearray(SIZE)
        view = memoryview(head)
        while (came := read_into(connection, view)) == SIZE:
            header = unpack(view)
            if failpoints.ARMED:
                failpoints.hit("wire.receive", lambda: shut(connection))
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
        try:
            came = read_large(connection, payload)
        except FrameError as error:
            raise FrameError(error.reason, f"{header.name}: {error}") from None
        if came < header.length:
            raise FrameError("truncated", f"the connection of rank {header.sender} ended inside a payload")
        check_payload(header, payload)
        self._deliver(header, payload)

    def _note_end(self, sender: int) -> None:
        """Note that one of a peer's connections has ended; after its last one nothing can come any more."""
        with self._lock:
            self._ended[sender] += 1
            is_left = self._ended[sender] == self.settings.streams_per_peer and not self._is_closed
        if is_left:
            self._left.add(sender)
            self.check_left()

    def _hear_goodbye(self, header: Header, payload: memoryview) -> None:
        if not header.detail:
            self._departed.add(header.sender)
            return
        why = f"rank {header.sender} gave up: {str(payload, errors='replace')}"
        accuser = header.number if header.number < self.size else header.sender
        # Of two that complain about each other, both know; who only passes the complaint on is neither.
        self._lose(accuser if header.subject == self.rank else header.subject, why, accuser=accuser)
        self._departed.add(header.sender)

    # Outgoing.

    def give_up(self, why: str, culprit: int | None = None) -> None:  # noqa: D102 - as in the contract
        with self._lock:
            if self._has_given_up or self._is_closed:
                return
            self._has_given_up = True
            lost = self._culprit if self._culprit is not None else self.rank if culprit is None else culprit
            accuser = self._accuser
        text = why.encode()[:GIVING_UP_BYTES]
        head = pack(Header(Kind.BYE, self.rank, lost, accuser, 0, len(text), detail=1))
        for peer, sender in enumerate(self._senders):
            if peer != self.rank:
                sender.put(Outgoing(head, memoryview(text), FIRST))

    @property
    def is_to_blame(self) -> bool:  # noqa: D102 - as in the contract
        return self._culprit == self.rank

    def _open(self, peer: int, address: Address, deadline: float) -> socket.socket:
        """Return an authenticated connection to ``peer``."""
        left_s = deadline - time.monotonic()
        place = (address.ip, address.port)
        connection = enter(self._credentials, self.rank, peer, place, listening_ip(self.settings), left_s)
        if self.settings.congestion:
            # A kernel that does not have it, or reserves it for privileged users, keeps its own.
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, self.settings.congestion.encode())
        set_patience(connection, self.settings.lost_after_s)
        return connection

    def _lose_by(self, peer: int, error: Exception) -> None:
        """Report that ``peer`` is gone because of an error, for which this rank may be to blame."""
        is_own = error.reason in OWN_FAULTS if isinstance(error, FrameError) else not isinstance(error, OSError)
        why = str(error) if isinstance(error, OSError) else describe(error)
        self._lose(peer, why, self.rank if is_own else peer)

    def _lose(self, peer: int, why: str, culprit: int | None = None, accuser: int | None = None) -> None:
        """Report that ``peer`` is gone, unless it said goodbye or this transport is closing."""
        with self._lock:
            if peer in self._departed or self._is_closed:
                return
            self._departed.add(peer)
            if self._culprit is None:
                self._culprit = peer if culprit is None else culprit
                self._accuser = self.rank if accuser is None or accuser == peer else accuser
        self._tell_lost(peer, why)
