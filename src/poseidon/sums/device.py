"""Sums on CUDA devices: chunks travel compacted (``compact.py``) and are added on the device.

The device compacts a bucket before it leaves; an owner's device restores the parts, adds them and compacts the sum; and
the receiver's restores that. The processors only move bytes, and no more of them than travel.

Memory is reused from step to step without locks; ``server.py`` says why that is safe.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from poseidon.errors import ServerError
from poseidon.sums.arithmetic import Fail, Then
from poseidon.sums.chunks import Chunk
from poseidon.sums.compact import HEAD_BYTES, ChunkRows, CompactLayout, is_worth_compacting
from poseidon.sums.encodings import Encoded, Encoding, Payload, PlainLayout
from poseidon.sums.events import Done, Waiter
from poseidon.sums.messages import Layouts
from poseidon.sums.packed import ChunkTable, table_bytes
from poseidon.sums.slots import Slot
from poseidon.sums.touched import PackedRows, TouchedRows, most_packed_bytes, pack
from poseidon.wire.settings import WireSettings

_log = logging.getLogger(__name__)

_COMPACTED = (torch.float32, torch.bfloat16)
_REMEMBERED = 8


class Compacted(Done, Protocol):
    """Chunks that a device has compacted, or will have."""

    def fetch(self, row: int, into: Tensor, start: int, stop: int) -> None:
        """Copy bytes of a chunk, the first one being row 0, to the same place in ``into``, and wait for it."""


@dataclass(frozen=True)
class WeightChange:
    """What weights change from, where their change is compacted instead of themselves (``compact.py``)."""

    old: Tensor
    is_rounded: bool
    """Old and new weights are rounded to bf16."""


class Compactor(Protocol):
    """A device with memory beside it. Except :meth:`copy`, its methods return before the work is done."""

    def prepare(self, dtype: torch.dtype) -> None:
        """Do beforehand what only the first bucket of a kind needs."""

    def memory(self, size_bytes: int) -> Tensor:
        """Return memory that both the device and the wire can reach."""

    def compact(self, flat: Tensor, rows: ChunkRows, into: Tensor, lengths: Mapping[int, int]) -> Compacted:
        """Compact the chunks of ``flat``, once what the caller computes there is ready.

        Of the rows in ``lengths``, so many bytes are copied to the rows of ``into``.
        """

    def add(
        self, packed: Tensor, workers: int, own: Tensor, layout: CompactLayout, divisor: int, into: Tensor, length: int
    ) -> Compacted:
        """Add up a chunk in ``own``, and leave the sum there, and ``length`` bytes of it, compacted, in ``into``.

        ``packed`` has all workers' parts but this worker's, which lies in ``own`` (``packed.py``). Sums of bf16 are
        added in float32, divided by ``divisor`` and rounded; sums of float32 are left as they are.
        """

    def add_rows(
        self, packed: Tensor, rows: PackedRows, own: Tensor, layout: CompactLayout, into: Tensor, length: int
    ) -> Compacted:
        """Add all workers' rows, which are first added to zeros in their order, to a sum of float32 in ``own``."""

    def replace(
        self,
        own: Tensor,
        values: Tensor,
        layout: CompactLayout,
        into: Tensor,
        length: int,
        change: WeightChange | None = None,
    ) -> Compacted:
        """Replace a sum in ``own``, and ``length`` bytes of it in ``into``, by what the caller computes in ``values``.

        With ``change``, the bytes in ``into`` are those of the change that makes the values. Unlike :meth:`compact`
        this never waits for a backward under way.
        """

    def copy(self, own: Tensor, into: Tensor) -> None:
        """Leave a plain chunk in ``into``, and wait for it."""

    def restore(
        self, table: Tensor, chunks: Sequence[tuple[int, Tensor]], rows: ChunkRows, flat: Tensor, divisor: int
    ) -> Any:
        """Fill ``flat`` with chunks, to be packed at these positions behind ``table``; divide float32 by ``divisor``.

        Return what tells when that is done.
        """

    def change(
        self, table: Tensor, chunks: Sequence[tuple[int, Tensor]], rows: ChunkRows, flat: Tensor
    ) -> Callable[[Tensor], None]:
        """Return what fills ``flat`` later, given the weights that changes are from, in the order of ``flat``."""


class DeviceArithmetic:
    """A compactor and the threads that wait for it."""

    def __init__(self, compactor: Compactor, waiter: Callable[[str], Waiter] = Waiter) -> None:
        self.compactor = compactor
        # Two: a part waits for the backward that makes it, and no sum may wait for that.
        self.compacted = waiter("poseidon-compacted")
        self.summed = waiter("poseidon-summed")

    def close(self) -> None:
        """End the threads."""
        self.compacted.close()
        self.summed.close()


class Reach:
    """How much of a compacted chunk to copy before its size is known: what the last few needed, and a little more.

    A few, because steps may alternate; and what is missing has to be waited for.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._last: deque[int] = deque([most_bytes], maxlen=_REMEMBERED)
        self.length = most_bytes
        """Bytes to copy."""

    def note(self, size_bytes: int) -> None:
        """Learn from a chunk that was compacted to this size; just its head, if it travels plain."""
        self._last.append(size_bytes)
        largest = max(self._last)
        self.length = min(largest + largest // 16 + 1024, self._most_bytes)


class DeviceAdder:
    """Adds up one slot of float32 or bf16 on a device, an :class:`~poseidon.sums.arithmetic.Adder`.

    Sums of float32 travel as they are, and whoever receives one divides it by ``divisor``: quotients have more bits
    than sums. Sums of bf16 are divided by their owner and rounded once. Touched rows come last, so the device adds the
    other parts before. The slot's future brings what the compactor's ``restore`` returns.
    """

    def __init__(
        self,
        slot: Slot,
        rank: int,
        size: int,
        device: DeviceArithmetic,
        divisor: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        chunks = slot.chunks
        self._slot = slot
        self._rank = rank
        self._dtype = dtype
        self._divisor = divisor
        self._rows = ChunkRows.of(chunks, dtype.itemsize)
        self._layout = self._rows.layout
        self.layouts: Layouts = {Encoding.PLAIN: PlainLayout(dtype.itemsize), Encoding.COMPACT: self._layout}
        self.together = size
        self._device = device
        self._compactor = device.compactor
        self._compactor.prepare(dtype)
        row_bytes = self._layout.row_bytes
        owned = [chunk.index for chunk in chunks if chunk.owner == rank]

        self._memory = self._compactor.memory(len(chunks) * row_bytes).view(len(chunks), row_bytes)
        """This worker's parts, then the sums of others."""
        self._views = [_view_of(row) for row in self._memory]
        self._reaches = {chunk.index: Reach(row_bytes) for chunk in chunks if chunk.owner != rank}
        self._table_memory = self._compactor.memory(table_bytes(len(chunks)))
        self._table = ChunkTable(self._table_memory.numpy(), len(chunks))
        """Of the sums that came; those made here are on the device."""
        self._landed: dict[int, tuple[int, Tensor]] = {}

        self._parts = {index: self._compactor.memory(table_bytes(size) + (size - 1) * row_bytes) for index in owned}
        """For each chunk owned here, the others' parts as they came, behind a table by rank."""
        self._part_views = {index: _view_of(memory) for index, memory in self._parts.items()}
        self._part_tables = {index: ChunkTable(memory.numpy(), size) for index, memory in self._parts.items()}
        self._touched = {
            index: self._compactor.memory(most_packed_bytes(chunks[index], slot.width, size))
            for index in owned
            if slot.width
        }
        """For each chunk owned here, all workers' touched rows."""
        self._sums = {index: self._compactor.memory(row_bytes) for index in owned}
        self._sum_views = {index: _view_of(row) for index, row in self._sums.items()}
        self._sum_reaches = {index: Reach(row_bytes) for index in owned}
        self._flat: Tensor | None = None
        self._compacted: Compacted | None = None

    def open(self, values: Tensor, then: Then, fail: Fail) -> None:
        """Let the device compact ``values``; ``then`` runs on a thread that waits for it."""
        if values.numel() != self._slot.chunks[-1].stop or values.dtype != self._dtype:
            raise ServerError(
                f"slot {self._slot.number} was given {values.numel()} values of {values.dtype}; "
                f"it holds {self._slot.chunks[-1].stop} of {self._dtype}"
            )
        self._flat = values
        lengths = {index: reach.length for index, reach in self._reaches.items()}
        compacted = self._compacted = self._compactor.compact(values, self._rows, self._memory, lengths)

        def send() -> None:
            # Only now has the device surely read the sums of the step before.
            self._table.clear()
            self._landed = {}
            then()
            self._compacted = None

        self._device.compacted.put(compacted, send, fail)

    def part(self, chunk: Chunk) -> Encoded:
        """Return the row of a chunk, cut to its size."""
        assert self._compacted is not None
        index = chunk.index
        return self._finish(
            chunk, self._memory[index], self._views[index], self._reaches[index], self._compacted, index
        )

    def own(self, chunk: Chunk) -> None:
        """Return nothing: :meth:`add` finds this worker's part on the device."""

    def place_part(self, chunk: Chunk, rank: int, length: int) -> memoryview:
        """Return room behind the parts that came before."""
        position = self._part_tables[chunk.index].place(rank, length)
        return self._part_views[chunk.index][position : position + length]

    def decode(self, chunk: Chunk, encoding: int, payload: memoryview) -> int:  # noqa: ARG002 - as in the contract
        """Return how to read the part; the device does that."""
        return encoding

    def touch(self, chunk: Chunk, everybody: Sequence[TouchedRows]) -> PackedRows:
        """Leave the rows where the device can reach them."""
        return pack(everybody, chunk, self._touched[chunk.index].numpy())

    def add(self, chunk: Chunk, parts: Sequence[int | PackedRows | None], total: Compacted | None) -> Compacted:
        """Let the device add all workers' parts, or touched rows to the sum of these, or both."""
        index, own, into = chunk.index, self._own(chunk), self._sums[chunk.index]
        length = self._sum_reaches[index].length
        table = self._part_tables[index]
        for rank, part in enumerate(parts):
            if isinstance(part, int):
                table.mark(rank, part)
        if total is None:
            packed = self._parts[index][: table.used_bytes]
            # Of a sum that is not complete, nothing is copied.
            copied = 0 if self._slot.width else length
            total = self._compactor.add(packed, self.together, own, self._layout, self._divisor, into, copied)
        rows = parts[-1]
        if isinstance(rows, PackedRows):
            packed = self._touched[index][: rows.used_bytes]
            total = self._compactor.add_rows(packed, rows, own, self._layout, into, length)
        return total

    def wait(self, total: Compacted, then: Then, fail: Fail) -> None:
        """Run ``then`` on a thread that waits for the device."""
        self._device.summed.put(total, then, fail)

    def encode(self, chunk: Chunk, total: Compacted) -> Encoded:
        """Return a finished sum, cut to its size."""
        index = chunk.index
        self._part_tables[index].clear()
        return self._finish(chunk, self._sums[index], self._sum_views[index], self._sum_reaches[index], total, 0)

    def sum_of(self, chunk: Chunk) -> Tensor:
        """Return a finished sum where it lies on the device; bf16 is divided already."""
        return self._own(chunk)

    def encode_instead(
        self,
        chunk: Chunk,
        values: Tensor,
        change: WeightChange | None,
        then: Callable[[Encoded], None],
        fail: Fail,
    ) -> None:
        """Put ``values`` in the place of a finished sum; ``then`` gets them as they travel, once the device is done."""
        index = chunk.index
        row, reach = self._sums[index], self._sum_reaches[index]
        compacted = self._compactor.replace(self._own(chunk), values, self._layout, row, reach.length, change)
        self._part_tables[index].clear()

        def finish() -> None:
            encoded = self._finish(chunk, row, self._sum_views[index], reach, compacted, 0)
            if change is not None and encoded.encoding != Encoding.PLAIN:
                kind = Encoding.ROUNDED_CHANGE if change.is_rounded else Encoding.CHANGE
                encoded = Encoded(kind, encoded.payload)
            then(encoded)

        self._device.summed.put(compacted, finish, fail)

    def place_sum(self, chunk: Chunk, length: int) -> memoryview:
        """Return the row of this worker's part."""
        return self._views[chunk.index][:length]

    def land(self, chunk: Chunk, encoding: int, payload: Payload) -> None:
        """Note where a sum is and how to read it; one that was made here is on the device."""
        if chunk.owner != self._rank:
            index, length = chunk.index, payload.nbytes
            self._landed[index] = (self._table.place(index, length), self._memory[index, :length])
            self._table.mark(index, encoding)

    def close(self) -> Any:
        """Let the device restore all sums."""
        # Not kept: the gradient may be freed before the next step.
        flat, self._flat = self._values, None
        landed = list(self._landed.values())
        return self._compactor.restore(self._table_memory, landed, self._rows, flat, self._divisor)

    def close_later(self) -> Callable[[Tensor], None]:
        """End the step; return what leaves the sums in the values, given the weights that some are changes from."""
        flat, self._flat = self._values, None
        return self._compactor.change(self._table_memory, list(self._landed.values()), self._rows, flat)

    @property
    def _values(self) -> Tensor:
        assert self._flat is not None
        return self._flat

    def _own(self, chunk: Chunk) -> Tensor:
        return self._values[chunk.start : chunk.stop]

    def _finish(
        self, chunk: Chunk, row: Tensor, view: memoryview, reach: Reach, compacted: Compacted, number: int
    ) -> Encoded:
        """Return a compacted chunk, of which ``reach`` was copied to ``row``; leave a longer one there plain."""
        plain_bytes = self._dtype.itemsize * chunk.length
        size_bytes = self._layout.measure(view)
        if size_bytes >= plain_bytes:
            self._compactor.copy(self._own(chunk), row[:plain_bytes])
            reach.note(HEAD_BYTES)
            return Encoded(Encoding.PLAIN, view[:plain_bytes])
        if size_bytes > reach.length:
            compacted.fetch(number, row, reach.length, size_bytes)
        reach.note(size_bytes)
        return Encoded(Encoding.COMPACT, view[:size_bytes])


def can_compact(settings: WireSettings | None = None) -> bool:
    """Return whether CUDA devices of this machine should compact, and Triton, which they need for it, is installed."""
    return (settings or WireSettings.from_environment()).compact and find_spec("triton") is not None


def find_compactor(settings: WireSettings) -> Compactor | None:
    """Return the current CUDA device as a compactor; None where it should not or cannot be one, the latter logged."""
    if not can_compact(settings):
        return None
    try:
        from poseidon.sums.cuda_compactor import CudaCompactor

        return CudaCompactor()
    except Exception as error:
        _log.warning("gradients travel as they are, with more bytes: Triton does not work here (%s)", error)
        return None


def is_compacted(slot: Slot, dtype: torch.dtype) -> bool:
    """Return whether a bucket of this kind travels compacted where the workers' devices can do it."""
    return dtype in _COMPACTED and is_worth_compacting(slot.chunks)


def _view_of(memory: Tensor) -> memoryview:
    return memory.numpy().data
