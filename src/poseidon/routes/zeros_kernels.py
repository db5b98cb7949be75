"""Kernels that take zeros out of rows and put them back, in the layout of ``room.py``, in Triton.

An instance has a block of ``size`` values, a multiple of 8, of one worker's rows. How many values that are not zero the
blocks have is counted first; sums over these counts, block by block, then say where the values of each begin. Whatever
the bytes are that came, nothing outside their memory is read. Sizes that differ from layer to layer are not specialised
for, so that a job compiles few variants.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def count_values(rows, data, counts, total, size: tl.constexpr):
    """Write the bits of a block of rows, and how many of them are set."""
    block = tl.program_id(0)
    where = block * size + tl.arange(0, size)
    is_filled = (tl.load(rows + where, where < total, 0) != 0).to(tl.int32)
    bits = tl.reshape(is_filled, (size // 8, 8)) << tl.arange(0, 8)[None, :]
    bytes_at = block * (size // 8) + tl.arange(0, size // 8)
    tl.store(data + bytes_at, tl.sum(bits, 1).to(tl.uint8), bytes_at < (total + 7) // 8)
    tl.store(counts + block, tl.sum(is_filled, 0))


@triton.jit(do_not_specialize=["room"])
def drop(rows, values, sums, total, room, size: tl.constexpr):
    """Write the values of a block that are not zero to their places, as far as there is room."""
    block = tl.program_id(0)
    where = block * size + tl.arange(0, size)
    found = tl.load(rows + where, where < total, 0)
    is_filled = (found != 0).to(tl.int32)
    place = tl.load(sums + block) - tl.sum(is_filled, 0) + tl.cumsum(is_filled, 0) - 1
    tl.store(values + place, found, (is_filled != 0) & (place < room))


@triton.jit
def _bits(data, where, is_here):
    return (tl.load(data + where // 8, is_here, 0).to(tl.int32) >> (where % 8)) & 1


@triton.jit(do_not_specialize=["part_bytes"])
def count_bits(data, counts, total, part_bytes, size: tl.constexpr):
    """Count the bits that are set in a block of one worker's part."""
    block, part = tl.program_id(0), tl.program_id(1)
    where = block * size + tl.arange(0, size)
    bits = _bits(data + part.to(tl.int64) * part_bytes, where, where < total)
    tl.store(counts + part * tl.num_programs(0) + block, tl.sum(bits, 0))


@triton.jit(do_not_specialize=["part_bytes", "part_values", "first", "room"])
def restore(data, integers, sums, rows, total, part_bytes, part_values, first, room, size: tl.constexpr):
    """Write a block of one worker's rows: values where a bit is set, zeros elsewhere.

    ``integers`` is ``data`` in whole values, ``part_values`` to a part, of which those of the rows begin at ``first``.
    """
    block, part = tl.program_id(0), tl.program_id(1)
    where = block * size + tl.arange(0, size)
    bits = _bits(data + part.to(tl.int64) * part_bytes, where, where < total)
    place = tl.load(sums + part * tl.num_programs(0) + block) - tl.sum(bits, 0) + tl.cumsum(bits, 0) - 1
    # Bits beyond the room were set by a worker whose values did not fit, and nobody uses what is made of them.
    values_at = integers + part.to(tl.int64) * part_values + first
    found = tl.load(values_at + place, (bits != 0) & (place < room), 0)
    tl.store(rows + part.to(tl.int64) * total + where, found, where < total)
