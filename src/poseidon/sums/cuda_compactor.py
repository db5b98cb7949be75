"""Compacts, adds and restores on a CUDA device, on streams beside the computation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from poseidon.sums import compact_kernels as kernels
from poseidon.sums.chunks import Chunk
from poseidon.sums.compact import FEWEST_COMPACTED, ChunkRows, CompactLayout
from poseidon.sums.encodings import Encoding
from poseidon.sums.events import record

_URGENT = -1
"""The device runs these streams first: another worker's next layer waits for them."""


class _Streams:
    """The streams beside the computation of one device."""

    def __init__(self, device: torch.device) -> None:
        self.out, self.sums, self.back = (torch.cuda.Stream(device, _URGENT) for _ in range(3))


class CudaCompactor:
    """CUDA devices as a :class:`~poseidon.sums.device.Compactor`; any thread may call it.

    Making one raises whatever Triton raises where it does not work.
    """

    def __init__(self, workers: int) -> None:
        self._streams: dict[torch.device, _Streams] = {}
        self._try_out(workers)

    def memory(self, rows: int, row_bytes: int) -> Tensor:
        """Return pinned memory."""
        return torch.empty((rows, row_bytes), dtype=torch.uint8, device="cpu", pin_memory=True)

    def compact(self, flat: Tensor, rows: ChunkRows, memory: Tensor) -> torch.cuda.Event:
        """Compact ``flat`` after the present work of the compute stream, and copy it out."""
        out = self._streams_of(flat.device).out
        out.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.device(flat.device), torch.cuda.stream(out):
            compacted = torch.empty_like(memory, device=flat.device)
            kernels.compact(flat, rows.quotient, rows.longer, compacted, rows.layout)
            memory.copy_(compacted, non_blocking=True)
            return record(out)

    def add(
        self,
        parts: Tensor,
        encodings: Sequence[int],
        flat: Tensor,
        chunk: Chunk,
        layout: CompactLayout,
        into: Sequence[Tensor],
    ) -> torch.cuda.Event:
        """Copy the parts in, add them to ``flat`` in the order of ranks, and copy the compacted sum out."""
        sums = self._streams_of(flat.device).sums
        with torch.cuda.device(flat.device), torch.cuda.stream(sums):
            there = parts.to(flat.device, non_blocking=True)
            values = torch.empty((len(parts), chunk.length), dtype=torch.float32, device=flat.device)
            kernels.restore(there, layout, values.view(-1), chunk.length, 0)
            for place in plain_rows(encodings):
                values[place].copy_(there[place, : 4 * chunk.length].view(torch.float32))
            own = flat[chunk.start : chunk.stop]
            kernels.add_up(values, own, chunk.owner)
            compacted = torch.empty((1, layout.row_bytes), dtype=torch.uint8, device=flat.device)
            kernels.compact(own, chunk.length, 0, compacted, layout)
            for memory in into:
                memory.copy_(compacted[0], non_blocking=True)
            return record(sums)

    def copy(self, flat: Tensor, chunk: Chunk, into: Sequence[Tensor]) -> None:
        """Copy a chunk out plain."""
        sums = self._streams_of(flat.device).sums
        with torch.cuda.device(flat.device), torch.cuda.stream(sums):
            for memory in into:
                memory[: 4 * chunk.length].view(torch.float32).copy_(flat[chunk.start : chunk.stop], non_blocking=True)
            record(sums).synchronize()

    def restore(
        self, memory: Tensor, encodings: Sequence[int], rows: ChunkRows, flat: Tensor, divisor: int
    ) -> torch.cuda.Event:
        """Copy the chunks in, restore those that are compacted, and divide."""
        back = self._streams_of(flat.device).back
        with torch.cuda.device(flat.device), torch.cuda.stream(back):
            there = memory.to(flat.device, non_blocking=True)
            kernels.restore(there, rows.layout, flat, rows.quotient, rows.longer)
            for index in plain_rows(encodings):
                chunk = rows.chunks[index]
                flat[chunk.start : chunk.stop].copy_(there[index, : 4 * chunk.length].view(torch.float32))
            if divisor != 1:
                kernels.divide(flat, divisor)
            return record(back)

    def _streams_of(self, device: torch.device) -> _Streams:
        if device not in self._streams:
            # Two threads may come here at once; the later one takes what it finds.
            self._streams.setdefault(device, _Streams(device))
        return self._streams[device]

    def _try_out(self, workers: int) -> None:
        """Compile all kernels, on this thread: others must not wait for that in the middle of a step."""
        size = FEWEST_COMPACTED
        chunks = tuple(Chunk(0, index, index * size, (index + 1) * size, index) for index in range(workers))
        rows = ChunkRows.of(chunks)
        flat = torch.ones(workers * size, dtype=torch.float32, device=torch.device("cuda", torch.cuda.current_device()))
        memory = self.memory(workers, rows.layout.row_bytes)
        self.compact(flat, rows, memory).synchronize()
        encodings = [Encoding.BITS_28] * workers
        self.add(memory[1:], encodings[1:], flat, chunks[0], rows.layout, [memory[0]]).synchronize()
        self.restore(memory, encodings, rows, flat, 2).synchronize()
        total = flat.sum().item()
        if total != (2 * workers - 1) * size / 2:
            raise RuntimeError(f"{workers * size} ones, compacted, added up and halved, make {total:g}")


def plain_rows(encodings: Sequence[int]) -> list[int]:
    """Return the rows that are not compacted."""
    return [row for row, encoding in enumerate(encodings) if encoding == Encoding.PLAIN]
