"""What the owner of a chunk keeps, for whoever asks: its sum, its exact weights, its optimizer state.

``FETCH`` goes from a worker to a chunk's owner, ``FETCHED`` back. Answers come from the owner's transport threads, so
one worker alone may ask, whatever the others do. A request names a version, and the owner answers when it has got
there. It cannot be past it, because the next version needs the asker's next part; only weights and state are sometimes
asked for when that part is on its way already, between ``backward()`` and ``step()``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from enum import IntEnum
from typing import NamedTuple, Protocol

from poseidon.errors import ServerError
from poseidon.sums.chunks import Chunk
from poseidon.sums.slots import Slot
from poseidon.wire.formats import Array
from poseidon.wire.message import Header, Kind
from poseidon.wire.transport import Transport

FETCH_PRIORITY = -1
"""Somebody waits for the answer, so it overtakes what is sent in advance."""


class Ask(IntEnum):
    """What a worker may ask for; travels as the detail of a ``FETCH``."""

    MEAN = 0
    """The mean gradient of a chunk."""
    WEIGHTS = 1
    """Its weights as the optimizer left them."""
    STATE = 2
    """The optimizer's state."""
    ROWS = 3
    """Rows of a table, as the optimizer left them; the request says which (``touched.py``)."""


class Answer(NamedTuple):
    """What comes back."""

    payload: memoryview
    """Bytes."""
    is_exact_later: bool = False
    """The owner sends this chunk's weights unrounded from its next step on."""
    is_past: bool = False
    """The owner has stepped since, and does not have it any more."""


Reply = Callable[[Answer], None]


class Keeper(Protocol):
    """What keeps the chunks of one slot."""

    def ask(self, chunk: Chunk, what: Ask, version: int, reply: Reply, details: memoryview) -> None:
        """Call ``reply`` once ``version`` is there, perhaps on another thread; ``details`` say which rows."""


class FetchDesk:
    """Asks other ranks for what they keep, and answers them."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._keepers: dict[int, tuple[Slot, Keeper]] = {}
        self._asked: dict[tuple[int, int, int], Future[Answer]] = {}
        self._present = set(range(transport.size)) - {transport.rank}
        """Other ranks that may still ask..."""
        self._is_alone: Future[None] = Future()
        """... done when there are none."""
        self._failure: BaseException | None = None
        transport.listen(Kind.FETCH, self._receive_fetch)
        transport.listen(Kind.FETCHED, self._receive_fetched)
        transport.listen(Kind.LEAVE, lambda header, _: self._note_left(header.sender))

    def book(self, slots: Iterable[tuple[Slot, Keeper]]) -> None:
        """Answer for these slots instead of earlier ones."""
        self._keepers = {slot.number: (slot, keeper) for slot, keeper in slots}

    def fetch(self, chunk: Chunk, what: Ask, version: int, details: Array | None = None) -> Future[Answer]:
        """Ask the owner of a chunk. The payload stays valid as long as it is referenced."""
        future: Future[Answer] = Future()
        with self._lock:
            if self._failure is not None:
                future.set_exception(self._failure)
                return future
            key = (chunk.slot, chunk.index, what)
            assert key not in self._asked, f"{what.name} of {chunk} was asked for twice"
            self._asked[key] = future
        length = 0 if details is None else details.nbytes
        header = Header(Kind.FETCH, self._transport.rank, chunk.slot, chunk.index, version, length, what)
        self._transport.send(chunk.owner, header, details, priority=FETCH_PRIORITY)
        return future

    def fail(self, error: BaseException) -> None:
        """End what was asked, and what will be, with ``error``; the first one stays."""
        with self._lock:
            self._failure = self._failure or error
            asked, self._asked = self._asked, {}
            self._present.clear()
            self._note_alone()
        for future in asked.values():
            future.set_exception(error)

    def leave(self) -> Future[None]:
        """Tell the others that this rank will ask no more; done when they have said the same, or one is lost.

        Until then they are answered.
        """
        me = self._transport.rank
        for rank in range(self._transport.size):
            if rank != me and self._failure is None:
                self._transport.send(rank, Header(Kind.LEAVE, me, 0, 0, 0, 0))
        with self._lock:
            self._note_alone()
        return self._is_alone

    def _note_left(self, rank: int) -> None:
        with self._lock:
            self._present.discard(rank)
            self._note_alone()

    def _note_alone(self) -> None:
        if not self._present and not self._is_alone.done():
            self._is_alone.set_result(None)

    def _receive_fetch(self, header: Header, details: memoryview) -> None:
        slot, keeper = self._keepers.get(header.subject, (None, None))
        mine = (
            {} if slot is None else {chunk.index: chunk for chunk in slot.chunks if chunk.owner == self._transport.rank}
        )
        chunk = mine.get(header.number)
        if chunk is None or keeper is None:
            raise ServerError(
                f"rank {header.sender} asked for chunk {header.number} of slot {header.subject}, "
                f"which rank {self._transport.rank} does not own"
            )

        def reply(answer: Answer) -> None:
            back = header._replace(
                kind=Kind.FETCHED,
                sender=self._transport.rank,
                length=answer.payload.nbytes,
                detail=header.detail | answer.is_exact_later << 7 | answer.is_past << 6,
            )
            self._transport.send(header.sender, back, answer.payload, priority=FETCH_PRIORITY)

        keeper.ask(chunk, Ask(header.detail), header.clock, reply, details)

    def _receive_fetched(self, header: Header, payload: memoryview) -> None:
        with self._lock:
            future = self._asked.pop((header.subject, header.number, header.detail & 0x3F), None)
        if future is not None:
            future.set_result(Answer(payload, bool(header.detail & 0x80), bool(header.detail & 0x40)))
