"""Groups of a compacted chunk on a CUDA device: one warp encodes or decodes one, in the layout of ``compact.py``.

A group is in two halves, ``a`` the first 128 values and ``b`` the others, as the bits of float32. Whatever the bytes
of a chunk are, nothing outside its memory is read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from poseidon.sums import compact as layouts

_HALF = tl.constexpr(layouts.GROUP // 2)
_PLANES = tl.constexpr(layouts.PLANES)
_BITMAP = tl.constexpr(layouts.BITMAP_BYTES)
_FEWEST_DENSE = tl.constexpr(layouts.FEWEST_DENSE)
_SPARSE = tl.constexpr(layouts.SPARSE)
_DENSE = tl.constexpr(layouts.DENSE)
_PAIRED = tl.constexpr(layouts.PAIRED)
_LARGEST_PAIRED = tl.constexpr(layouts.LARGEST_PAIRED)
_ESCAPE = tl.constexpr(layouts.ESCAPE)
_PAIRED_BYTES = tl.constexpr(layouts.PAIRED_BYTES)
_NIBBLES = tl.constexpr(layouts.PLANE_BYTES // 2)
_UPPERS = tl.constexpr(layouts.PLANE_BYTES // 4)
_HEAD = tl.constexpr(layouts.HEAD_BYTES)
_ENTRY = tl.constexpr(layouts.ENTRY_BYTES)
_KINDS_AT = tl.constexpr(layouts.KINDS_AT)
_TOP_AT = tl.constexpr(layouts.TOP_AT)
_FARTHEST = tl.constexpr(14)
"""The largest distance below the top that a code can say."""


@triton.jit
def _plane(a, b, codes, far_a, far_b, number: tl.constexpr):
    if number == 0:
        plane = codes
    elif number == 1:
        plane = ((a >> 24) & 0x80) | ((a >> 16) & 0x7F)
    elif number == 2:
        plane = ((b >> 24) & 0x80) | ((b >> 16) & 0x7F)
    elif number == 3:
        plane = ((a >> 12) & 0xF) | ((b >> 8) & 0xF0)
    elif number == 4:
        plane = ((a >> 8) & 0xF) | ((b >> 4) & 0xF0)
    elif number == 5:
        plane = a & 0xFF
    elif number == 6:
        plane = b & 0xFF
    elif number == 7:
        plane = far_a
    else:
        plane = far_b
    return plane


@triton.jit
def encode(a, b, chunk, group, groups, capacity):
    """Write a group to a compacted chunk, whose tail has room for ``capacity`` bytes."""
    exponent_a = (a >> 23) & 0xFF
    exponent_b = (b >> 23) & 0xFF
    top = tl.max(tl.maximum(exponent_a, exponent_b), axis=0)
    distance_a = top - exponent_a
    distance_b = top - exponent_b
    code_a = tl.where((exponent_a == 0) | (distance_a > _FARTHEST), 0, distance_a + 1)
    code_b = tl.where((exponent_b == 0) | (distance_b > _FARTHEST), 0, distance_b + 1)
    far_a = tl.where(code_a == 0, exponent_a, 0)
    far_b = tl.where(code_b == 0, exponent_b, 0)
    codes = code_a | (code_b << 4)
    pairs = _pair(code_a, code_b)
    escapes = tl.sum((pairs == _ESCAPE).to(tl.int32), axis=0)

    kinds = tl.zeros_like(top)
    size = tl.zeros_like(top)
    for number in tl.static_range(_PLANES):
        plane = _plane(a, b, codes, far_a, far_b, number)
        count = tl.sum((plane != 0).to(tl.int32), axis=0)
        kind = tl.where(count == 0, 0, tl.where(count < _FEWEST_DENSE, _SPARSE, _DENSE))
        length = tl.where(kind == _SPARSE, _BITMAP + count, tl.where(kind == _DENSE, _HALF, 0))
        if number == 0:
            is_paired = _PAIRED_BYTES + escapes < length
            kind = tl.where(is_paired, _PAIRED, kind)
            length = tl.where(is_paired, _PAIRED_BYTES + escapes, length)
        kinds |= kind << (2 * number)
        size += length
    at = tl.atomic_add(chunk.to(tl.pointer_type(tl.int32)), size, sem="relaxed")
    entry = at.to(tl.int64) | (kinds.to(tl.int64) << _KINDS_AT) | (top.to(tl.int64) << _TOP_AT)
    tl.store((chunk + _HEAD).to(tl.pointer_type(tl.int64)) + group, entry)

    tail = chunk + _HEAD + _ENTRY * groups
    column = tl.arange(0, _HALF)
    for number in tl.static_range(_PLANES):
        plane = _plane(a, b, codes, far_a, far_b, number)
        kind = (kinds >> (2 * number)) & 3
        if kind == _DENSE:
            tl.store(tail + at + column, plane.to(tl.uint8), mask=at + column < capacity)
            at += _HALF
        elif kind == _SPARSE:
            is_set = (plane != 0).to(tl.int32)
            bitmap = tl.sum(tl.reshape(is_set << (column % 8), (_BITMAP, 8)), axis=1)
            byte = at + tl.arange(0, _BITMAP)
            tl.store(tail + byte, bitmap.to(tl.uint8), mask=byte < capacity)
            place = at + _BITMAP - is_set + tl.cumsum(is_set, axis=0)
            tl.store(tail + place, plane.to(tl.uint8), mask=(is_set != 0) & (place < capacity))
            at += _BITMAP + tl.sum(is_set, axis=0)
        if number == 0:  # noqa: SIM102 - known to the compiler, which leaves the rest out of other planes
            if kind == _PAIRED:
                _store_pairs(tail, at, pairs, plane, capacity)
                at += _PAIRED_BYTES + escapes


@triton.jit
def _pair(code_a, code_b):
    """Return the numbers of pairs of codes; the escape for those that have none."""
    is_short = (code_a > 0) & (code_a <= _LARGEST_PAIRED) & (code_b > 0) & (code_b <= _LARGEST_PAIRED)
    return tl.where(is_short, (code_a - 1) * _LARGEST_PAIRED + code_b - 1, _ESCAPE)


@triton.jit
def _store_pairs(tail, at, pairs, codes, capacity):
    """Write a paired plane."""
    column = tl.arange(0, _HALF)
    lower = tl.sum(tl.reshape((pairs & 0xF) << (4 * (column // _NIBBLES)), (2, _NIBBLES)), axis=0)
    upper = tl.sum(tl.reshape((pairs >> 4) << (2 * (column // _UPPERS)), (4, _UPPERS)), axis=0)
    place = at + tl.arange(0, _NIBBLES)
    tl.store(tail + place, lower.to(tl.uint8), mask=place < capacity)
    place = at + _NIBBLES + tl.arange(0, _UPPERS)
    tl.store(tail + place, upper.to(tl.uint8), mask=place < capacity)
    is_long = (pairs == _ESCAPE).to(tl.int32)
    place = at + _PAIRED_BYTES - is_long + tl.cumsum(is_long, axis=0)
    tl.store(tail + place, codes.to(tl.uint8), mask=(is_long != 0) & (place < capacity))


@triton.jit
def _load_pairs(tail, at, limit):
    """Return the codes of a paired plane, and its length."""
    column = tl.arange(0, _HALF)
    place = at + column % _NIBBLES
    lower = tl.load(tail + place, mask=place < limit, other=0).to(tl.int32) >> (4 * (column // _NIBBLES))
    place = at + _NIBBLES + column % _UPPERS
    upper = tl.load(tail + place, mask=place < limit, other=0).to(tl.int32) >> (2 * (column // _UPPERS))
    pairs = (lower & 0xF) | ((upper & 3) << 4)
    is_long = (pairs == _ESCAPE).to(tl.int32)
    place = at + _PAIRED_BYTES - is_long + tl.cumsum(is_long, axis=0)
    codes = tl.load(tail + place, mask=(is_long != 0) & (place < limit), other=0).to(tl.int32)
    short = (pairs // _LARGEST_PAIRED + 1) | ((pairs % _LARGEST_PAIRED + 1) << 4)
    return tl.where(is_long != 0, codes, short), _PAIRED_BYTES + tl.sum(is_long, axis=0)


@triton.jit
def _load_plane(tail, at, kind, limit):
    """Return the bytes of another plane, and its length."""
    column = tl.arange(0, _HALF)
    plane = tl.zeros((_HALF,), tl.int32)
    length = tl.zeros_like(kind)
    if kind == _SPARSE:
        byte = at + column // 8
        bitmap = tl.load(tail + byte, mask=byte < limit, other=0).to(tl.int32)
        is_set = (bitmap >> (column % 8)) & 1
        place = at + _BITMAP - is_set + tl.cumsum(is_set, axis=0)
        plane = tl.load(tail + place, mask=(is_set != 0) & (place < limit), other=0).to(tl.int32)
        length = _BITMAP + tl.sum(is_set, axis=0)
    elif kind >= _DENSE:
        plane = tl.load(tail + at + column, mask=at + column < limit, other=0).to(tl.int32)
        length += _HALF
    return plane, length


@triton.jit
def decode(chunk, group, groups, capacity):
    """Return a group of a compacted chunk; nothing behind its tail, or behind ``capacity`` bytes of that, is read."""
    entry = tl.load((chunk + _HEAD).to(tl.pointer_type(tl.int64)) + group)
    at = entry & 0xFFFFFFFF
    kinds = (entry >> _KINDS_AT).to(tl.int32)
    top = ((entry >> _TOP_AT) & 0xFF).to(tl.int32)
    limit = tl.minimum(tl.load(chunk.to(tl.pointer_type(tl.uint32))).to(tl.int64), capacity)
    tail = chunk + _HEAD + _ENTRY * groups
    a = tl.zeros((_HALF,), tl.int32)
    b = tl.zeros((_HALF,), tl.int32)
    code_a = a
    code_b = b
    for number in tl.static_range(_PLANES):
        kind = (kinds >> (2 * number)) & 3
        if number == 0:
            if kind == _PAIRED:
                plane, length = _load_pairs(tail, at, limit)
            else:
                plane, length = _load_plane(tail, at, kind, limit)
        else:
            plane, length = _load_plane(tail, at, kind, limit)
        at += length
        if number == 0:
            code_a = plane & 0xF
            code_b = plane >> 4
        elif number == 1:
            a |= ((plane & 0x80) << 24) | ((plane & 0x7F) << 16)
        elif number == 2:
            b |= ((plane & 0x80) << 24) | ((plane & 0x7F) << 16)
        elif number == 3:
            a |= (plane & 0xF) << 12
            b |= (plane >> 4) << 12
        elif number == 4:
            a |= (plane & 0xF) << 8
            b |= (plane >> 4) << 8
        elif number == 5:
            a |= plane
        elif number == 6:
            b |= plane
        elif number == 7:
            a |= (tl.where(code_a == 0, plane, top + 1 - code_a) & 0xFF) << 23
        else:
            b |= (tl.where(code_b == 0, plane, top + 1 - code_b) & 0xFF) << 23
    return a, b
