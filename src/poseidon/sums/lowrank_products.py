"""The products of low rank over a bucket: by PyTorch, or on CUDA devices by kernels that work on all matrices at once.

A bucket's matrices lie in ``flat`` as the tensors do; factors lie in ``left`` and ``right`` as the layout says, and so
do those that the next step begins from. ``sums/lowrank.py`` has the idea.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate, product
from typing import Protocol

import torch
from torch import Tensor

from poseidon.sums.lowrank import LowRankLayout, LowRankMatrix, split_bucket

_log = logging.getLogger(__name__)

Placed = Sequence[tuple[LowRankMatrix, int]]
"""Matrices, each with the place of its first value in a bucket."""

_TABLE_WIDTH = 8
"""Where a matrix begins and how wide it is, rows and columns of a piece from and to, and where its factors begin."""

_LONGEST, _PART = 4096, 1024
"""Values that one instance of a kernel adds up at most; and if there are more, that each of several does."""
_WIDEST = 1 << 18
"""Columns with which an instance can count its values in 32 bits."""
_LARGEST_RANK = 64
"""With which kernels of unrolled loops make sense."""
_SUMS = 1 << 13
"""Sums that an instance keeps in registers."""
_LINE = 64
"""Columns of a piece: whole lines of memory."""
_AT_ONCE = 4
"""Values that a thread reads at once, where all rows begin at multiples of it."""
_TILE = 16, 128
"""Rows and columns that an instance restores."""


class Products(Protocol):
    """What is computed of a bucket in one step, in this order."""

    def make_left(self, flat: Tensor, rest: Tensor, bases: Tensor, left: Tensor) -> None:
        """Add what was kept to the matrices, and multiply them by the bases."""

    def make_right(self, flat: Tensor, left: Tensor, right: Tensor) -> None:
        """Multiply the matrices' transposes by the first factors."""

    def restore(self, flat: Tensor, rest: Tensor, left: Tensor, own: Tensor, mean: Tensor) -> None:
        """Put products with the mean in the matrices' places, and keep what those with this worker's own lack."""


def make_products(layout: LowRankLayout, sizes: Sequence[int], device: torch.device, has_kernels: bool) -> Products:
    """Return what computes the products of tensors of these sizes on a device, the same on all workers."""
    is_wide = any(_lies(one)[1] > _WIDEST for one in layout.matrices)
    if has_kernels and device.type == "cuda" and not is_wide:
        return KernelProducts(layout, sizes, device)
    return TorchProducts(layout, sizes)


@functools.cache
def kernel_digest(rank: int, device: torch.device) -> int:
    """Return a number that is equal on two workers if the kernels give the same bits there; 0 if they do not work.

    That compiles all of them: a thread that needs one later must not wait for that in the middle of a step.
    """
    if find_spec("triton") is None or rank > _LARGEST_RANK:
        return 0
    digest = hashlib.sha256()
    try:
        for shapes in ([(2, 3), (3, 2)], [(64, 96), (96, 64)]):
            for one in _one_step(shapes, rank, device):
                digest.update(one.cpu().numpy().tobytes())
    except Exception as error:
        _log.warning("Triton does not work here: %s", error)
        return 0
    return int.from_bytes(digest.digest()[:7], "little") or 1


def _one_step(shapes: Sequence[tuple[int, int]], rank: int, device: torch.device) -> list[Tensor]:
    """Return all that kernels make of some values."""
    sizes = [math.prod(shape) for shape in shapes]
    layout = split_bucket(sizes, shapes, rank)
    products = KernelProducts(layout, sizes, device)
    generator = torch.Generator("cpu").manual_seed(20190530)
    lengths = sum(sizes), sum(sizes), layout.left_size, layout.right_size, layout.right_size
    drawn = [torch.randn(length, generator=generator, dtype=torch.float32, device="cpu") for length in lengths]
    flat, rest, left, right, mean = (one.to(device) for one in drawn)
    products.make_left(flat, rest, right, left)
    products.make_right(flat, left, right)
    products.restore(flat, rest, left, right, mean)
    return [left, right, flat, rest]


class TorchProducts:
    """One product after the other."""

    def __init__(self, layout: LowRankLayout, sizes: Sequence[int]) -> None:
        self._layout = layout
        self._starts = [*accumulate(sizes, initial=0)]

    def make_left(self, flat: Tensor, rest: Tensor, bases: Tensor, left: Tensor) -> None:
        """Add and multiply."""
        for one in self._layout.matrices:
            matrix = self._matrix(flat, one).add_(self._matrix(rest, one))
            torch.mm(matrix, self._right(bases, one), out=self._left(left, one))

    def make_right(self, flat: Tensor, left: Tensor, right: Tensor) -> None:
        """Multiply."""
        for one in self._layout.matrices:
            torch.mm(self._matrix(flat, one).t(), self._left(left, one), out=self._right(right, one))

    def restore(self, flat: Tensor, rest: Tensor, left: Tensor, own: Tensor, mean: Tensor) -> None:
        """Multiply, twice."""
        for one in self._layout.matrices:
            matrix, factor = self._matrix(flat, one), self._left(left, one)
            torch.addmm(matrix, factor, self._right(own, one).t(), alpha=-1, out=self._matrix(rest, one))
            torch.mm(factor, self._right(mean, one).t(), out=matrix)

    def _matrix(self, flat: Tensor, one: LowRankMatrix) -> Tensor:
        """Return a view of a tensor's values as the matrix that travels."""
        piece = flat[self._starts[one.place] :][: one.rows * one.columns]
        return piece.view(one.columns, one.rows).t() if one.is_turned else piece.view(one.rows, one.columns)

    def _left(self, left: Tensor, one: LowRankMatrix) -> Tensor:
        return left[one.left].view(one.rows, self._layout.rank)

    def _right(self, right: Tensor, one: LowRankMatrix) -> Tensor:
        return right[one.right].view(one.columns, self._layout.rank)


class KernelProducts:
    """All at once, by ``lowrank_kernels.py``. Making or using one raises whatever Triton raises where it fails."""

    def __init__(self, layout: LowRankLayout, sizes: Sequence[int], device: torch.device) -> None:
        from poseidon.sums import lowrank_kernels

        self._kernels = lowrank_kernels
        self._rank = layout.rank
        self._rank_room = 1 << (layout.rank - 1).bit_length()
        self._rows = max(1, _SUMS // (self._rank_room * _LINE))
        """Of a piece that is multiplied."""
        starts = [*accumulate(sizes, initial=0)]
        placed = [(one, starts[one.place]) for one in layout.matrices]
        self._step = _AT_ONCE if all(not (start | _lies(one)[1]) % _AT_ONCE for one, start in placed) else 1
        straight, turned = ([pair for pair in placed if pair[0].is_turned is way] for way in (False, True))
        # A matrix that travels transposed lies here as it is, so sums run along its other side.
        self._to_left = (
            self._deal(straight, True, "right", "left", device),
            self._deal(turned, False, "right", "left", device),
        )
        self._to_right = (
            self._deal(straight, False, "left", "right", device),
            self._deal(turned, True, "left", "right", device),
        )
        self._tiles = _cut(straight, device), _cut(turned, device)

    def make_left(self, flat: Tensor, rest: Tensor, bases: Tensor, left: Tensor) -> None:
        """Add and multiply in one pass."""
        with torch.cuda.device_of(flat):
            for deal in self._to_left:
                self._narrow(deal, flat, rest, bases, left, True)

    def make_right(self, flat: Tensor, left: Tensor, right: Tensor) -> None:
        """Multiply in one pass."""
        with torch.cuda.device_of(flat):
            for deal in self._to_right:
                self._narrow(deal, flat, flat, left, right, False)

    def restore(self, flat: Tensor, rest: Tensor, left: Tensor, own: Tensor, mean: Tensor) -> None:
        """Multiply and keep in one pass."""
        with torch.cuda.device_of(flat):
            for tiles, factors in zip(self._tiles, ((left, left, mean, own), (mean, own, left, left)), strict=True):
                if len(tiles):
                    self._kernels.widen[len(tiles),](
                        flat,
                        rest,
                        *factors,
                        tiles,
                        rank=self._rank,
                        many_rows=_TILE[0],
                        many_columns=_TILE[1],
                        step=self._step,
                    )

    def _narrow(self, deal: _Deal, flat: Tensor, rest: Tensor, base: Tensor, into: Tensor, adds: bool) -> None:
        for table, place in ((deal.whole, into), (deal.parts, deal.room)):
            if len(table):
                self._kernels.narrow[len(table),](
                    flat,
                    rest,
                    base,
                    place,
                    table,
                    rank=self._rank,
                    rank_room=self._rank_room,
                    many_rows=self._rows,
                    many_columns=_LINE,
                    along_rows=deal.along_rows,
                    adds=adds,
                    step=self._step,
                )
        for span, target, pieces in deal.split:
            torch.sum(deal.room[span].view(pieces, -1), 0, out=into[target])

    def _deal(self, placed: Placed, along_rows: bool, source: str, target: str, device: torch.device) -> _Deal:
        """Deal the sums of some matrices to instances of the kernel."""
        whole: list[list[int]] = []
        parts: list[list[int]] = []
        split: list[tuple[slice, slice, int]] = []
        room = 0
        for one, start in placed:
            height, width = _lies(one)
            kept, summed, step = (height, width, self._rows) if along_rows else (width, height, _LINE)
            base, into = getattr(one, source), getattr(one, target)
            length = summed if summed <= _LONGEST else _PART
            pieces = math.ceil(summed / length)
            for number, first in product(range(pieces), range(0, kept, step)):
                mine = first, min(kept, first + step)
                some = number * length, min(summed, (number + 1) * length)
                spans = (*mine, *some) if along_rows else (*some, *mine)
                if pieces == 1:
                    whole.append([start, width, *spans, base.start, into.start])
                else:
                    parts.append([start, width, *spans, base.start, room + number * kept * self._rank])
            if pieces > 1:
                split.append((slice(room, room + pieces * kept * self._rank), into, pieces))
                room = split[-1][0].stop
        memory = torch.empty(room, dtype=torch.float32, device=device)
        return _Deal(along_rows, _table(whole, device), _table(parts, device), memory, tuple(split))


@dataclass(frozen=True, eq=False)
class _Deal:
    """Which instance of the kernel adds up what."""

    along_rows: bool
    whole: Tensor
    """A row for each instance whose sums are those of a factor."""
    parts: Tensor
    """And for each whose sums are parts of these, in ``room``."""
    room: Tensor
    split: tuple[tuple[slice, slice, int], ...]
    """Where parts lie in there, where their sum belongs, and how many there are."""


def _lies(one: LowRankMatrix) -> tuple[int, int]:
    """Return the rows and columns of a matrix as it lies in memory."""
    return (one.columns, one.rows) if one.is_turned else (one.rows, one.columns)


def _cut(placed: Placed, device: torch.device) -> Tensor:
    """Return the pieces in which matrices are restored."""
    rows = []
    for one, start in placed:
        height, width = _lies(one)
        by_row, by_column = (one.right, one.left) if one.is_turned else (one.left, one.right)
        for row, column in product(range(0, height, _TILE[0]), range(0, width, _TILE[1])):
            rows.append([start, width, row, height, column, width, by_row.start, by_column.start])
    return _table(rows, device)


def _table(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, _TABLE_WIDTH).to(device)
