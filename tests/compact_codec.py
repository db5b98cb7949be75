"""The compacted format once more, in plain NumPy: a reference for the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from poseidon.sums.compact import (
    ABSENT,
    BITMAP_BYTES,
    DENSE,
    ESCAPE,
    FEWEST_DENSE,
    GROUP,
    HEAD_BYTES,
    KINDS_AT,
    LARGEST_PAIRED,
    PAIRED,
    PAIRED_BYTES,
    PLANE_BYTES,
    PLANES,
    SPARSE,
    TOP_AT,
    CompactLayout,
)

Array = np.ndarray[Any, Any]


def compact(values: Array, layout: CompactLayout) -> bytes:
    """Return a chunk of float32, compacted, whether that is shorter or not."""
    bits = np.zeros(layout.groups * GROUP, np.uint32)
    bits[: len(values)] = values.view(np.uint32)
    planes, tops = _split(bits.reshape(-1, 2, PLANE_BYTES))
    is_set = planes != 0
    counts = is_set.sum(axis=2)
    kinds = np.select([counts == 0, counts < FEWEST_DENSE], [ABSENT, SPARSE], DENSE)
    pairs, numbers = _pair(planes[:, 0])
    is_long = numbers == ESCAPE
    lengths = np.where(kinds[:, 0] == SPARSE, BITMAP_BYTES + counts[:, 0], PLANE_BYTES * (kinds[:, 0] == DENSE))
    kinds[:, 0] = np.where(PAIRED_BYTES + is_long.sum(axis=1) < lengths, PAIRED, kinds[:, 0])
    # Pairs, bitmap and bytes of every plane; what is kept of them, in this order, makes the tail.
    whole = np.concatenate([np.packbits(is_set, axis=2, bitorder="little"), planes], axis=2)
    whole = np.pad(whole, ((0, 0), (0, 0), (PAIRED_BYTES, 0)))
    whole[:, 0, :PAIRED_BYTES] = pairs
    is_paired = (kinds == PAIRED)[:, :, None]
    is_kept = np.concatenate(
        [
            np.repeat(is_paired, PAIRED_BYTES, axis=2),
            np.repeat((kinds == SPARSE)[:, :, None], BITMAP_BYTES, axis=2),
            np.where(is_paired, is_long[:, None], is_set | (kinds == DENSE)[:, :, None]),
        ],
        axis=2,
    )
    tail = whole[is_kept]
    ends = is_kept.sum(axis=(1, 2)).cumsum()
    offsets = np.concatenate([[0], ends[:-1]]).astype(np.uint64)
    shifts = np.arange(PLANES, dtype=np.uint64) * np.uint64(2) + np.uint64(KINDS_AT)
    entries = offsets | (kinds.astype(np.uint64) << shifts).sum(axis=1) | tops.astype(np.uint64) << np.uint64(TOP_AT)
    head = len(tail).to_bytes(4, "little").ljust(HEAD_BYTES, b"\0")
    return head + entries.astype("<u8").tobytes() + tail.tobytes()


def restore(compacted: bytes | memoryview, values: int, layout: CompactLayout) -> Array:
    """Return the values of a compacted chunk; what lies outside its tail counts as zeros."""
    entries = np.frombuffer(compacted, "<u8", layout.groups, HEAD_BYTES)
    (length,) = np.frombuffer(compacted, "<u4", 1)
    tail = np.frombuffer(compacted, np.uint8, offset=layout.tail_at)[:length]
    at = (entries & np.uint64(0xFFFFFFFF)).astype(np.int64)
    planes = np.zeros((layout.groups, PLANES, PLANE_BYTES), np.uint8)
    for plane in range(PLANES):
        kinds = (entries >> np.uint64(KINDS_AT + 2 * plane)) & np.uint64(3)
        is_paired = (kinds == PAIRED) & (plane == 0)
        is_sparse, is_dense = kinds == SPARSE, (kinds >= DENSE) & ~is_paired
        bitmaps = _look_up(tail, at[:, None] + np.arange(BITMAP_BYTES))
        is_set = np.unpackbits(bitmaps, axis=1, bitorder="little").astype(bool) & is_sparse[:, None]
        ranks = is_set.cumsum(axis=1) - is_set
        places = np.where(is_sparse[:, None], BITMAP_BYTES + ranks, np.arange(PLANE_BYTES))
        planes[:, plane] = _look_up(tail, at[:, None] + places) * (is_set | is_dense[:, None])
        if plane == 0:
            paired, sizes = _look_up_pairs(tail, at)
            planes[is_paired, 0] = paired[is_paired]
            at = at + np.where(is_paired, sizes, 0)
        at = at + np.where(is_sparse, BITMAP_BYTES + is_set.sum(axis=1), np.where(is_dense, PLANE_BYTES, 0))
    bits = _join(planes, (entries >> np.uint64(TOP_AT)).astype(np.uint32))
    return bits.reshape(-1).view(np.float32)[:values]


def change(new: Array, old: Array, is_rounded: bool) -> Array:
    """Return the change of weights as what is compacted."""
    if is_rounded:
        new, old = to_half(new), to_half(old)
    unit = 1 << 16 if is_rounded else 1
    difference = _count_up(new) // unit - _count_up(old) // unit
    half = (1 << 31) // unit
    difference = (difference + half) % (2 * half) - half
    zigzag = np.where(difference >= 0, 2 * difference, -2 * difference - 1).astype(np.uint32)
    if is_rounded:
        zigzag <<= 16
    moved = zigzag & 0xFF | (zigzag & 0x7F00) << 8 | (zigzag & 0x8000) << 16
    moved |= (zigzag & 0xF0000) >> 4 | (zigzag & 0xF00000) >> 12 | zigzag >> 24 << 23
    return moved.view(np.float32)


def changed(compacted: Array, old: Array, is_rounded: bool) -> Array:
    """Return new weights, given old ones and what :func:`change` returned."""
    moved = compacted.view(np.uint32)
    zigzag = moved & 0xFF | moved >> 8 & 0x7F00 | moved >> 16 & 0x8000
    zigzag |= (moved & 0xF000) << 4 | (moved & 0xF00) << 12 | (moved >> 23 & 0xFF) << 24
    if is_rounded:
        old, zigzag = to_half(old), zigzag >> 16
    unit = 1 << 16 if is_rounded else 1
    half = (1 << 31) // unit
    wide = zigzag.astype(np.int64)
    numbers = _count_up(old) // unit + np.where(wide & 1, -(wide + 1) // 2, wide // 2)
    numbers = (numbers + half) % (2 * half) - half
    return (np.where(numbers < 0, numbers ^ half - 1, numbers) * unit).astype(np.int32).view(np.float32)


def to_half(values: Array) -> Array:
    """Round to bf16, ties to even."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return np.where(np.isnan(values), bits & 0xFFFF0000 | 0x400000, rounded).astype(np.uint32).view(np.float32)


def _count_up(values: Array) -> Array:
    bits = values.view(np.int32)
    return np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(np.int64)


def _split(bits: Array) -> tuple[Array, Array]:
    """Return planes and tops of groups, given as (groups, 2, 128) float32 patterns."""
    exponents = (bits >> 23).astype(np.uint8)
    tops = exponents.max(axis=(1, 2))
    distances = tops[:, None, None] - exponents
    codes = np.where((exponents == 0) | (distances > 14), 0, distances + 1).astype(np.uint8)
    far = np.where(codes == 0, exponents, 0).astype(np.uint8)
    high = ((bits >> 24) & 0x80 | (bits >> 16) & 0x7F).astype(np.uint8)
    middle = (bits >> 8).astype(np.uint8)
    low = bits.astype(np.uint8)
    halves = [
        codes[:, 0] | codes[:, 1] << 4,
        high[:, 0],
        high[:, 1],
        middle[:, 0] >> 4 | middle[:, 1] & 0xF0,
        middle[:, 0] & 0xF | middle[:, 1] << 4,
        low[:, 0],
        low[:, 1],
        far[:, 0],
        far[:, 1],
    ]
    return np.stack(halves, axis=1), tops


def _join(planes: Array, tops: Array) -> Array:
    """Return the float32 patterns of groups, (groups, 2, 128)."""
    wide = planes.astype(np.uint32)
    codes = np.stack([wide[:, 0] & 0xF, wide[:, 0] >> 4], axis=1)
    high, low, far = (np.stack([wide[:, first], wide[:, first + 1]], axis=1) for first in (1, 5, 7))
    upper = np.stack([wide[:, 3] & 0xF, wide[:, 3] >> 4], axis=1)
    middle = np.stack([wide[:, 4] & 0xF, wide[:, 4] >> 4], axis=1)
    exponents = np.where(codes == 0, far, tops[:, None, None] + 1 - codes) & 0xFF
    mantissas = (high & 0x7F) << 16 | upper << 12 | middle << 8 | low
    return mantissas | exponents << 23 | (high & 0x80) << 24


def _pair(codes: Array) -> tuple[Array, Array]:
    """Return the 96 bytes for the pairs of each group, and the pairs' numbers."""
    first, second = codes & 0xF, codes >> 4
    is_short = (first > 0) & (first <= LARGEST_PAIRED) & (second > 0) & (second <= LARGEST_PAIRED)
    numbers = np.where(is_short, (first.astype(int) - 1) * LARGEST_PAIRED + second - 1, ESCAPE).astype(np.uint8)
    lower, upper = (numbers & 0xF).reshape(-1, 2, 64), (numbers >> 4).reshape(-1, 4, 32)
    lower = lower[:, 0] | lower[:, 1] << 4
    upper = upper[:, 0] | upper[:, 1] << 2 | upper[:, 2] << 4 | upper[:, 3] << 6
    return np.concatenate([lower, upper], axis=1), numbers


def _look_up_pairs(tail: Array, at: Array) -> tuple[Array, Array]:
    """Return plane 0 of every group as if it were paired, and how many bytes it takes."""
    found = _look_up(tail, at[:, None] + np.arange(PAIRED_BYTES))
    lower = np.concatenate([found[:, :64] & 0xF, found[:, :64] >> 4], axis=1)
    upper = np.concatenate([found[:, 64:] >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    numbers = lower | upper << 4
    is_long = numbers == ESCAPE
    places = PAIRED_BYTES + is_long.cumsum(axis=1) - is_long
    short = (numbers // LARGEST_PAIRED + 1) | (numbers % LARGEST_PAIRED + 1) << 4
    codes = np.where(is_long, _look_up(tail, at[:, None] + places), short)
    return codes.astype(np.uint8), PAIRED_BYTES + is_long.sum(axis=1)


def _look_up(tail: Array, places: Array) -> Array:
    if not len(tail):
        return np.zeros(places.shape, np.uint8)
    return np.where(places < len(tail), tail[np.minimum(places, len(tail) - 1)], 0).astype(np.uint8)


def same_bits(one: Array, other: Array) -> bool:
    """Return whether two arrays of float32 hold the same bits."""
    return np.array_equal(one.view(np.uint32), other.view(np.uint32))
