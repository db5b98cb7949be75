"""Lossy encodings of float32 values, and what they leave out, in NumPy. Pure.

For routes that users ask for by name (``planning/lossy.py``). Whatever an encoding leaves out is kept where it was
encoded and added to the next step's values: :func:`keep_rest`. Values that are not finite stay so when decoded, so that
loss scaling finds them on all workers, and nothing of them is kept.

============ ===========================================================================================
encoding     a chunk
============ ===========================================================================================
``BF16``     every value in 16 bits, rounded to nearest
``INT8``     for each block of B values: B - 8 in 8 bits, 8 in 4 bits, 2 bytes of scale, so B - 2 bytes
``INT4``     for each block of B values: all in 4 bits, 2 bytes of scale
``TOPK``     of every 65,536 values the largest, as they are, then their places in 2 bytes each
============ ===========================================================================================

The 8 values in 4 bits pay for the scale: a chunk takes less than a quarter of its bytes in float32.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from poseidon.errors import ServerError
from poseidon.sums.encodings import Encoding
from poseidon.wire.formats import Array, find_format

SEGMENT = 1 << 16
"""Values among which ``TOPK`` finds the largest: a place in them takes 2 bytes."""
PIECE = 1 << 15
"""Values that are encoded at a time, so that all steps of it find them in the core's own cache."""
_LARGEST_CODE = 127
_TAIL = 8
"""Values of a block that get 4 bits, in ``INT8``."""
_COARSE = 18
"""Their steps, in those of the others: 7 of them reach the largest value."""
_SCALE_BYTES = 2
_NAN_BITS = np.uint16(0x7FC0)
_PLACED_BYTES = 4 + 2
_bf16 = find_format("bfloat16")


class LossyCodec(Protocol):
    """A lossy encoding; also the layout of its chunks."""

    @property
    def encoding(self) -> Encoding:
        """Its number in a message."""

    def sizes(self, values: int) -> range:
        """Return the one size in bytes that a chunk of ``values`` can have."""

    def measure(self, payload: memoryview) -> int:
        """Return the size in bytes that the content implies."""

    def encode(self, values: Array) -> Array:
        """Return float32 values as they travel, as bytes."""

    def decode(self, payload: Array, length: int) -> Array:
        """Return ``length`` float32 values, in memory of their own."""


class _FixedSize(ABC):
    """A chunk's size follows from its length."""

    @abstractmethod
    def size_bytes(self, values: int) -> int:
        """Return the size of a chunk of ``values``."""

    def sizes(self, values: int) -> range:
        size_bytes = self.size_bytes(values)
        return range(size_bytes, size_bytes + 1)

    def measure(self, payload: memoryview) -> int:
        return payload.nbytes


@dataclass(frozen=True)
class Bf16Codec(_FixedSize):
    """Rounds to bf16."""

    encoding = Encoding.BF16

    def size_bytes(self, values: int) -> int:
        """Return two bytes a value."""
        return 2 * values

    def encode(self, values: Array) -> Array:
        """Round to nearest, ties to even."""
        payload = np.empty(self.size_bytes(values.size), np.uint8)
        for piece in _pieces(values.size):
            payload.view(np.uint16)[piece] = _bf16.narrow(values[piece])
        return payload

    def decode(self, payload: Array, length: int) -> Array:  # noqa: ARG002 - as in the contract
        """Widen."""
        return _bf16.widen(payload.view(np.uint16))


@dataclass(frozen=True)
class Int8Codec(_FixedSize):
    """Codes from -127 to 127 times a scale, which each block has for itself."""

    block: int = 256
    encoding = Encoding.INT8

    @property
    def tail(self) -> int:
        """How many values of a whole block get 4 bits."""
        return _TAIL

    def size_bytes(self, values: int) -> int:
        """Return a little less than a byte a value; an incomplete block has no values in 4 bits."""
        whole, rest = divmod(values, self.block)
        return whole * self._row_bytes + (rest + _SCALE_BYTES if rest else 0)

    def encode(self, values: Array) -> Array:
        """Let the largest value of each block have the largest code."""
        block, row = self.block, self._row_bytes
        whole, rest = divmod(values.size, block)
        payload = np.empty(self.size_bytes(values.size), np.uint8)
        blocks, rows = values[: whole * block].reshape(whole, block), payload[: whole * row].reshape(whole, row)
        for piece in _pieces(whole, PIECE // block):
            _encode_rows(blocks[piece], rows[piece], self.tail)
        if rest:
            _encode_rows(values[whole * block :].reshape(1, rest), payload[whole * row :].reshape(1, -1), 0)
        return payload

    def decode(self, payload: Array, length: int) -> Array:
        """Multiply codes by scales; a block with a value that was not finite is NaN."""
        block, row = self.block, self._row_bytes
        whole, rest = divmod(length, block)
        values = np.empty(length, np.float32)
        blocks, rows = values[: whole * block].reshape(whole, block), payload[: whole * row].reshape(whole, row)
        for piece in _pieces(whole, PIECE // block):
            _decode_rows(rows[piece], blocks[piece], self.tail)
        if rest:
            _decode_rows(payload[whole * row :].reshape(1, -1), values[whole * block :].reshape(1, rest), 0)
        return values

    @property
    def _row_bytes(self) -> int:
        return self.block - self.tail // 2 + _SCALE_BYTES


@dataclass(frozen=True)
class Int4Codec(Int8Codec):
    """Codes from -7 to 7 times a scale, which each block has for itself; 8 bits in an incomplete block."""

    block: int = 128
    encoding = Encoding.INT4

    @property
    def tail(self) -> int:
        """All of them."""
        return self.block


@dataclass(frozen=True)
class TopKCodec(_FixedSize):
    """Keeps the share ``density`` of all values, the largest; the others become zero."""

    density: float = 0.01
    encoding = Encoding.TOPK

    def size_bytes(self, values: int) -> int:
        """Return 6 bytes for each value that travels."""
        return _PLACED_BYTES * sum(map(self._count, _segments(values)))

    def encode(self, values: Array) -> Array:
        """Find the largest; those that are not finite count as larger than all others."""
        segments = _segments(values.size)
        count = sum(map(self._count, segments))
        payload = np.empty(_PLACED_BYTES * count, np.uint8)
        chosen, places = payload[: 4 * count].view(np.float32), payload[4 * count :].view(np.uint16)
        start = at = 0
        for length in segments:
            segment, stop = values[start : start + length], at + self._count(length)
            # Without NaN, which NumPy would warn of; partition puts it behind all others by itself.
            found = np.argpartition(np.abs(segment), length - (stop - at))[length - (stop - at) :]
            found.sort()
            chosen[at:stop], places[at:stop] = segment[found], found
            start, at = start + length, stop
        return payload

    def decode(self, payload: Array, length: int) -> Array:
        """Put the values into their places, among zeros."""
        values = np.zeros(length, np.float32)
        count = len(payload) // _PLACED_BYTES
        chosen, places = payload[: 4 * count].view(np.float32), payload[4 * count :].view(np.uint16)
        start = at = 0
        for segment in _segments(length):
            stop = at + self._count(segment)
            here = places[at:stop]
            if here.max() >= segment:
                raise ServerError(f"a chunk of {length} values came with value {start + int(here.max())} of it")
            values[start : start + segment][here] = chosen[at:stop]
            start, at = start + segment, stop
        return values

    def _count(self, length: int) -> int:
        return min(length, max(1, math.ceil(self.density * length)))


def keep_rest(values: Array, decoded: Array, kept: Array) -> None:
    """Leave in ``kept`` what ``decoded`` lacks of ``values``; overwrites ``decoded``.

    Where one of them is not finite, ``kept`` stays what it was: the step is lost there, but no later one.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        rest = np.subtract(values, decoded, out=decoded)
        # A sum is not finite if a value is not: cheaper than a look at each.
        if np.isfinite(rest.sum(dtype=np.float64)):
            np.copyto(kept, rest)
        else:
            np.copyto(kept, rest, where=np.isfinite(rest))


def _pieces(length: int, most: int = PIECE) -> list[slice]:
    step = max(most, 1)
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _segments(length: int) -> list[int]:
    whole, rest = divmod(length, SEGMENT)
    return [SEGMENT] * whole + ([rest] if rest else [])


def _encode_rows(values: Array, rows: Array, tail: int) -> None:
    """Write each row of values as codes, ``tail`` of them in half a byte, and then its scale."""
    fine = values.shape[1] - tail
    with np.errstate(invalid="ignore", over="ignore"):
        largest = np.maximum(values.max(1), -values.min(1))
        bits = _round_up(largest / np.float32(_LARGEST_CODE))
        is_finite = np.isfinite(largest)
        bits[~is_finite] = _NAN_BITS
        step = _bf16.widen(bits)
        step[(step == 0) | ~is_finite] = 1
        codes = values / step[:, None]
        codes[~is_finite] = 0
        codes[:, fine:] /= _COARSE
        np.rint(codes, out=codes)
    rows[:, :fine] = codes[:, :fine].astype(np.int8).view(np.uint8)
    if tail:
        nibbles = (codes[:, fine:] + 8).astype(np.uint8)
        rows[:, fine : fine + tail // 2] = nibbles[:, ::2] | nibbles[:, 1::2] << 4
    rows[:, fine + tail // 2 :] = bits.view(np.uint8).reshape(-1, _SCALE_BYTES)


def _decode_rows(rows: Array, values: Array, tail: int) -> None:
    fine = values.shape[1] - tail
    bits = np.ascontiguousarray(rows[:, fine + tail // 2 :]).view(np.uint16).reshape(-1)
    step = _bf16.widen(bits)[:, None]
    with np.errstate(invalid="ignore", over="ignore"):
        np.multiply(rows[:, :fine].view(np.int8), step, out=values[:, :fine])
        if tail:
            nibbles = rows[:, fine : fine + tail // 2]
            values[:, fine::2] = nibbles & 15
            values[:, fine + 1 :: 2] = nibbles >> 4
            values[:, fine:] -= 8
            values[:, fine:] *= step * np.float32(_COARSE)


def _round_up(values: Array) -> Array:
    """Return the bits of the nearest bf16 that is no smaller, of positive values."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    with np.errstate(over="ignore"):
        rounded: Array = ((bits + np.uint32(0xFFFF)) >> 16).astype(np.uint16)
    return rounded
