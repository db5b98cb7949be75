"""Ordered messages about tables between the ranks of a job, with a short cut to this rank itself.

All work on tables in a process happens under one lock, ``Post.news``, which is notified after every message. Handlers
run on the transport's threads, or on the caller's for messages to this rank.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from poseidon.errors import PoseidonError, WorkerLostError
from poseidon.tables.inbox import Inbox
from poseidon.wire.formats import Array
from poseidon.wire.message import Header, Kind
from poseidon.wire.transport import Transport

_log = logging.getLogger(__name__)

Handler = Callable[[Header, memoryview], None]
KINDS = (Kind.HELLO, Kind.GET, Kind.ROW, Kind.INC, Kind.CLOCK, Kind.LOST, Kind.STATE, Kind.ERROR)


class Post:
    """One rank's mailbox; without a transport the rank is alone."""

    def __init__(self, transport: Transport | None) -> None:
        self.rank = 0 if transport is None else transport.rank
        self.size = 1 if transport is None else transport.size
        self.news = threading.Condition(threading.RLock())
        self.failure: PoseidonError | None = None
        """The error after which no call succeeds."""
        self.gone: set[int] = set()
        """Dead ranks; nothing is sent to them."""
        self.received = 0
        """Number of messages delivered."""
        self._is_closed = False
        self._transport = transport
        self._handlers: dict[Kind, Handler] = {}
        self._on_message: list[Callable[[Header], None]] = []
        self._inboxes = {peer: Inbox[tuple[Header, memoryview]](peer) for peer in range(self.size)}
        self._numbers = dict.fromkeys(range(self.size), 0)
        self._under_way = dict.fromkeys(range(self.size), 0)
        self._on_idle: list[Callable[[int], None]] = []
        if transport is not None:
            for kind in KINDS:
                transport.listen(kind, self._receive)

    def listen(self, kind: Kind, handler: Handler) -> None:
        """Pass messages of ``kind`` to ``handler``, under the lock."""
        self._handlers[kind] = handler

    def listen_all(self, handler: Callable[[Header], None]) -> None:
        """Call ``handler``, under the lock, for every message before it is handled."""
        self._on_message.append(handler)

    def listen_idle(self, handler: Callable[[int], None]) -> None:
        """Call ``handler``, under the lock, when all messages to a peer have left this process."""
        self._on_idle.append(handler)

    def is_idle(self, peer: int) -> bool:
        """Return whether no message to ``peer`` is in flight."""
        return self._under_way[peer] == 0

    def send(self, peer: int, kind: Kind, table: int, clock: int, payload: Array | bytes = b"", flags: int = 0) -> None:
        """Send a message; one to this rank is delivered before the call returns. The payload must not change."""
        with self.news:
            if peer not in self.gone:
                self._send(peer, kind, table, clock, payload, flags)

    def _send(self, peer: int, kind: Kind, table: int, clock: int, payload: Array | bytes, flags: int = 0) -> None:
        with self.news:
            if self._is_closed:
                return
            view = memoryview(payload) if isinstance(payload, bytes) else payload.data
            if peer == self.rank:
                self._deliver(Header(kind, self.rank, table, 0, clock, view.nbytes, flags), view)
                return
            assert self._transport is not None
            header = Header(kind, self.rank, table, self._numbers[peer], clock, view.nbytes, flags)
            self._numbers[peer] += 1
            self._under_way[peer] += 1
            self._transport.send(peer, header, view, on_sent=lambda: self._note_sent(peer))

    def fail(self, error: PoseidonError) -> None:
        """Make every waiting and later call raise ``error``; the first error stays."""
        with self.news:
            self.failure = self.failure or error
            self.news.notify_all()

    def close(self) -> None:
        """Stop sending; later messages are dropped."""
        with self.news:
            self._is_closed = True

    def check(self) -> None:
        """Raise the error of :meth:`fail`, if any."""
        if self.failure is not None:
            raise self.failure

    def _receive(self, header: Header, payload: memoryview) -> None:
        with self.news:
            if header.sender in self.gone and header.kind is not Kind.ERROR:
                why = f"worker {header.sender} was given up by the others and cannot continue"
                self._answer_error(header, WorkerLostError(why))
                return
            try:
                for message in self._inboxes[header.sender].put(header.number, (header, payload)):
                    self._deliver(*message)
            except PoseidonError as error:
                self._answer_error(header, error)

    def _deliver(self, header: Header, payload: memoryview) -> None:
        self.received += 1
        for handler in self._on_message:
            handler(header)
        self._handlers[header.kind](header, payload)
        self.news.notify_all()

    def _answer_error(self, header: Header, error: PoseidonError) -> None:
        """Report an error to the sender of a message, whose calls then raise it."""
        _log.warning("rank %d refused %s of rank %d: %s", self.rank, header.kind.name, header.sender, error)
        if header.kind is not Kind.ERROR:
            # Even to one that was given up: it is alive after all, and must not wait for answers that never come.
            self._send(header.sender, Kind.ERROR, header.subject, header.clock, str(error).encode())

    def _note_sent(self, peer: int) -> None:
        with self.news:
            self._under_way[peer] -= 1
            if self._under_way[peer] == 0:
                for handler in self._on_idle:
                    handler(peer)
            self.news.notify_all()
