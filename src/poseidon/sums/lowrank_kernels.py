"""Kernels for the products of low rank on a CUDA device, in Triton, which comes with PyTorch for CUDA.

All matrices of a bucket are worked on at once: a row of a table (``lowrank_products.py``), 8 numbers, tells each
instance which piece of which matrix is its own. A matrix lies row by row, whether it travels transposed or not.
Everything is multiplied and added in float32, where a matrix product of PyTorch may use TF32.

``step``: all that the table says of rows' places and widths can be divided by it, so that a thread reads so many values
at once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _take(values_at, rests_at, is_here, adds: tl.constexpr):
    """Return values; with ``adds``, what was kept of them is added to them there first."""
    values = tl.load(values_at, is_here, 0.0)
    if adds:
        values += tl.load(rests_at, is_here, 0.0)
        tl.store(values_at, values, is_here)
    return values


@triton.jit
def narrow(
    flat,
    rest,
    base,
    into,
    table,
    rank: tl.constexpr,
    rank_room: tl.constexpr,
    many_rows: tl.constexpr,
    many_columns: tl.constexpr,
    along_rows: tl.constexpr,
    adds: tl.constexpr,
    step: tl.constexpr,
):
    """Multiply a piece of a matrix by a narrow one; with ``adds`` after what was kept has been added to it, in place.

    ``along_rows``: sums run along rows, ``many_rows`` of them, and ``base`` has a row for each column. Otherwise they
    run along columns.
    """
    at = table + tl.program_id(0) * 8
    width = tl.multiple_of(tl.load(at + 1).to(tl.int32), step)
    first_row, last_row = tl.load(at + 2).to(tl.int32), tl.load(at + 3).to(tl.int32)
    first_column = tl.multiple_of(tl.load(at + 4).to(tl.int32), step)
    last_column = tl.multiple_of(tl.load(at + 5).to(tl.int32), step)
    # The first value of the piece; places are counted from here, in 32 bits.
    start = tl.multiple_of(tl.load(at) + first_row.to(tl.int64) * width + first_column, step)
    base += tl.load(at + 6)
    into += tl.load(at + 7)
    ranks = tl.arange(0, rank_room)
    is_rank = ranks < rank
    total = tl.zeros((many_rows, many_columns, rank_room), tl.float32)
    if along_rows:
        rows = tl.arange(0, many_rows)
        is_row = rows < last_row - first_row
        for column in range(0, last_column - first_column, many_columns):
            columns = column + tl.arange(0, many_columns)
            is_column = columns < last_column - first_column
            where = start + (rows[:, None] * width + columns[None, :])
            is_here = is_row[:, None] & is_column[None, :]
            values = _take(flat + where, rest + where, is_here, adds)
            places = (first_column + columns)[:, None] * rank + ranks[None, :]
            others = tl.load(base + places, is_column[:, None] & is_rank[None, :], 0.0)
            total += values[:, :, None] * others[None, :, :]
        places = (first_row + rows)[:, None] * rank + ranks[None, :]
        tl.store(into + places, tl.sum(total, 1), is_row[:, None] & is_rank[None, :])
    else:
        columns = tl.arange(0, many_columns)
        is_column = columns < last_column - first_column
        for row in range(0, last_row - first_row, many_rows):
            rows = row + tl.arange(0, many_rows)
            is_row = rows < last_row - first_row
            where = start + (rows[:, None] * width + columns[None, :])
            is_here = is_row[:, None] & is_column[None, :]
            values = _take(flat + where, rest + where, is_here, adds)
            places = (first_row + rows)[:, None] * rank + ranks[None, :]
            others = tl.load(base + places, is_row[:, None] & is_rank[None, :], 0.0)
            total += values[:, :, None] * others[:, None, :]
        places = (first_column + columns)[:, None] * rank + ranks[None, :]
        tl.store(into + places, tl.sum(total, 0), is_column[:, None] & is_rank[None, :])


@triton.jit
def widen(
    flat,
    rest,
    by_row,
    own_by_row,
    by_column,
    own_by_column,
    table,
    rank: tl.constexpr,
    many_rows: tl.constexpr,
    many_columns: tl.constexpr,
    step: tl.constexpr,
):
    """Replace a piece of a matrix by a product, and keep in ``rest`` what this worker's own product lacks of it."""
    at = table + tl.program_id(0) * 8
    width = tl.multiple_of(tl.load(at + 1).to(tl.int32), step)
    first_row, last_row = tl.load(at + 2).to(tl.int32), tl.load(at + 3).to(tl.int32)
    first_column = tl.multiple_of(tl.load(at + 4).to(tl.int32), step)
    last_column = tl.multiple_of(tl.load(at + 5).to(tl.int32), step)
    start = tl.multiple_of(tl.load(at) + first_row.to(tl.int64) * width + first_column, step)
    rows, columns = tl.arange(0, many_rows), tl.arange(0, many_columns)
    is_row, is_column = rows < last_row - first_row, columns < last_column - first_column
    where = start + (rows[:, None] * width + columns[None, :])
    is_here = is_row[:, None] & is_column[None, :]
    left = tl.load(flat + where, is_here, 0.0)
    product = tl.zeros((many_rows, many_columns), tl.float32)
    down = tl.load(at + 6) + (first_row + rows) * rank
    across = tl.load(at + 7) + (first_column + columns) * rank
    for one in tl.static_range(rank):
        mine = tl.load(own_by_row + down + one, is_row, 0.0)
        left -= mine[:, None] * tl.load(own_by_column + across + one, is_column, 0.0)[None, :]
        ours = tl.load(by_row + down + one, is_row, 0.0)
        product += ours[:, None] * tl.load(by_column + across + one, is_column, 0.0)[None, :]
    tl.store(rest + where, left, is_here)
    tl.store(flat + where, product, is_here)
