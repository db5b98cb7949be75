"""A device in plain NumPy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import compact_codec
from compact_codec import compact, restore
from poseidon.sums.compact import ChunkRows, CompactLayout
from poseidon.sums.device import WeightChange
from poseidon.sums.encodings import Encoding
from poseidon.sums.packed import HERE
from poseidon.sums.touched import NOWHERE, PackedRows
from poseidon.wire.formats import FORMATS

Array = np.ndarray[Any, Any]


class Rows:
    """Compacted chunks; everything is done at once."""

    def __init__(self, rows: Sequence[bytes], owner: HostCompactor) -> None:
        self._rows = rows
        self._owner = owner

    def synchronize(self) -> None:
        pass

    def copy(self, row: int, into: Tensor, start: int, stop: int) -> None:
        piece = bytearray(self._rows[row][start:stop])
        if piece:
            into[start : start + len(piece)] = torch.frombuffer(piece, dtype=torch.uint8)

    def fetch(self, row: int, into: Tensor, start: int, stop: int) -> None:
        self._owner.fetched += 1
        self.copy(row, into, start, stop)


class HostCompactor:
    """A stand-in for a device; it does everything at once."""

    def __init__(self) -> None:
        self.copied = 0
        self.fetched = 0
        self.moved_bytes = 0
        """Bytes that went over its bus, to and fro."""

    def prepare(self, dtype: torch.dtype) -> None:
        pass

    def memory(self, size_bytes: int) -> Tensor:
        return torch.full((size_bytes,), 0xAA, dtype=torch.uint8)

    def compact(self, flat: Tensor, rows: ChunkRows, into: Tensor, lengths: Mapping[int, int]) -> Rows:
        wide = _widen(flat)
        compacted = Rows([compact(wide[chunk.start : chunk.stop], rows.layout) for chunk in rows.chunks], self)
        for row, length in lengths.items():
            self._copy_out(compacted, row, into[row], length)
        return compacted

    def add(
        self, packed: Tensor, workers: int, own: Tensor, layout: CompactLayout, divisor: int, into: Tensor, length: int
    ) -> Rows:
        self.moved_bytes += len(packed)
        parts = [_read(packed, number, own, layout) for number in range(workers)]
        with np.errstate(over="ignore"):
            total = functools.reduce(np.add, parts)
        if own.dtype == torch.bfloat16:
            total = total / np.float32(divisor)
        _narrow(total, own)
        compacted = Rows([compact(_widen(own), layout)], self)
        self._copy_out(compacted, 0, into, length)
        return compacted

    def add_rows(
        self, packed: Tensor, rows: PackedRows, own: Tensor, layout: CompactLayout, into: Tensor, length: int
    ) -> Rows:
        assert len(packed) == rows.used_bytes
        self.moved_bytes += len(packed)
        places = packed[: rows.values_at].view(torch.int32).numpy().reshape(rows.rows, rows.workers)
        values = packed[rows.values_at :].view(torch.float32).numpy().reshape(rows.count, rows.width)
        total = np.zeros((rows.rows, rows.width), np.float32)
        for column in places.T:
            (touched,) = np.nonzero(column != NOWHERE)
            total[touched] += values[column[touched]]
        _narrow(own.numpy() + total.reshape(-1)[rows.skipped :][: len(own)], own)
        compacted = Rows([compact(_widen(own), layout)], self)
        self._copy_out(compacted, 0, into, length)
        return compacted

    def replace(
        self,
        own: Tensor,
        values: Tensor,
        layout: CompactLayout,
        into: Tensor,
        length: int,
        change: WeightChange | None = None,
    ) -> Rows:
        own.copy_(values)
        wide = _widen(own)
        if change is not None:
            wide = compact_codec.change(wide, change.old.numpy(), change.is_rounded)
        compacted = Rows([compact(wide, layout)], self)
        self._copy_out(compacted, 0, into, length)
        return compacted

    def copy(self, own: Tensor, into: Tensor) -> None:
        self.copied += 1
        into.view(own.dtype).copy_(own)

    def change(
        self, table: Tensor, chunks: Sequence[tuple[int, Tensor]], rows: ChunkRows, flat: Tensor
    ) -> Callable[[Tensor], None]:
        table, chunks = table.clone(), [(at, chunk.clone()) for at, chunk in chunks]

        def restore(old: Tensor) -> None:
            self.restore(table, chunks, rows, flat, 1, old)

        return restore

    def restore(
        self,
        table: Tensor,
        chunks: Sequence[tuple[int, Tensor]],
        rows: ChunkRows,
        flat: Tensor,
        divisor: int,
        old: Tensor | None = None,
    ) -> str:
        pieces = [(0, table), *chunks]
        self.moved_bytes += sum(len(piece) for _, piece in pieces)
        packed = torch.full((max(at + len(piece) for at, piece in pieces),), 0x55, dtype=torch.uint8)
        for at, piece in pieces:
            packed[at : at + len(piece)] = piece
        for number, chunk in enumerate(rows.chunks):
            own = flat[chunk.start : chunk.stop]
            values = _read(packed, number, own, rows.layout)
            encoding = packed.numpy()[16 * number :][:16].view(np.int64)[1]
            if encoding in (Encoding.CHANGE, Encoding.ROUNDED_CHANGE):
                assert old is not None
                earlier = old[chunk.start : chunk.stop].numpy()
                values = compact_codec.changed(values, earlier, encoding == Encoding.ROUNDED_CHANGE)
            _narrow(values / np.float32(divisor) if flat.dtype == torch.float32 else values, own)
        return "restored"

    def _copy_out(self, compacted: Rows, row: int, into: Tensor, length: int) -> None:
        self.moved_bytes += length
        compacted.copy(row, into, 0, length)


def _read(packed: Tensor, number: int, own: Tensor, layout: CompactLayout) -> Array:
    """Return the values of a chunk of the table, as float32."""
    position, encoding = packed.numpy()[16 * number :][:16].view(np.int64)
    chunk = packed[position:]
    if encoding == HERE:
        return _widen(own).copy()
    if encoding in (Encoding.COMPACT, Encoding.CHANGE, Encoding.ROUNDED_CHANGE):
        size = layout.measure(chunk.numpy().data)
        return restore(chunk[:size].numpy().data, len(own), layout)
    return _widen(chunk[: own.nbytes].view(own.dtype))


def _widen(values: Tensor) -> Array:
    if values.dtype == torch.bfloat16:
        return FORMATS["bfloat16"].widen(values.view(torch.uint16).numpy())
    return values.numpy()


def _narrow(values: Array, into: Tensor) -> None:
    if into.dtype == torch.bfloat16:
        into.view(torch.uint16).copy_(torch.from_numpy(FORMATS["bfloat16"].narrow(values)))
    else:
        into.copy_(torch.from_numpy(values))
