"""Step 3, sharded, on CUDA devices: chunks travel compacted (``sums/compact.py``) and are added up on the device.

As ``sharded.py`` has it, every worker pushes each chunk to its owner, which adds up all parts in rank order and sends
the sum to everybody. Here the device does the arithmetic: it compacts a bucket before it leaves, an owner's device
restores the parts, adds them and compacts the sum, and the receiver's restores that. An eighth of the bytes is saved on
every link, and the processors only move bytes.

Memory is lent without locks because of who waits for whom. A sum lands where this worker's own part lay: its owner
must have had that. An owner receives parts of the next step in the memory of this step's: a worker pushes those when it
has the sums of this step. And it sends the next sum from the memory of this step's: everybody has that, or would not
have pushed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from poseidon.errors import FrameError, ServerError
from poseidon.routes.staging import Done, Waiter
from poseidon.sums.chunks import Chunk
from poseidon.sums.compact import CompactLayout, is_worth_compacting
from poseidon.sums.slots import Slot
from poseidon.sums.turns import check_clock, in_turn, refuse_second
from poseidon.wire.message import Header, Kind
from poseidon.wire.settings import WireSettings
from poseidon.wire.transport import Transport


@dataclass(frozen=True)
class ChunkRows:
    """The chunks of a bucket as rows of memory: ``quotient`` values each, one more in the first ``longer``."""

    chunks: tuple[Chunk, ...]
    layout: CompactLayout
    quotient: int
    longer: int

    @classmethod
    def of(cls, chunks: tuple[Chunk, ...]) -> ChunkRows:
        """Return the rows of chunks as ``sums/chunks.py`` cuts them."""
        quotient = chunks[-1].length
        longer = sum(chunk.length > quotient for chunk in chunks)
        return cls(chunks, CompactLayout(chunks[0].length), quotient, longer)

    def plain(self, lengths: Sequence[int]) -> list[int]:
        """Return the numbers of the chunks that have not been compacted, given the bytes each takes."""
        pairs = zip(self.chunks, lengths, strict=True)
        return [chunk.index for chunk, length in pairs if self.layout.is_plain(length, chunk.length)]


class Compactor(Protocol):
    """A device with memory beside it; what it is told is done in order, and later than it is told."""

    def memory(self, rows: int, row_bytes: int) -> Tensor:
        """Return memory that both the device and the wire can reach."""

    def compact(self, flat: Tensor, rows: ChunkRows, memory: Tensor) -> Done:
        """Leave the compacted chunks of ``flat`` in ``memory``, once what the caller computes there is ready."""

    def add(
        self,
        parts: Tensor,
        plain: Sequence[int],
        flat: Tensor,
        chunk: Chunk,
        layout: CompactLayout,
        into: Sequence[Tensor],
    ) -> Done:
        """Add up a chunk in ``flat``, and leave the sum there, and compacted in ``into``.

        ``parts`` are those of the other workers in their order; rows numbered in ``plain`` have not been compacted.
        This worker's own part lies in ``flat``, and its place among the others is ``chunk.owner``.
        """

    def copy(self, flat: Tensor, chunk: Chunk, into: Sequence[Tensor]) -> None:
        """Leave a chunk as it is in ``into``, and wait for it."""

    def restore(self, memory: Tensor, plain: Sequence[int], rows: ChunkRows, flat: Tensor) -> Any:
        """Fill ``flat`` from ``memory``, where rows numbered in ``plain`` are as they are; return what says when."""


def can_compact(settings: WireSettings | None = None) -> bool:
    """Return whether CUDA devices of this machine are asked to compact, and find Triton, which they need for it."""
    return (settings or WireSettings.from_environment()).compact and find_spec("triton") is not None


def is_compacted(slot: Slot, dtype: torch.dtype) -> bool:
    """Return whether a bucket of this kind travels compacted where the workers' devices can do it."""
    return dtype == torch.float32 and is_worth_compacting(dtype.itemsize, slot.chunks)


class CompactSum:
    """Sums tensors of float32 over all ranks of a transport.

    ``priority`` gives a unit's rank in the queue. ``on_error`` hears of what makes it impossible to go on; the owner
    of this object then calls :meth:`fail`.
    """

    def __init__(
        self,
        transport: Transport,
        compactor: Compactor,
        *,
        priority: Callable[[int], int],
        on_error: Callable[[BaseException], None],
        waiter: Callable[[str], Waiter] = Waiter,
    ) -> None:
        self._transport = transport
        self._rank = transport.rank
        self._compactor = compactor
        self._priority = priority
        self._on_error = on_error
        self._buckets: dict[int, _Bucket] = {}
        self._leaving: set[int] = set()
        """Buckets of an earlier plan that have not landed."""
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        # Two: a part waits for the backward that makes it, and no sum may wait for that.
        self._compacted = waiter("poseidon-compacted")
        self._summed = waiter("poseidon-summed")
        self._others = in_turn(range(transport.size), self._rank, transport.size)[1:]
        transport.listen(Kind.COMPACT_PUSH, self._receive_part, self._place_part)
        transport.listen(Kind.COMPACT_RESULT, self._receive_sum, self._place_sum)

    def include(self, slots: Sequence[Slot]) -> None:
        """Take over these buckets instead of earlier ones; nobody may start them before."""
        others = self._transport.size - 1
        added = {}
        for slot in slots:
            rows = ChunkRows.of(slot.chunks)
            memory = self._compactor.memory(len(slot.chunks), rows.layout.row_bytes)
            rolls = {
                chunk.index: _Roll(
                    chunk,
                    self._compactor.memory(others, rows.layout.row_bytes),
                    self._compactor.memory(1, rows.layout.row_bytes),
                )
                for chunk in slot.chunks
                if chunk.owner == self._rank
            }
            added[slot.number] = _Bucket(slot.number, rows, memory, rolls)
        with self._lock:
            # What has not landed here may still have to be received; it goes when it lands.
            kept = {number: bucket for number, bucket in self._buckets.items() if bucket.is_under_way}
            self._leaving = set(kept)
            self._buckets = {**kept, **added}

    def holds(self, slot: Slot) -> bool:
        """Return whether a bucket was taken over."""
        return slot.number in self._buckets

    def start(self, flat: Tensor, slot: Slot, step: int) -> Future[Any]:
        """Begin to replace ``flat`` by its sum; the future brings what the compactor's ``restore`` returned."""
        bucket = self._buckets[slot.number]
        with self._lock:
            future = bucket.begin(flat, step)
            failure = self._failure
            if failure is not None:
                bucket.end()
        if failure is not None:
            bucket.fail(failure)
            return future
        compacted = self._compactor.compact(flat, bucket.rows, bucket.memory)
        self._compacted.put(compacted, lambda: self._push(bucket), self._on_error)
        return future

    def fail(self, error: BaseException) -> None:
        """Let everything under way, and everything to come, end with ``error``."""
        with self._lock:
            self._failure = self._failure or error
            buckets = [bucket for bucket in self._buckets.values() if bucket.end()]
        for bucket in buckets:
            bucket.fail(error)

    def close(self) -> None:
        """End the threads."""
        self._compacted.close()
        self._summed.close()

    # Parts go to the owners of their chunks.

    def _push(self, bucket: _Bucket) -> None:
        for chunk in bucket.rows.chunks:
            if chunk.owner == self._rank:
                roll = bucket.rolls[chunk.index]
                with self._lock:
                    roll.expect(self._rank, bucket.step, 0)
                    is_complete = roll.enter(self._transport.size)
                if is_complete:
                    self._add(bucket, roll)
                continue
            length = self._length_of(bucket, chunk, [bucket.memory[chunk.index]])
            header = Header(Kind.COMPACT_PUSH, self._rank, bucket.number, chunk.index, bucket.step, length)
            self._send(chunk.owner, header, bucket.memory[chunk.index])

    def _place_part(self, header: Header) -> memoryview:
        bucket = self._buckets.get(header.unit)
        roll = None if bucket is None else bucket.rolls.get(header.chunk)
        try:
            if bucket is None or roll is None:
                raise ServerError(
                    f"rank {header.sender} sent chunk {header.chunk} of unit {header.unit}, which is not owned here"
                )
            if not bucket.rows.layout.could_be(header.length, roll.chunk.length):
                raise ServerError(
                    f"rank {header.sender} sent {header.length} bytes for {roll}, whose {roll.chunk.length} values "
                    f"take {bucket.rows.layout.size(0)} or more, and {4 * roll.chunk.length} as they are"
                )
            with self._lock:
                roll.expect(header.sender, header.clock, header.length)
        except ServerError as error:
            # A worker is out of step, and its sums will never finish.
            self._on_error(error)
            raise FrameError("out of turn", str(error)) from None
        return _bytes_of(roll.parts[roll.place_of(header.sender)], header.length)

    def _receive_part(self, header: Header, payload: memoryview) -> None:
        bucket = self._buckets[header.unit]
        roll = bucket.rolls[header.chunk]
        self._check_strays(bucket, roll.chunk, header, payload)
        with self._lock:
            is_complete = roll.enter(self._transport.size)
        if is_complete:
            self._add(bucket, roll)

    # An owner adds them up.

    def _add(self, bucket: _Bucket, roll: _Roll) -> None:
        try:
            layout, chunk = bucket.rows.layout, roll.chunk
            plain = [place for place, length in enumerate(roll.lengths) if layout.is_plain(length, chunk.length)]
            into = [roll.result[0], bucket.memory[chunk.index]]
            summed = self._compactor.add(roll.parts, plain, bucket.flat, chunk, layout, into)
            self._summed.put(summed, lambda: self._answer(bucket, roll, into), self._on_error)
        except BaseException as error:
            self._on_error(error)

    def _answer(self, bucket: _Bucket, roll: _Roll, into: Sequence[Tensor]) -> None:
        chunk = roll.chunk
        length = self._length_of(bucket, chunk, into)
        header = Header(Kind.COMPACT_RESULT, self._rank, bucket.number, chunk.index, bucket.step, length)
        for worker in self._others:
            self._send(worker, header, roll.result[0])
        self._land(bucket, chunk, length)

    # Sums come back.

    def _place_sum(self, header: Header) -> memoryview:
        bucket = self._buckets.get(header.unit)
        if bucket is None or not bucket.awaits(header.chunk, header.clock):
            raise FrameError("out of turn", f"{header} came, but no such sum is under way")
        chunk = bucket.rows.chunks[header.chunk]
        if header.sender != chunk.owner or not bucket.rows.layout.could_be(header.length, chunk.length):
            raise FrameError("out of turn", f"{header} came, but {chunk} was awaited")
        return _bytes_of(bucket.memory[chunk.index], header.length)

    def _receive_sum(self, header: Header, payload: memoryview) -> None:
        bucket = self._buckets[header.unit]
        chunk = bucket.rows.chunks[header.chunk]
        self._check_strays(bucket, chunk, header, payload)
        self._land(bucket, chunk, header.length)

    def _land(self, bucket: _Bucket, chunk: Chunk, length: int) -> None:
        with self._lock:
            is_complete = bucket.enter(chunk.index, length)
            if is_complete and bucket.number in self._leaving:
                self._leaving.remove(bucket.number)
                del self._buckets[bucket.number]
        if not is_complete:
            return
        # Not kept: the gradient may be freed before the next step.
        flat = bucket.take()
        try:
            done = self._compactor.restore(bucket.memory, bucket.rows.plain(bucket.lengths), bucket.rows, flat)
        except BaseException as error:
            bucket.fail(error)
        else:
            bucket.future.set_result(done)

    # What all of them need.

    def _length_of(self, bucket: _Bucket, chunk: Chunk, memory: Sequence[Tensor]) -> int:
        """Return the bytes of a chunk that was compacted in ``memory``; one with too many strays is left plain."""
        layout = bucket.rows.layout
        strays = _strays_in(_bytes_of(memory[0], 4))
        if strays <= layout.most_strays:
            return layout.size(strays)
        self._compactor.copy(bucket.flat, chunk, memory)
        return 4 * chunk.length

    def _check_strays(self, bucket: _Bucket, chunk: Chunk, header: Header, payload: memoryview) -> None:
        """Fail unless a compacted chunk is as long as the strays it announces make it: the device will believe it."""
        layout, strays = bucket.rows.layout, _strays_in(payload)
        if layout.is_plain(header.length, chunk.length) or layout.size(strays) == header.length:
            return
        error = ServerError(
            f"rank {header.sender} sent {header.length} bytes for chunk {chunk.index} of unit {chunk.unit}, "
            f"but with {strays} strays, which it announces, it has {layout.size(strays)}"
        )
        self._on_error(error)
        raise error

    def _send(self, peer: int, header: Header, memory: Tensor) -> None:
        self._transport.send(peer, header, _bytes_of(memory, header.length), priority=self._priority(header.unit))


class _Bucket:
    """A bucket's memory, and its sum under way."""

    def __init__(self, number: int, rows: ChunkRows, memory: Tensor, rolls: dict[int, _Roll]) -> None:
        self.number = number
        self.rows = rows
        self.memory = memory
        """This worker's parts, then the sums."""
        self.rolls = rolls
        """Of the chunks owned here."""
        self.lengths = [0 for _ in rows.chunks]
        """Bytes of each sum."""
        self.step = -1
        self.future: Future[Any]
        self._flat: Tensor | None = None
        self._missing: set[int] = set()
        """Chunks whose sums are not there."""

    def begin(self, flat: Tensor, step: int) -> Future[Any]:
        self._flat = flat
        self.step = step
        self.future = Future()
        self._missing = {chunk.index for chunk in self.rows.chunks}
        return self.future

    @property
    def flat(self) -> Tensor:
        assert self._flat is not None
        return self._flat

    def take(self) -> Tensor:
        """Return the tensor, to which nothing will be done any more."""
        flat, self._flat = self.flat, None
        return flat

    @property
    def is_under_way(self) -> bool:
        return bool(self._missing)

    def awaits(self, index: int, step: int) -> bool:
        return index in self._missing and step == self.step

    def enter(self, index: int, length: int) -> bool:
        """Note that a sum is there; true if it was the last. Called under the lock."""
        if index not in self._missing:  # it failed meanwhile
            return False
        self.lengths[index] = length
        self._missing.remove(index)
        return not self._missing

    def fail(self, error: BaseException) -> None:
        self.future.set_exception(error)

    def end(self) -> bool:
        """Break off what is under way; true if anything was. Called under the lock."""
        was_under_way = self.is_under_way
        self._missing = set()
        return was_under_way


class _Roll:
    """Who has brought a part of one owned chunk; called under the lock."""

    def __init__(self, chunk: Chunk, parts: Tensor, result: Tensor) -> None:
        self.chunk = chunk
        self.parts = parts
        """A row for every other worker, by rank."""
        self.result = result
        self.lengths = [0] * len(parts)
        """Bytes in each row."""
        self._clock = -1
        self._expected: set[int] = set()
        self._entered = 0

    def place_of(self, rank: int) -> int:
        """Return the row of another worker's part."""
        return rank - (rank > self.chunk.owner)

    def expect(self, rank: int, clock: int, length: int) -> None:
        """Check that it is the turn of this part, before it is written over what was there."""
        check_clock(self, rank, clock, self._clock, is_open=bool(self._expected))
        if rank in self._expected:
            raise refuse_second(self, rank, clock)
        self._clock = clock
        self._expected.add(rank)
        if rank != self.chunk.owner:
            self.lengths[self.place_of(rank)] = length

    def enter(self, workers: int) -> bool:
        """Note that a part is there; true if it was the last, and then the next clock may begin."""
        self._entered += 1
        if self._entered < workers:
            return False
        self._entered = 0
        self._expected = set()
        return True

    def __str__(self) -> str:
        return f"chunk {self.chunk.index} of unit {self.chunk.unit}"


def _bytes_of(memory: Tensor, length: int) -> memoryview:
    view: np.ndarray[Any, Any] = memory.numpy()
    return view[:length].data


def _strays_in(compacted: memoryview) -> int:
    return int.from_bytes(compacted[:4], "little")
