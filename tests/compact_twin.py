"""The compacted format again, in plain NumPy: a reference for the kernels, and a stand-in device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poseidon.sums.chunks import Chunk
from poseidon.sums.compact import GROUP, HEAD_BYTES, ChunkRows, CompactLayout
from poseidon.sums.encodings import Encoding
from poseidon.sums.events import Done

Array = np.ndarray[Any, Any]


def compact(values: Array, layout: CompactLayout) -> bytes | None:
    """Return the compacted chunk, None where nothing would be gained."""
    bits = np.zeros(layout.groups * GROUP, np.uint32)
    bits[: len(values)] = values.view(np.uint32)
    exponents = (bits >> 23 & 0xFF).astype(np.int64)
    tops = exponents.reshape(-1, GROUP).max(axis=1)
    distances = np.repeat(tops, GROUP) - exponents
    codes = np.where(exponents == 0, 15, np.minimum(distances, 15)).astype(np.uint8).reshape(-1, 2, GROUP // 2)
    strays = np.flatnonzero((distances >= 15) & (exponents != 0))
    if len(strays) > layout.most_strays:
        return None
    compacted = b"".join(
        [
            len(strays).to_bytes(4, "little").ljust(HEAD_BYTES, b"\0"),
            (bits & 0xFFFF).astype("<u2").tobytes(),
            (bits >> 24 & 0x80 | bits >> 16 & 0x7F).astype(np.uint8).tobytes(),
            (codes[:, 0] | codes[:, 1] << 4).tobytes(),
            tops.astype(np.uint8).tobytes(),
        ]
    ).ljust(layout.strays_at, b"\0")
    return compacted + (strays | exponents[strays] << 24).astype("<u4").tobytes()


def restore(compacted: bytes | memoryview, values: int, layout: CompactLayout) -> Array:
    """Return the values of a compacted chunk."""
    data = np.frombuffer(compacted, np.uint8)
    padded = layout.groups * GROUP
    low = data[layout.low_at :][: 2 * padded].view("<u2").astype(np.uint32)
    high = data[layout.high_at :][:padded].astype(np.uint32)
    pairs = data[layout.codes_at :][: padded // 2].reshape(-1, GROUP // 2)
    codes = np.stack([pairs & 0xF, pairs >> 4], axis=1).reshape(-1).astype(np.uint32)
    tops = np.repeat(data[layout.tops_at :][: layout.groups], GROUP).astype(np.uint32)
    exponents = np.where(codes == 15, 0, tops - codes).astype(np.uint32)
    (count,) = data[:4].view("<u4")
    for stray in data[layout.strays_at :][: 4 * count].view("<u4"):
        exponents[stray & 0xFFFFFF] = stray >> 24
    bits = low | (high & 0x7F) << 16 | exponents << 23 | (high & 0x80) << 24
    return bits.view(np.float32)[:values]


def same_bits(one: Array, other: Array) -> bool:
    """Return whether two arrays of float32 hold the same bits."""
    return np.array_equal(one.view(np.uint32), other.view(np.uint32))


class Now:
    def synchronize(self) -> None:
        pass


class HostCompactor:
    """A stand-in for a device; it does everything at once."""

    def __init__(self) -> None:
        self.copied = 0

    def memory(self, rows: int, row_bytes: int) -> Tensor:
        return torch.full((rows, row_bytes), 0xAA, dtype=torch.uint8)

    def compact(self, flat: Tensor, rows: ChunkRows, memory: Tensor) -> Done:
        for chunk in rows.chunks:
            self._compact(flat, chunk, rows.layout, [memory[chunk.index]])
        return Now()

    def add(
        self,
        parts: Tensor,
        encodings: Sequence[int],
        flat: Tensor,
        chunk: Chunk,
        layout: CompactLayout,
        into: Sequence[Tensor],
    ) -> Done:
        values = [self._read(*row, chunk, layout) for row in zip(parts, encodings, strict=True)]
        values.insert(chunk.owner, flat[chunk.start : chunk.stop].numpy())
        with np.errstate(over="ignore"):
            flat[chunk.start : chunk.stop] = torch.from_numpy(functools.reduce(np.add, values))
        self._compact(flat, chunk, layout, into)
        return Now()

    def copy(self, flat: Tensor, chunk: Chunk, into: Sequence[Tensor]) -> None:
        self.copied += 1
        for memory in into:
            memory[: 4 * chunk.length] = flat[chunk.start : chunk.stop].view(torch.uint8)

    def restore(self, memory: Tensor, encodings: Sequence[int], rows: ChunkRows, flat: Tensor, divisor: int) -> str:
        for chunk in rows.chunks:
            values = self._read(memory[chunk.index], encodings[chunk.index], chunk, rows.layout)
            flat[chunk.start : chunk.stop] = torch.from_numpy(values / np.float32(divisor))
        return "restored"

    def _compact(self, flat: Tensor, chunk: Chunk, layout: CompactLayout, into: Sequence[Tensor]) -> None:
        compacted = compact(flat[chunk.start : chunk.stop].numpy(), layout)
        for memory in into:
            if compacted is None:
                memory[:4] = 0xFF
            else:
                memory[: len(compacted)] = torch.frombuffer(bytearray(compacted), dtype=torch.uint8)

    def _read(self, memory: Tensor, encoding: int, chunk: Chunk, layout: CompactLayout) -> Array:
        data = memory.numpy()
        if encoding == Encoding.PLAIN:
            plain: Array = data[: 4 * chunk.length].view(np.float32)
            return plain
        return restore(data.data, chunk.length, layout)
