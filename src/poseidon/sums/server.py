"""The parameter server for sums: every rank of a transport is a worker and owns some chunks of every slot.

``PART`` goes from a worker to a chunk's owner, ``SUM`` from the owner to all workers; of a table, ``TOUCHED`` rows
follow a part. Nothing waits and nothing is locked for long: messages are handled on the transport's threads, and an
adder may have threads of its own.

Memory is lent without locks because of who waits for whom. A sum lands where this worker's own part lay: its owner
must have had that. An owner may receive the parts of the next step in the memory of this step's: a worker sends those
when it has the sums of this step. And it may send the next sum from the memory of this one: everybody has that, or
would not have sent parts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any

from poseidon.errors import FrameError, ServerError, describe
from poseidon.sums.arithmetic import Adder
from poseidon.sums.chunks import Chunk
from poseidon.sums.encodings import Payload
from poseidon.sums.ledger import SlotLedger
from poseidon.sums.messages import make_header, wrong_content, wrong_size
from poseidon.sums.slots import Slot
from poseidon.sums.tally import Tally
from poseidon.sums.touched import TouchedRows, check_size, read_rows
from poseidon.sums.turns import PartRoll, in_turn
from poseidon.wire.message import Header, Kind
from poseidon.wire.transport import Transport


class SumServer:
    """Sums buckets over all ranks of a transport.

    Whatever goes wrong (a part that is refused, an arithmetic that raises) fails everything under way and everything
    to come: a rank is out of step then, and its sums would never finish. From then on messages are ignored. Report lost
    peers with :meth:`fail`.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._rank = transport.rank
        self._others = in_turn(range(transport.size), self._rank, transport.size)[1:]
        self._lock = threading.Lock()
        self._ledgers: dict[int, SlotLedger] = {}
        self._retiring: set[int] = set()
        """Slots of an earlier plan that have not landed."""
        self._failure: BaseException | None = None
        self.tally = Tally()
        transport.listen(Kind.PART, self._receive_part, self._place_part)
        transport.listen(Kind.SUM, self._receive_sum, self._place_sum)
        transport.listen(Kind.TOUCHED, self._receive_touched, self._check_touched)
        transport.listen_left(self._needs)

    def book(self, slots: Iterable[tuple[Slot, Adder]]) -> None:
        """Take over these slots instead of earlier ones, which go as soon as they have landed.

        No rank may start one of them before all ranks have booked them.
        """
        size = self._transport.size
        booked = {slot.number: SlotLedger(slot, adder, self._rank, size) for slot, adder in slots}
        with self._lock:
            kept = {number: ledger for number, ledger in self._ledgers.items() if ledger.is_in_use}
            self._retiring = set(kept)
            self._ledgers = {**kept, **booked}

    def holds(self, slot: Slot) -> bool:
        """Return whether a slot is booked and not yet retired."""
        return slot.number in self._ledgers

    def start(self, values: Any, slot: Slot, step: int) -> Future[Any]:
        """Begin to replace ``values`` by their sum over all ranks; the future brings what the adder says at the end."""
        return self.reserve(slot, step)(values)

    def reserve(self, slot: Slot, step: int) -> Callable[[Any], Future[Any]]:
        """Return what starts a sum whose values come later; until it has landed, the slot stays booked."""
        ledger = self._ledgers.get(slot.number)
        if ledger is None:
            raise ServerError(f"slot {slot.number} is not booked on rank {self._rank}; a later plan has replaced it")
        with self._lock:
            future = ledger.begin(step)
            failure = self._failure
            if failure is not None:
                ledger.abandon()
        if failure is not None:
            future.set_exception(failure)
        elif not slot.chunks:
            future.set_result(None)
        return partial(self._open, ledger, future)

    def send_touched(self, slot: Slot, step: int, rows: TouchedRows) -> None:
        """Bring this worker's touched rows of a slot that has them, once its sum has started; none may be touched."""
        ledger = self._ledgers[slot.number]
        for chunk in slot.chunks:
            payload = rows.in_chunk(chunk)
            if chunk.owner == self._rank:
                self._enter_touched(ledger, chunk, self._rank, step, payload.data)
            else:
                header = Header(Kind.TOUCHED, self._rank, slot.number, chunk.index, step, payload.nbytes)
                self._transport.send(chunk.owner, header, payload, priority=slot.priority)

    def fail(self, error: BaseException, culprit: int | None = None) -> None:
        """End everything under way, and everything to come, with ``error``; the first one stays.

        The other ranks hear of it: they would wait for sums that never come. ``culprit`` is the rank at fault, if it
        is neither lost nor this one.
        """
        self._transport.give_up(describe(error), culprit)
        with self._lock:
            self._failure = self._failure or error
            abandoned = [ledger for ledger in self._ledgers.values() if ledger.abandon()]
        for ledger in abandoned:
            ledger.future.set_exception(error)

    def _needs(self, rank: int) -> bool:
        with self._lock:
            return self._failure is None and any(ledger.needs(rank) for ledger in self._ledgers.values())

    # Parts go to the owners of their chunks.

    def _open(self, ledger: SlotLedger, future: Future[Any], values: Any) -> Future[Any]:
        if not future.done():
            try:
                ledger.adder.open(values, partial(self._send_parts, ledger), self.fail)
            except BaseException as error:
                self.fail(error)
                raise
        return future

    def _send_parts(self, ledger: SlotLedger) -> None:
        adder, priority = ledger.adder, ledger.slot.priority
        for chunk in ledger.slot.chunks:
            if chunk.owner == self._rank:
                roll = ledger.rolls[chunk.index]
                with self._lock:
                    roll.expect(self._rank, ledger.step)
                self._enter(ledger, roll, self._rank, adder.own(chunk))
            else:
                encoded = adder.part(chunk)
                self.tally.note(adder, chunk, encoded, is_part=True)
                header = make_header(Kind.PART, self._rank, chunk, ledger.step, encoded)
                self._transport.send(chunk.owner, header, encoded.payload, priority=priority)
        self._transport.check_left()

    def _place_part(self, header: Header) -> memoryview | None:
        if self._failure is not None:
            return None
        try:
            ledger = self._ledgers.get(header.subject)
            roll = None if ledger is None else ledger.rolls.get(header.number)
            if ledger is None or roll is None:
                raise ServerError(
                    f"rank {header.sender} sent chunk {header.number} of slot {header.subject}, "
                    f"which rank {self._rank} does not own"
                )
            _check_size(header, ledger, roll.chunk)
            with self._lock:
                roll.expect(header.sender, header.clock)
            return ledger.adder.place_part(roll.chunk, header.sender, header.length)
        except Exception as error:
            raise self._refuse(error, header.sender) from error

    def _receive_part(self, header: Header, payload: memoryview) -> None:
        if self._failure is not None:
            return
        try:
            ledger = self._ledgers[header.subject]
            roll, adder = ledger.rolls[header.number], ledger.adder
            _check_content(header, adder, roll.chunk, payload)
            self._enter(ledger, roll, header.sender, adder.decode(roll.chunk, header.detail, payload))
        except BaseException as error:
            self.fail(error)
            raise

    # So do touched rows, of which the owner makes one more part.

    def _check_touched(self, header: Header) -> None:
        if self._failure is not None:
            return
        try:
            ledger = self._ledgers.get(header.subject)
            if ledger is None or header.number not in ledger.touched:
                raise ServerError(
                    f"rank {header.sender} sent touched rows of chunk {header.number} of slot {header.subject}, "
                    f"which rank {self._rank} does not own or expect"
                )
            check_size(header, ledger.slot.chunks[header.number], ledger.slot.width)
        except Exception as error:
            raise self._refuse(error, header.sender) from error

    def _receive_touched(self, header: Header, payload: memoryview) -> None:
        if self._failure is not None:
            return
        ledger = self._ledgers[header.subject]
        self._enter_touched(ledger, ledger.slot.chunks[header.number], header.sender, header.clock, payload)

    def _enter_touched(self, ledger: SlotLedger, chunk: Chunk, rank: int, clock: int, payload: memoryview) -> None:
        try:
            rows = read_rows(payload, chunk, ledger.slot.width, rank)
            last, roll = self._transport.size, ledger.rolls[chunk.index]
            with self._lock:
                everybody = ledger.touched[chunk.index].enter(rank, clock, rows)
                if not everybody:
                    return
                roll.expect(last, clock)
            self._enter(ledger, roll, last, ledger.adder.touch(chunk, everybody))
        except BaseException as error:
            self.fail(error)
            raise

    # An owner adds them up and answers.

    def _enter(self, ledger: SlotLedger, roll: PartRoll, rank: int, part: Any) -> None:
        """Take a part, and add whatever can be added, unless another thread is at it: it will see this part."""
        with self._lock:
            ready = roll.enter(rank, part)
        while ready:
            roll.total = ledger.adder.add(roll.chunk, ready, roll.total)
            with self._lock:
                total, ready = roll.settle()
            if total is not None:
                ledger.adder.wait(total, partial(self._answer, ledger, roll.chunk, total), self.fail)

    def _answer(self, ledger: SlotLedger, chunk: Chunk, total: Any) -> None:
        encoded = ledger.adder.encode(chunk, total)
        self.tally.note(ledger.adder, chunk, encoded, is_part=False)
        header = make_header(Kind.SUM, self._rank, chunk, ledger.step, encoded)
        self._transport.send_all(self._others, header, encoded.payload, priority=ledger.slot.priority)
        self._land(ledger, chunk, encoded.encoding, encoded.payload)

    # Sums come back.

    def _place_sum(self, header: Header) -> memoryview | None:
        if self._failure is not None:
            return None
        try:
            ledger = self._ledgers.get(header.subject)
            if ledger is None or not ledger.awaits(header.number, header.clock):
                raise ServerError(
                    f"rank {header.sender} sent the sum of chunk {header.number} of slot {header.subject} "
                    f"of clock {header.clock}, but no such sum is under way on rank {self._rank}"
                )
            chunk = ledger.slot.chunks[header.number]
            if header.sender != chunk.owner:
                raise ServerError(f"rank {header.sender} sent the sum of {chunk}, which rank {chunk.owner} owns")
            _check_size(header, ledger, chunk)
            return ledger.adder.place_sum(chunk, header.length)
        except Exception as error:
            raise self._refuse(error, header.sender) from error

    def _receive_sum(self, header: Header, payload: memoryview) -> None:
        if self._failure is not None:
            return
        try:
            ledger = self._ledgers[header.subject]
            chunk = ledger.slot.chunks[header.number]
            _check_content(header, ledger.adder, chunk, payload)
            self._land(ledger, chunk, header.detail, payload)
        except BaseException as error:
            self.fail(error)
            raise

    def _land(self, ledger: SlotLedger, chunk: Chunk, encoding: int, payload: Payload) -> None:
        ledger.adder.land(chunk, encoding, payload)
        number = ledger.slot.number
        with self._lock:
            if not ledger.enter(chunk.index):
                return
            if number in self._retiring:
                self._retiring.remove(number)
                del self._ledgers[number]
        try:
            outcome = ledger.adder.close()
        except BaseException as error:
            ledger.future.set_exception(error)
            self.fail(error)
        else:
            ledger.future.set_result(outcome)

    def _refuse(self, error: Exception, sender: int) -> FrameError:
        """Fail because of a message that must not be read; return what tells the transport so."""
        self.fail(error, sender)
        return FrameError("out of turn", str(error))


def _check_size(header: Header, ledger: SlotLedger, chunk: Chunk) -> None:
    sizes = ledger.sizes.get((header.number, header.detail))
    if sizes is None or header.length not in sizes:
        raise wrong_size(header, chunk, ledger.adder.layouts)


def _check_content(header: Header, adder: Adder, chunk: Chunk, payload: memoryview) -> None:
    implied_bytes = adder.layouts[header.detail].measure(payload)
    if implied_bytes != header.length:
        raise wrong_content(header, chunk, implied_bytes)
