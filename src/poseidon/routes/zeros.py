"""Rows of factors without their zeros, on any device: by PyTorch's operations, or by kernels where a device has Triton.

The layout is that of ``room.py``, whichever way it is written and read. PyTorch needs some fifteen operations for each
way, one after the other in the stream that computes; kernels need four.
"""

from __future__ import annotations

import functools
import logging
from importlib.util import find_spec

import torch
from torch import Tensor

from poseidon.routes.room import INTEGERS, RoomLayout

_log = logging.getLogger(__name__)
_BLOCK = 2048
"""Values of an instance."""
_MOST_VALUES = 2**31 - _BLOCK
"""With which an instance can count in 32 bits."""


def drop_zeros(layout: RoomLayout, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Do what :meth:`RoomLayout.drop_zeros` does."""
    return drop_by_kernels(layout, rows) if _suits_kernels(layout, rows) else layout.drop_zeros(rows)


def restore_zeros(layout: RoomLayout, data: Tensor) -> Tensor:
    """Do what :meth:`RoomLayout.restore_zeros` does."""
    return restore_by_kernels(layout, data) if _suits_kernels(layout, data) else layout.restore_zeros(data)


def drop_by_kernels(layout: RoomLayout, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Do the same by kernels."""
    from poseidon.routes import zeros_kernels as kernels

    integers = rows.view(INTEGERS[layout.dtype.itemsize]).view(-1)
    total = integers.numel()
    # Zeros: what is not needed of the room travels, too.
    data = torch.zeros(layout.size_bytes, dtype=torch.uint8, device=rows.device)
    values = data[layout.values_at :].view(integers.dtype)
    counts = torch.empty(-(-total // _BLOCK), dtype=torch.int32, device=rows.device)
    grid = (len(counts),)
    with torch.cuda.device_of(rows):
        kernels.count_values[grid](integers, data, counts, total, size=_BLOCK)
        sums = counts.cumsum(0, dtype=torch.int32)
        kernels.drop[grid](integers, values, sums, total, layout.values, size=_BLOCK)
    return data, sums[-1]


def restore_by_kernels(layout: RoomLayout, data: Tensor) -> Tensor:
    """Do the same by kernels."""
    from poseidon.routes import zeros_kernels as kernels

    itemsize = layout.dtype.itemsize
    integers = data.view(INTEGERS[itemsize])
    total, parts = layout.rows * layout.width, data.numel() // layout.size_bytes
    counts = torch.empty((parts, -(-total // _BLOCK)), dtype=torch.int32, device=data.device)
    rows = torch.empty(parts * total, dtype=integers.dtype, device=data.device)
    grid = (counts.shape[1], parts)
    with torch.cuda.device_of(data):
        kernels.count_bits[grid](data, counts, total, layout.size_bytes, size=_BLOCK)
        sums = counts.cumsum(1, dtype=torch.int32)
        sizes = (layout.size_bytes, layout.size_bytes // itemsize, layout.values_at // itemsize, layout.values)
        kernels.restore[grid](data, integers, sums, rows, total, *sizes, size=_BLOCK)
    return rows.view(layout.dtype).view(-1, layout.width)


def _suits_kernels(layout: RoomLayout, tensor: Tensor) -> bool:
    fits = tensor.is_cuda and layout.rows * layout.width < _MOST_VALUES
    return fits and kernels_work(tensor.device, layout.dtype)


@functools.cache
def kernels_work(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether kernels give a device the bytes that PyTorch gives it; that compiles them for values of a type."""
    if find_spec("triton") is None:
        return False
    generator = torch.Generator("cpu").manual_seed(20150712)
    drawn = torch.randn(3, 1501, generator=generator, dtype=torch.float32, device="cpu")
    rows = drawn.relu_().to(device, dtype)
    layout = RoomLayout(3, 1501, int((rows != 0).sum()) + 1, rows.dtype)
    try:
        data, count = drop_by_kernels(layout, rows)
        expected, expected_count = layout.drop_zeros(rows)
        restored = restore_by_kernels(layout, torch.cat([data, data]))
        is_same = torch.equal(data, expected) and int(count) == int(expected_count)
        works = is_same and torch.equal(restored, torch.cat([rows, rows]))
    except Exception as error:
        _log.warning("Triton does not work here: %s", error)
        return False
    if not works:
        _log.warning("Triton's kernels for rows without zeros give other bytes on %s; PyTorch makes them", device)
    return works
