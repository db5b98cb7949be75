"""Kernels that compact, add and restore on a CUDA device, in Triton, which comes with PyTorch for CUDA.

The layout is that of ``compact.py``. An instance of a kernel, one warp, works on one group of one chunk, so that warps
need not wait for each other. It has the group in two halves, ``a`` the first 128 values and ``b`` the others, as the
bits of float32. Chunks that come from the wire lie behind a table (``packed.py``). Whatever their bytes are, nothing
outside their memory is read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from poseidon.sums import compact as layouts
from poseidon.sums.compact import ChunkRows, CompactLayout
from poseidon.sums.encodings import Encoding
from poseidon.sums.packed import HERE
from poseidon.sums.touched import NOWHERE, PackedRows

_WARPS = 1
_GROUP = tl.constexpr(layouts.GROUP)
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
_COMPACT = tl.constexpr(int(Encoding.COMPACT))
_CHANGE = tl.constexpr(int(Encoding.CHANGE))
_ROUNDED_CHANGE = tl.constexpr(int(Encoding.ROUNDED_CHANGE))
_HERE = tl.constexpr(HERE)
_NOWHERE = tl.constexpr(NOWHERE)


def compact(flat: Tensor, rows: ChunkRows, into: Tensor, old: Tensor | None = None, is_rounded: bool = False) -> None:
    """Write the compacted chunks of ``flat`` (float32 or bf16) to ``into`` (bytes, a row for each chunk).

    A chunk that is longer than its row is cut off; its head says how long it would be. With ``old``, values of float32,
    the changes from these are compacted; ``is_rounded``: both are rounded to bf16.
    """
    layout = rows.layout
    into[:, : layouts.HEAD_BYTES].zero_()
    _compact[layout.groups, len(into)](
        _bits_of(flat),
        _bits_of(flat if old is None else old),
        into,
        rows.quotient,
        rows.longer,
        into.stride(0),
        layout.groups,
        layout.row_bytes - layout.tail_at,
        is_half=layout.itemsize == 2,
        is_change=old is not None,
        is_rounded=is_rounded,
        num_warps=_WARPS,
    )


def add(packed: Tensor, workers: int, own: Tensor, layout: CompactLayout, divisor: int, into: Tensor) -> None:
    """Add one chunk of all workers in the order of the table, and leave the sum in ``own``, compacted in ``into``.

    The table says which part is in ``own``. A sum of bf16 is divided by ``divisor`` and rounded.
    """
    into[: layouts.HEAD_BYTES].zero_()
    _add[layout.groups,](
        packed,
        _bits_of(own),
        into,
        workers,
        own.numel(),
        layout.groups,
        layout.row_bytes - layout.tail_at,
        float(divisor),
        is_half=layout.itemsize == 2,
        num_warps=_WARPS,
    )


def add_rows(packed: Tensor, rows: PackedRows, own: Tensor, layout: CompactLayout, into: Tensor) -> None:
    """Add the sum of all workers' rows to ``own``, a chunk of float32, and leave it there, compacted in ``into``."""
    into[: layouts.HEAD_BYTES].zero_()
    _add_rows[layout.groups,](
        packed,
        _bits_of(own),
        into,
        rows.workers,
        rows.width,
        rows.skipped,
        rows.values_at,
        own.numel(),
        layout.groups,
        layout.row_bytes - layout.tail_at,
        num_warps=_WARPS,
    )


def restore(packed: Tensor, rows: ChunkRows, flat: Tensor, divisor: int, old: Tensor | None = None) -> None:
    """Fill ``flat`` with the chunks of a bucket; float32 is divided by ``divisor``. Changes are those from ``old``."""
    layout = rows.layout
    is_half = layout.itemsize == 2
    _restore[layout.groups, len(rows.chunks)](
        packed,
        _bits_of(flat),
        _bits_of(flat if old is None else old),
        rows.quotient,
        rows.longer,
        layout.groups,
        layout.row_bytes - layout.tail_at,
        1.0 if is_half else float(divisor),
        is_half=is_half,
        has_old=old is not None,
        num_warps=_WARPS,
    )


def _bits_of(flat: Tensor) -> Tensor:
    return flat.view(torch.int16 if flat.dtype == torch.bfloat16 else torch.int32)


@triton.jit(do_not_specialize=["flat", "old", "rows", "quotient", "longer", "stride", "groups", "capacity"])
def _compact(
    flat,
    old,
    rows,
    quotient,
    longer,
    stride,
    groups,
    capacity,
    is_half: tl.constexpr,
    is_change: tl.constexpr,
    is_rounded: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    start = row * quotient + tl.minimum(row, longer)
    count = quotient + tl.where(row < longer, 1, 0)
    group = tl.program_id(0)
    a, b = _load(flat + start, group, count, is_half)
    if is_change:
        old_a, old_b = _load(old + start, group, count, is_half)
        a = _change(a, old_a, is_rounded)
        b = _change(b, old_b, is_rounded)
    _encode(a, b, rows + row * stride, group, groups, capacity)


@triton.jit(do_not_specialize=["packed", "own", "into", "workers", "count", "groups", "capacity", "divisor"])
def _add(packed, own, into, workers, count, groups, capacity, divisor, is_half: tl.constexpr):
    group = tl.program_id(0)
    total_a = tl.zeros((_HALF,), tl.float32)
    total_b = tl.zeros((_HALF,), tl.float32)
    for number in range(workers):
        a, b = _read(packed, number, own, group, count, groups, capacity, is_half)
        value_a = a.to(tl.float32, bitcast=True)
        value_b = b.to(tl.float32, bitcast=True)
        # The first part is not added to anything: 0 plus -0 would be 0.
        total_a = tl.where(number == 0, value_a, total_a + value_a)
        total_b = tl.where(number == 0, value_b, total_b + value_b)
    if is_half:
        a = _round(tl.div_rn(total_a, divisor))
        b = _round(tl.div_rn(total_b, divisor))
    else:
        a = total_a.to(tl.int32, bitcast=True)
        b = total_b.to(tl.int32, bitcast=True)
    _store(own, a, b, group, count, is_half)
    _encode(a, b, into, group, groups, capacity)


@triton.jit(
    do_not_specialize=[
        "packed",
        "own",
        "into",
        "workers",
        "width",
        "skipped",
        "values_at",
        "count",
        "groups",
        "capacity",
    ]
)
def _add_rows(packed, own, into, workers, width, skipped, values_at, count, groups, capacity):
    group = tl.program_id(0)
    a, b = _load(own, group, count, False)
    first = group * _GROUP + tl.arange(0, _HALF)
    rows_a = _sum_rows(packed, workers, width, skipped, values_at, first, count)
    rows_b = _sum_rows(packed, workers, width, skipped, values_at, first + _HALF, count)
    a = (a.to(tl.float32, bitcast=True) + rows_a).to(tl.int32, bitcast=True)
    b = (b.to(tl.float32, bitcast=True) + rows_b).to(tl.int32, bitcast=True)
    _store(own, a, b, group, count, False)
    _encode(a, b, into, group, groups, capacity)


@triton.jit(do_not_specialize=["packed", "flat", "old", "quotient", "longer", "groups", "capacity", "divisor"])
def _restore(
    packed,
    flat,
    old,
    quotient,
    longer,
    groups,
    capacity,
    divisor,
    is_half: tl.constexpr,
    has_old: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    start = row * quotient + tl.minimum(row, longer)
    count = quotient + tl.where(row < longer, 1, 0)
    group = tl.program_id(0)
    a, b = _read(packed, row, flat + start, group, count, groups, capacity, is_half)
    if has_old:
        encoding = tl.load(packed.to(tl.pointer_type(tl.int64)) + 2 * row + 1)
        if encoding == _CHANGE:
            old_a, old_b = _load(old + start, group, count, is_half)
            a = _changed(a, old_a, False)
            b = _changed(b, old_b, False)
        elif encoding == _ROUNDED_CHANGE:
            old_a, old_b = _load(old + start, group, count, is_half)
            a = _changed(a, old_a, True)
            b = _changed(b, old_b, True)
    if divisor != 1.0:
        # PyTorch would multiply by the reciprocal, which rounds differently.
        a = tl.div_rn(a.to(tl.float32, bitcast=True), divisor).to(tl.int32, bitcast=True)
        b = tl.div_rn(b.to(tl.float32, bitcast=True), divisor).to(tl.int32, bitcast=True)
    _store(flat + start, a, b, group, count, is_half)


# Values in memory.


@triton.jit
def _load(values, group, count, is_half: tl.constexpr):
    first = group * _GROUP + tl.arange(0, _HALF)
    second = first + _HALF
    a = tl.load(values + first, mask=first < count, other=0).to(tl.int32)
    b = tl.load(values + second, mask=second < count, other=0).to(tl.int32)
    if is_half:
        a = a << 16
        b = b << 16
    return a, b


@triton.jit
def _store(values, a, b, group, count, is_half: tl.constexpr):
    first = group * _GROUP + tl.arange(0, _HALF)
    second = first + _HALF
    if is_half:
        tl.store(values + first, (a >> 16).to(tl.int16), mask=first < count)
        tl.store(values + second, (b >> 16).to(tl.int16), mask=second < count)
    else:
        tl.store(values + first, a, mask=first < count)
        tl.store(values + second, b, mask=second < count)


@triton.jit
def _read(packed, number, own, group, count, groups, capacity, is_half: tl.constexpr):
    """Return values of a chunk of the table."""
    entry = packed.to(tl.pointer_type(tl.int64)) + 2 * number
    chunk = packed + tl.load(entry)
    encoding = tl.load(entry + 1)
    if (encoding == _COMPACT) | (encoding == _CHANGE) | (encoding == _ROUNDED_CHANGE):
        a, b = _decode(chunk, group, groups, capacity)
    elif encoding == _HERE:
        a, b = _load(own, group, count, is_half)
    else:
        if is_half:
            a, b = _load(chunk.to(tl.pointer_type(tl.int16)), group, count, is_half)
        else:
            a, b = _load(chunk.to(tl.pointer_type(tl.int32)), group, count, is_half)
    return a, b


@triton.jit
def _sum_rows(packed, workers, width, skipped, values_at, at, count):
    """Return the sum of all workers' rows for the values at these places of a chunk."""
    row = (at + skipped) // width
    column = (at + skipped) % width
    places = packed.to(tl.pointer_type(tl.int32)) + row * workers
    values = (packed + values_at).to(tl.pointer_type(tl.float32)) + column
    total = tl.zeros((_HALF,), tl.float32)
    for worker in range(workers):
        place = tl.load(places + worker, mask=at < count, other=_NOWHERE)
        # A sum that begins with 0 is never -0, so where nothing is touched, adding 0 changes nothing.
        total += tl.load(values + place.to(tl.int64) * width, mask=place != _NOWHERE, other=0.0)
    return total


@triton.jit
def _round(value):
    """Return the bits of the nearest bf16, ties to even, as those of a float32; all NaNs become one."""
    bits = value.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return tl.where(value != value, 0x7FC00000, rounded)


# Changes of weights.


@triton.jit
def _change(new, old, is_rounded: tl.constexpr):
    """Return the change of float32 from ``old`` to ``new``, with its bits where the planes expect them."""
    if is_rounded:
        # The upper halves alone: the lower ones of negative numbers are all ones.
        difference = (_count_up(_to_half(new)) & -0x10000) - (_count_up(_to_half(old)) & -0x10000)
        zigzag = ((difference << 1) ^ (difference >> 31)) & -0x10000
    else:
        difference = _count_up(new) - _count_up(old)
        zigzag = (difference << 1) ^ (difference >> 31)
    lower = (zigzag & 0xFF) | ((zigzag & 0x7F00) << 8) | ((zigzag & 0x8000) << 16)
    return lower | ((zigzag & 0xF0000) >> 4) | ((zigzag & 0xF00000) >> 12) | (((zigzag >> 24) & 0xFF) << 23)


@triton.jit
def _changed(change, old, is_rounded: tl.constexpr):
    """Return what ``old`` becomes by a change."""
    lower = (change & 0xFF) | ((change >> 8) & 0x7F00) | ((change >> 16) & 0x8000)
    zigzag = lower | ((change & 0xF000) << 4) | ((change & 0xF00) << 12) | (((change >> 23) & 0xFF) << 24)
    if is_rounded:
        half = (zigzag >> 16) & 0xFFFF
        new = _count_up(_to_half(old)) + (((half >> 1) ^ -(half & 1)) << 16)
        # The lower half is that of the old one's sign.
        new = (new & -0x10000) | ((new >> 31) & 0xFFFF)
    else:
        new = _count_up(old) + (((zigzag >> 1) & 0x7FFFFFFF) ^ -(zigzag & 1))
    return _count_up(new)


@triton.jit
def _count_up(bits):
    """Return numbers that count up as the values of these bits do; the same again makes them bits."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _to_half(bits):
    """Round to bf16, ties to even; what is in bf16 already stays as it is."""
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return tl.where(is_nan, (bits & -0x10000) | 0x400000, rounded)


# Groups in a compacted chunk.


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
def _encode(a, b, chunk, group, groups, capacity):
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
def _decode(chunk, group, groups, capacity):
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
