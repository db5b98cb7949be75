"""Compacts, adds and restores on a CUDA device, on streams beside the computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from poseidon.sums import compact_kernels as kernels
from poseidon.sums.chunks import Chunk
from poseidon.sums.compact import FEWEST_COMPACTED, ChunkRows, CompactLayout
from poseidon.sums.device import WeightChange
from poseidon.sums.encodings import Encoding
from poseidon.sums.events import record
from poseidon.sums.packed import ChunkTable, table_bytes
from poseidon.sums.touched import PackedRows, TouchedRows, most_packed_bytes, pack

_URGENT = -1
"""The device runs these streams first: another worker's next layer waits for them."""


class _Streams:
    """The streams beside the computation of one device."""

    def __init__(self, device: torch.device) -> None:
        self.out, self.sums, self.back = (torch.cuda.Stream(device, _URGENT) for _ in range(3))


class CudaRows:
    """Chunks that ``stream`` compacts in ``rows``, a :class:`~poseidon.sums.device.Compacted`.

    What is fetched later is copied on ``later``: on the stream itself it would come behind buckets whose gradients do
    not exist yet.
    """

    def __init__(self, rows: Tensor, stream: torch.cuda.Stream, later: torch.cuda.Stream) -> None:
        self._rows = rows
        self._later = later
        self._done = record(stream)

    def synchronize(self) -> None:
        """Wait for the chunks, and for what was copied of them at first."""
        self._done.synchronize()

    def fetch(self, row: int, into: Tensor, start: int, stop: int) -> None:
        """Copy more of a chunk."""
        with torch.cuda.device(self._rows.device), torch.cuda.stream(self._later):
            into[start:stop].copy_(self._rows[row, start:stop], non_blocking=True)
            record(self._later).synchronize()


class CudaCompactor:
    """CUDA devices as a :class:`~poseidon.sums.device.Compactor`; any thread may call it.

    Making one raises whatever Triton raises where it does not work.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, _Streams] = {}
        self._prepared: set[torch.dtype] = set()
        self.prepare(torch.float32)

    def prepare(self, dtype: torch.dtype) -> None:
        """Compile all kernels, on this thread: others must not wait for that in the middle of a step."""
        if dtype not in self._prepared:
            self._try_out(dtype)
            self._prepared.add(dtype)

    def memory(self, size_bytes: int) -> Tensor:
        """Return pinned memory."""
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def compact(self, flat: Tensor, rows: ChunkRows, into: Tensor, lengths: Mapping[int, int]) -> CudaRows:
        """Compact ``flat`` after the present work of the compute stream, and copy it out."""
        out = self._streams_of(flat.device).out
        out.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.device(flat.device), torch.cuda.stream(out):
            compacted = torch.empty_like(into, device=flat.device)
            kernels.compact(flat, rows, compacted)
            if lengths:
                torch._foreach_copy_(
                    [into[row, :length] for row, length in lengths.items()],
                    [compacted[row, :length] for row, length in lengths.items()],
                    non_blocking=True,
                )
            return CudaRows(compacted, out, self._streams_of(flat.device).sums)

    def add(
        self, packed: Tensor, workers: int, own: Tensor, layout: CompactLayout, divisor: int, into: Tensor, length: int
    ) -> CudaRows:
        """Copy the parts in, add them in the order of ranks, and copy the compacted sum out."""
        sums = self._streams_of(own.device).sums
        with torch.cuda.device(own.device), torch.cuda.stream(sums):
            there = packed.to(own.device, non_blocking=True)
            compacted = torch.empty((1, layout.row_bytes), dtype=torch.uint8, device=own.device)
            kernels.add(there, workers, own, layout, divisor, compacted[0])
            into[:length].copy_(compacted[0, :length], non_blocking=True)
            return CudaRows(compacted, sums, sums)

    def add_rows(
        self, packed: Tensor, rows: PackedRows, own: Tensor, layout: CompactLayout, into: Tensor, length: int
    ) -> CudaRows:
        """Copy the rows in, add them, and copy the compacted sum out."""
        sums = self._streams_of(own.device).sums
        with torch.cuda.device(own.device), torch.cuda.stream(sums):
            there = packed.to(own.device, non_blocking=True)
            compacted = torch.empty((1, layout.row_bytes), dtype=torch.uint8, device=own.device)
            kernels.add_rows(there, rows, own, layout, compacted[0])
            into[:length].copy_(compacted[0, :length], non_blocking=True)
            return CudaRows(compacted, sums, sums)

    def replace(
        self,
        own: Tensor,
        values: Tensor,
        layout: CompactLayout,
        into: Tensor,
        length: int,
        change: WeightChange | None = None,
    ) -> CudaRows:
        """Copy and compact the values on the stream of sums, after the present work of the caller's stream."""
        sums = self._streams_of(own.device).sums
        sums.wait_stream(torch.cuda.current_stream(own.device))
        with torch.cuda.device(own.device), torch.cuda.stream(sums):
            own.copy_(values)
            values.record_stream(sums)
            compacted = torch.empty((1, layout.row_bytes), dtype=torch.uint8, device=own.device)
            alone = ChunkRows.alone(own.numel(), layout)
            if change is None:
                kernels.compact(own, alone, compacted)
            else:
                kernels.compact(own, alone, compacted, change.old, change.is_rounded)
                change.old.record_stream(sums)
            into[:length].copy_(compacted[0, :length], non_blocking=True)
            return CudaRows(compacted, sums, sums)

    def copy(self, own: Tensor, into: Tensor) -> None:
        """Copy a chunk out plain."""
        sums = self._streams_of(own.device).sums
        with torch.cuda.device(own.device), torch.cuda.stream(sums):
            into.view(own.dtype).copy_(own, non_blocking=True)
            record(sums).synchronize()

    def restore(
        self, table: Tensor, chunks: Sequence[tuple[int, Tensor]], rows: ChunkRows, flat: Tensor, divisor: int
    ) -> torch.cuda.Event:
        """Copy table and chunks in, and restore them."""
        back = self._streams_of(flat.device).back
        with torch.cuda.device(flat.device), torch.cuda.stream(back):
            kernels.restore(_bring(table, chunks, flat.device), rows, flat, divisor)
            return record(back)

    def change(
        self, table: Tensor, chunks: Sequence[tuple[int, Tensor]], rows: ChunkRows, flat: Tensor
    ) -> Callable[[Tensor], None]:
        """Copy table and chunks in; what is returned restores them on the stream of its caller."""
        back = self._streams_of(flat.device).back
        with torch.cuda.device(flat.device), torch.cuda.stream(back):
            packed = _bring(table, chunks, flat.device)
            done = record(back)

        def restore(old: Tensor) -> None:
            stream = torch.cuda.current_stream(flat.device)
            stream.wait_event(done)
            packed.record_stream(stream)
            with torch.cuda.device(flat.device):
                kernels.restore(packed, rows, flat, 1, old)

        return restore

    def _streams_of(self, device: torch.device) -> _Streams:
        if device not in self._streams:
            # Two threads may come here at once; the later one takes what it finds.
            self._streams.setdefault(device, _Streams(device))
        return self._streams[device]

    def _try_out(self, dtype: torch.dtype) -> None:
        """Compact, add, divide and restore some values: what this device makes of them is known."""
        size = FEWEST_COMPACTED
        values = _sample(size).to(dtype)
        rows = ChunkRows.of((Chunk(0, 0, 0, size, 0), Chunk(0, 1, size, 2 * size, 1)), dtype.itemsize)
        row_bytes = rows.layout.row_bytes
        flat = values.repeat(2).to(torch.device("cuda", torch.cuda.current_device()))
        memory = self.memory(2 * row_bytes).view(2, row_bytes)
        self.compact(flat, rows, memory, {0: row_bytes, 1: row_bytes}).synchronize()
        # The values of chunk 1 are another worker's part of chunk 0, whose sum is then that of chunk 1 too.
        packed = self.memory(table_bytes(2) + row_bytes)
        parts = ChunkTable(packed.numpy(), 2)
        packed[parts.place(1, row_bytes) :].copy_(memory[1])
        parts.mark(1, Encoding.COMPACT)
        self.add(packed, 2, flat[:size], rows.layout, 4, memory[0], row_bytes).synchronize()
        table_memory = self.memory(table_bytes(2))
        table = ChunkTable(table_memory.numpy(), 2)
        landed = [(table.place(1, row_bytes), memory[0])]
        table.mark(1, Encoding.COMPACT)
        self.restore(table_memory, landed, rows, flat, 4).synchronize()
        if dtype is torch.float32:
            self._try_rows(flat, rows, memory)
            self._try_changes(flat, rows, memory, table_memory, table)
        is_wrong = flat.cpu() != values.repeat(2) / 2
        if bool(is_wrong.any()):
            at = int(is_wrong.nonzero()[0])
            raise RuntimeError(
                f"twice {values[at % size].item()}, compacted, divided by 4 and restored, makes {flat[at].item()} at "
                f"place {at}; {int(is_wrong.sum())} of {2 * size} values are wrong"
            )

    def _try_rows(self, flat: Tensor, rows: ChunkRows, memory: Tensor) -> None:
        """Let a worker touch the second of two rows of the first chunk, with zeros."""
        chunk, width = rows.chunks[0], rows.chunks[0].length // 2
        packed = self.memory(most_packed_bytes(chunk, width, 1))
        touched = pack([TouchedRows(np.ones(1, np.int64), np.zeros((1, width), np.float32))], chunk, packed.numpy())
        own, used = flat[: chunk.length], packed[: touched.used_bytes]
        self.add_rows(used, touched, own, rows.layout, memory[0], rows.layout.row_bytes).synchronize()

    def _try_changes(
        self, flat: Tensor, rows: ChunkRows, memory: Tensor, table_memory: Tensor, table: ChunkTable
    ) -> None:
        """Let ``flat`` become twice itself, and itself again; compiles the kernels of changes."""
        row_bytes = rows.layout.row_bytes
        for is_rounded, encoding in ((False, Encoding.CHANGE), (True, Encoding.ROUNDED_CHANGE)):
            old, half = flat.clone(), len(flat) // 2
            new = torch.empty_like(flat)
            change = WeightChange(old[:half], is_rounded)
            self.replace(new[:half], flat[:half] * 2, rows.layout, memory[0], row_bytes, change).synchronize()
            table.clear()
            landed = []
            for number in range(2):
                landed.append((table.place(number, row_bytes), memory[0]))
                table.mark(number, encoding)
            self.change(table_memory, landed, rows, new.zero_())(old)
            flat.copy_(new / 2)
            torch.cuda.synchronize()


def _sample(size: int) -> Tensor:
    """Return powers of two: half of them close to each other but for a few, half with all exponents and strays."""
    places = torch.arange(size, device="cpu")
    close = places % 6 + 7 * (places % 37 == 0) + 9 * (places % 101 == 0)
    exponents = torch.where(places < size // 2, close, places % 20)
    return torch.ldexp(torch.where(places % 3 == 0, -1.0, 1.0), -exponents)


def _bring(table: Tensor, chunks: Sequence[tuple[int, Tensor]], device: torch.device) -> Tensor:
    """Copy chunks to their positions behind the table."""
    pieces = [(0, table), *chunks]
    packed = torch.empty(max(position + len(piece) for position, piece in pieces), dtype=torch.uint8, device=device)
    torch._foreach_copy_(
        [packed[position : position + len(piece)] for position, piece in pieces],
        [piece for _, piece in pieces],
        non_blocking=True,
    )
    return packed
