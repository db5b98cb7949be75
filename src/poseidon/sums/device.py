"""Sums on CUDA devices: chunks travel compacted (``compact.py``) and are added on the device.

The device compacts a bucket before it leaves; an owner's device restores the parts, adds them and compacts the sum; and
the receiver's restores that. This saves an eighth of the bytes on every link, and the processors only move bytes.

Rows of memory are reused from step to step without locks; ``server.py`` says why that is safe.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from poseidon.errors import ServerError
from poseidon.sums.arithmetic import Fail, Then
from poseidon.sums.chunks import Chunk
from poseidon.sums.compact import ChunkRows, CompactLayout, is_worth_compacting, strays_in
from poseidon.sums.encodings import Encoded, Encoding, Payload, PlainLayout
from poseidon.sums.events import Done, Waiter
from poseidon.sums.messages import Layouts
from poseidon.sums.slots import Slot
from poseidon.wire.settings import WireSettings

_log = logging.getLogger(__name__)


class Compactor(Protocol):
    """A device with memory beside it. Except :meth:`copy`, its methods return before the work is done.

    Encodings (:class:`~poseidon.sums.encodings.Encoding`) are given row by row.
    """

    def memory(self, rows: int, row_bytes: int) -> Tensor:
        """Return memory that both the device and the wire can reach."""

    def compact(self, flat: Tensor, rows: ChunkRows, memory: Tensor) -> Done:
        """Leave the compacted chunks of ``flat`` in ``memory``, once what the caller computes there is ready."""

    def add(
        self,
        parts: Tensor,
        encodings: Sequence[int],
        flat: Tensor,
        chunk: Chunk,
        layout: CompactLayout,
        into: Sequence[Tensor],
    ) -> Done:
        """Add up a chunk in ``flat``, and leave the sum there, and compacted in each of ``into``.

        ``parts`` are those of the other workers, by rank. This worker's own part lies in ``flat``; its place among the
        others is ``chunk.owner``.
        """

    def copy(self, flat: Tensor, chunk: Chunk, into: Sequence[Tensor]) -> None:
        """Leave a plain chunk in each of ``into``, and wait for it."""

    def restore(self, memory: Tensor, encodings: Sequence[int], rows: ChunkRows, flat: Tensor, divisor: int) -> Any:
        """Fill ``flat`` from ``memory``, divided by ``divisor``; return what tells when that is done."""


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


class DeviceAdder:
    """Adds up one slot of float32 on a device, an :class:`~poseidon.sums.arithmetic.Adder`.

    Sums travel as they are, and whoever receives one divides it by ``divisor``: quotients have more bits than sums. Its
    future brings what the compactor's ``restore`` returns.
    """

    def __init__(self, slot: Slot, rank: int, size: int, device: DeviceArithmetic, divisor: int = 1) -> None:
        self._slot = slot
        self._rows = ChunkRows.of(slot.chunks)
        self._layout = self._rows.layout
        self.layouts: Layouts = {Encoding.PLAIN: PlainLayout(4), Encoding.BITS_28: self._layout}
        self.together = size
        self._divisor = divisor
        self._device = device
        self._compactor = device.compactor
        row_bytes = self._layout.row_bytes
        self._memory = self._compactor.memory(len(slot.chunks), row_bytes)
        """This worker's parts, then the sums."""
        self._views = _views_of(self._memory)
        self._encodings: list[int] = [Encoding.PLAIN] * len(slot.chunks)
        """Of each sum."""
        owned = [chunk.index for chunk in slot.chunks if chunk.owner == rank]
        self._parts = {index: self._compactor.memory(size - 1, row_bytes) for index in owned}
        """For each chunk owned here, a row for every other worker, by rank."""
        self._part_views = {index: _views_of(parts) for index, parts in self._parts.items()}
        sums = {index: self._compactor.memory(1, row_bytes) for index in owned}
        self._sum_views = {index: _views_of(memory)[0] for index, memory in sums.items()}
        self._into = {index: (memory[0], self._memory[index]) for index, memory in sums.items()}
        """For each chunk owned here: its sum for the others, and where sums land here."""
        self._flat: Tensor | None = None

    def open(self, values: Tensor, then: Then, fail: Fail) -> None:
        """Let the device compact ``values``; ``then`` runs on a thread that waits for it."""
        if values.numel() != self._slot.chunks[-1].stop or values.dtype != torch.float32:
            raise ServerError(
                f"slot {self._slot.number} was given {values.numel()} values of {values.dtype}; "
                f"it holds {self._slot.chunks[-1].stop} of torch.float32"
            )
        self._flat = values
        self._device.compacted.put(self._compactor.compact(values, self._rows, self._memory), then, fail)

    def part(self, chunk: Chunk) -> Encoded:
        """Return the row of a chunk, cut to its size."""
        return self._finish(chunk, self._views[chunk.index], (self._memory[chunk.index],))

    def own(self, chunk: Chunk) -> None:
        """Return nothing: :meth:`add` finds this worker's part on the device."""

    def place_part(self, chunk: Chunk, rank: int, length: int) -> memoryview:
        """Return the row of another worker's part."""
        return self._part_views[chunk.index][rank - (rank > chunk.owner)][:length]

    def decode(self, chunk: Chunk, encoding: int, payload: memoryview) -> int:  # noqa: ARG002 - as in the contract
        """Return how to read the row; the device does that."""
        return encoding

    def add(self, chunk: Chunk, parts: Sequence[int | None], total: None) -> Done:  # noqa: ARG002 - all parts at once
        """Let the device add all parts."""
        encodings = [encoding for encoding in parts if encoding is not None]
        into = self._into[chunk.index]
        return self._compactor.add(self._parts[chunk.index], encodings, self._values, chunk, self._layout, into)

    def wait(self, total: Done, then: Then, fail: Fail) -> None:
        """Run ``then`` on a thread that waits for the device."""
        self._device.summed.put(total, then, fail)

    def encode(self, chunk: Chunk, total: Done) -> Encoded:  # noqa: ARG002 - the device wrote it
        """Return the row of a finished sum, cut to its size."""
        return self._finish(chunk, self._sum_views[chunk.index], self._into[chunk.index])

    def place_sum(self, chunk: Chunk, length: int) -> memoryview:
        """Return the row of this worker's part."""
        return self._views[chunk.index][:length]

    def land(self, chunk: Chunk, encoding: int, payload: Payload) -> None:  # noqa: ARG002 - as in the contract
        """Note how to read a sum; it is in its row."""
        self._encodings[chunk.index] = encoding

    def close(self) -> Any:
        """Let the device restore all sums."""
        # Not kept: the gradient may be freed before the next step.
        flat, self._flat = self._values, None
        return self._compactor.restore(self._memory, self._encodings, self._rows, flat, self._divisor)

    @property
    def _values(self) -> Tensor:
        assert self._flat is not None
        return self._flat

    def _finish(self, chunk: Chunk, compacted: memoryview, rows: Sequence[Tensor]) -> Encoded:
        """Return a chunk that was compacted in ``rows``; with too many strays, leave it plain there."""
        strays = strays_in(compacted)
        if strays <= self._layout.most_strays:
            return Encoded(Encoding.BITS_28, compacted[: self._layout.size(strays)])
        self._compactor.copy(self._values, chunk, rows)
        return Encoded(Encoding.PLAIN, compacted[: 4 * chunk.length])


def can_compact(settings: WireSettings | None = None) -> bool:
    """Return whether CUDA devices of this machine should compact, and Triton, which they need for it, is installed."""
    return (settings or WireSettings.from_environment()).compact and find_spec("triton") is not None


def find_compactor(workers: int, settings: WireSettings) -> Compactor | None:
    """Return the current CUDA device as a compactor; None where it should not or cannot be one, the latter logged."""
    if not can_compact(settings):
        return None
    try:
        from poseidon.sums.cuda_compactor import CudaCompactor

        return CudaCompactor(workers)
    except Exception as error:
        _log.warning("gradients travel as they are, with an eighth more bytes: Triton does not work here (%s)", error)
        return None


def is_compacted(slot: Slot, dtype: torch.dtype) -> bool:
    """Return whether a bucket of this kind travels compacted where the workers' devices can do it."""
    return dtype == torch.float32 and is_worth_compacting(dtype.itemsize, slot.chunks)


def _views_of(memory: Tensor) -> list[memoryview]:
    return [row.data for row in memory.numpy()]
