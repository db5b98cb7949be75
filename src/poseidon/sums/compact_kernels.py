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
from poseidon.sums.compact_groups import decode, encode
from poseidon.sums.encodings import Encoding
from poseidon.sums.packed import HERE
from poseidon.sums.touched import NOWHERE, PackedRows

_WARPS = 1
_GROUP = tl.constexpr(layouts.GROUP)
_HALF = tl.constexpr(layouts.GROUP // 2)
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
    encode(a, b, rows + row * stride, group, groups, capacity)


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
    encode(a, b, into, group, groups, capacity)


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
    encode(a, b, into, group, groups, capacity)


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
        a, b = decode(chunk, group, groups, capacity)
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
