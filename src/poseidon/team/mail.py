"""Tagged messages of any size between the workers of a team, over the wire.

Whoever expects a message names its sender and its tag, and where it shall lie; one that comes earlier waits in memory.
Order does not matter. Everything ends with an error that names the worker when a connection ends.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from poseidon.errors import FrameError
from poseidon.team.membership import PeerLostError
from poseidon.wire.message import Header, Kind
from poseidon.wire.transport import Transport

PIECE_BYTES = 4 << 20
"""Larger messages travel in pieces: an urgent one need not wait for all of a large one."""


class Tag(NamedTuple):
    """What a message is, equal at both ends; no two under way from one sender have the same."""

    subject: int
    """32 bits."""
    clock: int
    """64 bits."""


@dataclass(eq=False)
class _Slot:
    """A message that has begun to come, or is expected."""

    room: memoryview | None = None
    missing: int = 0
    future: Future[memoryview] | None = None
    early: dict[int, memoryview] = field(default_factory=dict)
    """Pieces that came before they were expected."""
    placed: set[int] = field(default_factory=set)
    """Pieces that are being read into their place."""


class Mail:
    """One worker's messages to and from the others; any thread may use it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._piece_bytes = min(PIECE_BYTES, transport.max_message_bytes)
        self._slots: dict[tuple[int, Tag], _Slot] = {}
        self._sending: set[Future[None]] = set()
        self._failure: PeerLostError | None = None
        self._lock = threading.Lock()
        self._channels = itertools.count()
        transport.listen(Kind.MAIL, self._receive, self._place)
        transport.listen_left(self._needs)
        transport.listen_lost(self._lose)

    def new_channel(self) -> int:
        """Return a number for tags that no other user of this mail has; equal on all workers if all ask alike."""
        return next(self._channels)

    def send(self, peer: int, tag: Tag, data: memoryview) -> Future[None]:
        """Send bytes, which must not change until the future is done. Never blocks."""
        future: Future[None] = Future()
        pieces = [data[at : at + self._piece_bytes] for at in range(0, data.nbytes, self._piece_bytes)] or [data]
        left = itertools.count(len(pieces) - 1, -1)

        def note_sent() -> None:
            # Pieces leave one after the other, or on several connections at once; count() is atomic.
            if next(left) == 0:
                self._done(future)

        with self._lock:
            failure = self._failure
            if failure is None:
                self._sending.add(future)
        if failure is not None:
            future.set_exception(failure)
            return future
        for number, piece in enumerate(pieces):
            header = Header(Kind.MAIL, self._transport.rank, tag.subject, number, tag.clock, piece.nbytes)
            self._transport.send(peer, header, piece, on_sent=note_sent)
        return future

    def expect(self, peer: int, tag: Tag, room: memoryview) -> Future[memoryview]:
        """Return a future of the message of ``peer`` with this tag; it fills ``room`` exactly."""
        future: Future[memoryview] = Future()
        with self._lock:
            failure = self._failure
            if failure is None:
                slot = self._slots.setdefault((peer, tag), _Slot())
                assert slot.future is None, f"{tag} from rank {peer} is expected already"
                slot.room, slot.future = room, future
                slot.missing = max(1, -(-room.nbytes // self._piece_bytes))
                early, slot.early = slot.early, {}
                is_whole = self._fill(slot, early)
                if is_whole:
                    del self._slots[peer, tag]
        if failure is not None:
            future.set_exception(failure)
        elif isinstance(is_whole, FrameError):
            future.set_exception(is_whole)
        elif is_whole:
            future.set_result(room)
        else:
            self._transport.check_left()
        return future

    def _fill(self, slot: _Slot, early: dict[int, memoryview]) -> bool | FrameError:
        """Copy what came early; return whether the message is whole, or what is wrong with it."""
        assert slot.room is not None
        for number, piece in early.items():
            place = slot.room[number * self._piece_bytes :][: self._piece_bytes]
            if piece.nbytes != place.nbytes:
                return FrameError("length", f"a piece of {piece.nbytes} bytes came where {place.nbytes} were expected")
            place[:] = piece
            slot.missing -= 1
        return slot.missing == 0

    def close(self) -> None:
        """Send what is queued, and end the connections."""
        self._transport.close()

    def _needs(self, peer: int) -> bool:
        with self._lock:
            return any(sender == peer and slot.future is not None for (sender, _), slot in self._slots.items())

    # On the wire's threads.

    def _place(self, header: Header) -> memoryview | None:
        with self._lock:
            slot = self._slots.setdefault(_key(header), _Slot())
            if slot.room is None:
                return None
            slot.placed.add(header.number)
            return slot.room[header.number * self._piece_bytes :][: self._piece_bytes]

    def _receive(self, header: Header, payload: memoryview) -> None:
        key = _key(header)
        with self._lock:
            if self._failure is not None:
                return
            slot = self._slots[key]
            if slot.room is None:
                slot.early[header.number] = payload
                return
            if header.number in slot.placed:
                slot.placed.remove(header.number)
                slot.missing -= 1
            elif isinstance(problem := self._fill(slot, {header.number: payload}), FrameError):
                raise problem
            if slot.missing:
                return
            del self._slots[key]
        assert slot.future is not None
        assert slot.room is not None
        slot.future.set_result(slot.room)

    def _done(self, future: Future[None]) -> None:
        with self._lock:
            is_waiting = future in self._sending
            self._sending.discard(future)
        if is_waiting:
            future.set_result(None)

    def _lose(self, peer: int, why: str) -> None:
        error = PeerLostError(peer, why)
        self._transport.give_up(why)
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            waiting: list[Future[None] | Future[memoryview]] = [*self._sending]
            waiting += [slot.future for slot in self._slots.values() if slot.future is not None]
            self._slots.clear()
            self._sending.clear()
        for future in waiting:
            future.set_exception(error)


def then(first: Future[Any], start: Callable[[], Future[None]]) -> Future[None]:
    """Return the future of what ``start`` begins once another future is done; with its failure if it fails."""
    second: Future[None] = Future()

    def finish(done: Future[Any]) -> None:
        failure = done.exception()
        if failure is None:
            second.set_result(None)
        else:
            second.set_exception(failure)

    def go_on(done: Future[Any]) -> None:
        if done.exception() is not None:
            finish(done)
            return
        start().add_done_callback(finish)

    first.add_done_callback(go_on)
    return second


def _key(header: Header) -> tuple[int, Tag]:
    return header.sender, Tag(header.subject, header.clock)


def open_mail(connect: Callable[[], Transport], meet: Callable[[], object]) -> Mail:
    """Return the mail of a team: ``connect`` opens its transport, ``meet`` returns when all workers listen."""
    mail = Mail(connect())
    try:
        meet()
    except BaseException:
        mail.close()
        raise
    return mail
