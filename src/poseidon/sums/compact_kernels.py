"""Kernels that compact, restore and add on a CUDA device, in Triton, which comes with PyTorch for CUDA.

The layout is that of ``compact.py``. A kernel works on all rows (chunks) of a bucket at once. Row ``i`` of a bucket
holds ``quotient`` values, one more for the first ``longer`` rows; rows follow each other without gaps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from poseidon.sums.compact import GROUP, HEAD_BYTES, CompactLayout

_GROUPS = 8
"""Groups that one instance of a kernel works on."""
_ADDED = 1024
_PATCHERS = 4
"""Instances that place the strays of one row."""
_HALF = tl.constexpr(GROUP // 2)
_LOW_AT = tl.constexpr(HEAD_BYTES)
_FAR = tl.constexpr(15)
"""The code of zeros and strays."""


def compact(flat: Tensor, quotient: int, longer: int, rows: Tensor, layout: CompactLayout) -> None:
    """Write the compacted chunks of ``flat`` (float32) to ``rows`` (bytes, a row for each chunk)."""
    rows[:, :HEAD_BYTES].zero_()
    _compact[len(rows), triton.cdiv(layout.groups, _GROUPS)](
        flat.view(torch.int32),
        rows,
        quotient,
        longer,
        rows.stride(0),
        layout.groups,
        layout.strays_at,
        layout.most_strays,
        group_count=_GROUPS,
    )


def restore(rows: Tensor, layout: CompactLayout, flat: Tensor, quotient: int, longer: int) -> None:
    """Write the values of compacted chunks to ``flat``; what rows in another encoding leave there is undefined."""
    bits = flat.view(torch.int32)
    _restore[len(rows), triton.cdiv(layout.groups, _GROUPS)](
        rows, bits, quotient, longer, rows.stride(0), layout.groups, group_count=_GROUPS
    )
    _patch[len(rows), _PATCHERS](
        rows,
        bits,
        quotient,
        longer,
        rows.stride(0),
        layout.strays_at,
        layout.most_strays,
        patchers=_PATCHERS,
        block=256,
    )


def add_up(parts: Tensor, own: Tensor, place: int) -> None:
    """Add the rows of ``parts``, with ``own`` inserted as row ``place``, and leave the sum in ``own``."""
    others, values = parts.shape
    _add_up[triton.cdiv(values, _ADDED),](parts, own, values, place, others=others, block=_ADDED)


def divide(values: Tensor, divisor: int) -> None:
    """Divide float32 values in place, rounded as a processor does; PyTorch multiplies by a reciprocal here."""
    _divide[triton.cdiv(values.numel(), _ADDED),](values, values.numel(), float(divisor), block=_ADDED)


@triton.jit(do_not_specialize=["bits", "rows", "quotient", "longer", "stride", "groups", "strays_at", "most_strays"])
def _compact(bits, rows, quotient, longer, stride, groups, strays_at, most_strays, group_count: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = row * quotient + tl.minimum(row, longer)
    count = quotient + tl.where(row < longer, 1, 0)
    base = rows + row * stride
    group = tl.program_id(1) * group_count + tl.arange(0, group_count)
    is_there = (group < groups)[:, None]
    first = group[:, None] * (2 * _HALF) + tl.arange(0, _HALF)[None, :]
    second = first + _HALF
    a = tl.load(bits + start + first, mask=first < count, other=0)
    b = tl.load(bits + start + second, mask=second < count, other=0)
    exponent_a = (a >> 23) & 0xFF
    exponent_b = (b >> 23) & 0xFF
    top = tl.maximum(tl.max(exponent_a, axis=1), tl.max(exponent_b, axis=1))
    distance_a = top[:, None] - exponent_a
    distance_b = top[:, None] - exponent_b
    stray_a = (distance_a >= _FAR) & (exponent_a != 0)
    stray_b = (distance_b >= _FAR) & (exponent_b != 0)
    code_a = tl.where(exponent_a == 0, _FAR, tl.minimum(distance_a, _FAR))
    code_b = tl.where(exponent_b == 0, _FAR, tl.minimum(distance_b, _FAR))

    padded = groups * (2 * _HALF)
    low = (base + _LOW_AT).to(tl.pointer_type(tl.int16))
    tl.store(low + first, a.to(tl.int16), mask=is_there)
    tl.store(low + second, b.to(tl.int16), mask=is_there)
    high = base + _LOW_AT + 2 * padded
    tl.store(high + first, (((a >> 24) & 0x80) | ((a >> 16) & 0x7F)).to(tl.uint8), mask=is_there)
    tl.store(high + second, (((b >> 24) & 0x80) | ((b >> 16) & 0x7F)).to(tl.uint8), mask=is_there)
    codes = high + padded
    code = group[:, None] * _HALF + tl.arange(0, _HALF)[None, :]
    tl.store(codes + code, (code_a | (code_b << 4)).to(tl.uint8), mask=is_there)
    tl.store(codes + groups * _HALF + group, top.to(tl.uint8), mask=group < groups)

    counter = base.to(tl.pointer_type(tl.int32)) + tl.zeros_like(first)
    strays = (base + strays_at).to(tl.pointer_type(tl.int32))
    number = tl.atomic_add(counter, 1, mask=stray_a, sem="relaxed")
    tl.store(strays + number, first | (exponent_a << 24), mask=stray_a & (number < most_strays))
    number = tl.atomic_add(counter, 1, mask=stray_b, sem="relaxed")
    tl.store(strays + number, second | (exponent_b << 24), mask=stray_b & (number < most_strays))


@triton.jit(do_not_specialize=["rows", "bits", "quotient", "longer", "stride", "groups"])
def _restore(rows, bits, quotient, longer, stride, groups, group_count: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = row * quotient + tl.minimum(row, longer)
    count = quotient + tl.where(row < longer, 1, 0)
    base = rows + row * stride
    group = tl.program_id(1) * group_count + tl.arange(0, group_count)
    first = group[:, None] * (2 * _HALF) + tl.arange(0, _HALF)[None, :]
    second = first + _HALF
    padded = groups * (2 * _HALF)
    low = (base + _LOW_AT).to(tl.pointer_type(tl.int16))
    high = base + _LOW_AT + 2 * padded
    codes = high + padded
    place = group[:, None] * _HALF + tl.arange(0, _HALF)[None, :]
    top = tl.load(codes + groups * _HALF + group, mask=group < groups, other=0).to(tl.int32)[:, None]
    code = tl.load(codes + place, mask=first < count, other=0).to(tl.int32)
    code_a = code & 0xF
    code_b = code >> 4
    low_a = tl.load(low + first, mask=first < count, other=0).to(tl.int32) & 0xFFFF
    low_b = tl.load(low + second, mask=second < count, other=0).to(tl.int32) & 0xFFFF
    high_a = tl.load(high + first, mask=first < count, other=0).to(tl.int32)
    high_b = tl.load(high + second, mask=second < count, other=0).to(tl.int32)
    exponent_a = tl.where(code_a == _FAR, 0, (top - code_a) & 0xFF)
    exponent_b = tl.where(code_b == _FAR, 0, (top - code_b) & 0xFF)
    a = low_a | ((high_a & 0x7F) << 16) | (exponent_a << 23) | ((high_a & 0x80) << 24)
    b = low_b | ((high_b & 0x7F) << 16) | (exponent_b << 23) | ((high_b & 0x80) << 24)
    tl.store(bits + start + first, a, mask=first < count)
    tl.store(bits + start + second, b, mask=second < count)


@triton.jit(do_not_specialize=["rows", "bits", "quotient", "longer", "stride", "strays_at", "most_strays"])
def _patch(rows, bits, quotient, longer, stride, strays_at, most_strays, patchers: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = row * quotient + tl.minimum(row, longer)
    count = quotient + tl.where(row < longer, 1, 0)
    base = rows + row * stride
    there = tl.minimum(tl.load(base.to(tl.pointer_type(tl.int32))), most_strays)
    strays = (base + strays_at).to(tl.pointer_type(tl.int32))
    for begin in range(tl.program_id(1) * block, there, patchers * block):
        number = begin + tl.arange(0, block)
        stray = tl.load(strays + number, mask=number < there, other=-1)
        position = stray & 0xFFFFFF
        is_ours = (number < there) & (position < count)
        value = tl.load(bits + start + position, mask=is_ours, other=0)
        tl.store(bits + start + position, value | (((stray >> 24) & 0xFF) << 23), mask=is_ours)


@triton.jit(do_not_specialize=["parts", "own", "values", "place"])
def _add_up(parts, own, values, place, others: tl.constexpr, block: tl.constexpr):
    index = tl.program_id(0) * block + tl.arange(0, block)
    is_there = index < values
    ours = tl.load(own + index, mask=is_there)
    total = tl.where(place == 0, ours, tl.load(parts + index, mask=is_there))
    for number in tl.static_range(1, others + 1):
        if number == place:
            total += ours
        else:
            # This worker's own part has no row, so parts of higher ranks lie one row earlier.
            before = tl.where(place < number, number - 1, number)
            total += tl.load(parts + before.to(tl.int64) * values + index, mask=is_there)
    tl.store(own + index, total, mask=is_there)


@triton.jit(do_not_specialize=["values", "count", "divisor"])
def _divide(values, count, divisor, block: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(values + index, mask=index < count)
    tl.store(values + index, tl.div_rn(value, divisor), mask=index < count)
