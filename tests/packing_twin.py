"""The packed format once more, in NumPy and as plainly as possible: what kernels are compared with, and a stand-in."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poseidon.routes.packed import Rows
from poseidon.routes.staging import Done
from poseidon.server.chunks import Chunk
from poseidon.server.packing import GROUP, HEAD_BYTES, Packing

Array = np.ndarray[Any, Any]


def pack(values: Array, packing: Packing) -> bytes | None:
    """Return the packed chunk, None where nothing would be gained."""
    bits = np.zeros(packing.groups * GROUP, np.uint32)
    bits[: len(values)] = values.view(np.uint32)
    exponents = (bits >> 23 & 0xFF).astype(np.int64)
    tops = exponents.reshape(-1, GROUP).max(axis=1)
    distances = np.repeat(tops, GROUP) - exponents
    codes = np.where(exponents == 0, 15, np.minimum(distances, 15)).astype(np.uint8).reshape(-1, 2, GROUP // 2)
    strays = np.flatnonzero((distances >= 15) & (exponents != 0))
    if len(strays) > packing.most_strays:
        return None
    packed = b"".join(
        [
            len(strays).to_bytes(4, "little").ljust(HEAD_BYTES, b"\0"),
            (bits & 0xFFFF).astype("<u2").tobytes(),
            (bits >> 24 & 0x80 | bits >> 16 & 0x7F).astype(np.uint8).tobytes(),
            (codes[:, 0] | codes[:, 1] << 4).tobytes(),
            tops.astype(np.uint8).tobytes(),
        ]
    ).ljust(packing.strays_at, b"\0")
    return packed + (strays | exponents[strays] << 24).astype("<u4").tobytes()


def unpack(packed: bytes | memoryview, values: int, packing: Packing) -> Array:
    """Return the values of a packed chunk."""
    data = np.frombuffer(packed, np.uint8)
    padded = packing.groups * GROUP
    low = data[packing.low_at :][: 2 * padded].view("<u2").astype(np.uint32)
    high = data[packing.high_at :][:padded].astype(np.uint32)
    pairs = data[packing.codes_at :][: padded // 2].reshape(-1, GROUP // 2)
    codes = np.stack([pairs & 0xF, pairs >> 4], axis=1).reshape(-1).astype(np.uint32)
    tops = np.repeat(data[packing.tops_at :][: packing.groups], GROUP).astype(np.uint32)
    exponents = np.where(codes == 15, 0, tops - codes).astype(np.uint32)
    (count,) = data[:4].view("<u4")
    for stray in data[packing.strays_at :][: 4 * count].view("<u4"):
        exponents[stray & 0xFFFFFF] = stray >> 24
    bits = low | (high & 0x7F) << 16 | exponents << 23 | (high & 0x80) << 24
    return bits.view(np.float32)[:values]


def same_bits(one: Array, other: Array) -> bool:
    """Return whether two arrays of float32 hold the same bits."""
    return np.array_equal(one.view(np.uint32), other.view(np.uint32))


class Now:
    def synchronize(self) -> None:
        pass


class HostPacker:
    """A device that is no device; it does at once what it is told."""

    def __init__(self) -> None:
        self.copied = 0

    def memory(self, rows: int, row_bytes: int) -> Tensor:
        return torch.full((rows, row_bytes), 0xAA, dtype=torch.uint8)

    def pack(self, flat: Tensor, rows: Rows, memory: Tensor) -> Done:
        for chunk in rows.chunks:
            self._pack(flat, chunk, rows.packing, [memory[chunk.index]])
        return Now()

    def add(
        self, parts: Tensor, plain: Sequence[int], flat: Tensor, chunk: Chunk, packing: Packing, into: Sequence[Tensor]
    ) -> Done:
        values = [self._read(part, place in plain, chunk, packing) for place, part in enumerate(parts)]
        values.insert(chunk.owner, flat[chunk.start : chunk.stop].numpy())
        with np.errstate(over="ignore"):
            flat[chunk.start : chunk.stop] = torch.from_numpy(functools.reduce(np.add, values))
        self._pack(flat, chunk, packing, into)
        return Now()

    def copy(self, flat: Tensor, chunk: Chunk, into: Sequence[Tensor]) -> None:
        self.copied += 1
        for memory in into:
            memory[: 4 * chunk.length] = flat[chunk.start : chunk.stop].view(torch.uint8)

    def unpack(self, memory: Tensor, plain: Sequence[Chunk], rows: Rows, flat: Tensor) -> str:
        for chunk in rows.chunks:
            values = self._read(memory[chunk.index], chunk in plain, chunk, rows.packing)
            flat[chunk.start : chunk.stop] = torch.from_numpy(values.copy())
        return "unpacked"

    def _pack(self, flat: Tensor, chunk: Chunk, packing: Packing, into: Sequence[Tensor]) -> None:
        packed = pack(flat[chunk.start : chunk.stop].numpy(), packing)
        for memory in into:
            if packed is None:
                memory[:4] = 0xFF
            else:
                memory[: len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    def _read(self, memory: Tensor, is_plain: bool, chunk: Chunk, packing: Packing) -> Array:
        data = memory.numpy()
        if is_plain:
            plain: Array = data[: 4 * chunk.length].view(np.float32)
            return plain
        return unpack(data.data, chunk.length, packing)
