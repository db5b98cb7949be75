"""How a bucket travels in low rank: what of it are matrices, where their factors lie, how P becomes orthonormal. Pure.

A matrix M becomes P Q^T (PowerSGD, Vogels et al. 2019): P = M Q from the Q of the step before, summed over all workers
and made orthonormal by each of them; then Q = M^T P, summed. All first factors of a bucket travel together, with
whatever travels as it is, and all second ones.

A matrix with more rows than columns is taken transposed, so P is the shorter factor: everybody waits while it becomes
orthonormal, and for an embedding of 50,000 words that takes milliseconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from poseidon.wire.formats import Array


@dataclass(frozen=True)
class LowRankMatrix:
    """One tensor of a bucket, and its factors among those of the others."""

    place: int
    """Among the bucket's tensors."""
    rows: int
    columns: int
    is_turned: bool
    """Whether these are the rows and columns of its transpose."""
    left: slice
    """P, in what travels first."""
    right: slice
    """Q, in what travels then."""


@dataclass(frozen=True)
class LowRankLayout:
    """How a bucket is split."""

    rank: int
    matrices: tuple[LowRankMatrix, ...]
    whole: tuple[tuple[int, slice], ...]
    """What travels as it is: its place among the bucket's tensors, and where it lies in what travels first."""
    left_size: int
    right_size: int


def split_bucket(sizes: Sequence[int], matrices: Sequence[tuple[int, int] | None], rank: int) -> LowRankLayout:
    """Return the layout of tensors of these sizes, given the rows and columns of those that are matrices."""
    found, whole = [], []
    left = right = 0
    for place, (size, matrix) in enumerate(zip(sizes, matrices, strict=True)):
        if matrix is None:
            whole.append((place, slice(left, left + size)))
            left += size
            continue
        rows, columns = sorted(matrix)
        spans = slice(left, left + rank * rows), slice(right, right + rank * columns)
        found.append(LowRankMatrix(place, rows, columns, matrix[0] > matrix[1], *spans))
        left, right = spans[0].stop, spans[1].stop
    return LowRankLayout(rank, tuple(found), tuple(whole), left, right)


def orthonormalize(left: Array) -> bool:
    """Replace the columns of P by orthonormal ones that span as much, in place.

    Return false for one that is not finite, which becomes NaN as a whole. Columns that depend on others become any that
    are orthonormal to them, so P need not have full rank.
    """
    if not np.isfinite(left).all():
        left.fill(np.nan)
        return False
    # Scaled, because squares of small gradients would vanish.
    largest = np.abs(left).max(0)
    largest[largest == 0] = 1
    left[:], _ = np.linalg.qr(left / largest)
    return True


def sum_of_sizes(factor: Array) -> Array:
    """Return the sum of the absolute values of each column; what it is for needs no digits, but little time."""
    with np.errstate(over="ignore", invalid="ignore"):
        totals: Array = np.ones(len(factor), np.float32) @ np.abs(factor)
    return totals


def is_finite(totals: Array, factor: Array) -> bool:
    """Return whether a factor is finite, given :func:`sum_of_sizes`, which may be infinite where no value is."""
    return bool(np.isfinite(totals).all() or np.isfinite(factor).all())


def host_digest() -> int:
    """Return a number that is equal on two workers if :func:`orthonormalize` gives the same bits there."""
    digest = hashlib.sha256()
    generator = np.random.default_rng(20190530)
    for rows, rank in ((64, 1), (1000, 4), (5000, 8), (300, 16)):
        left = generator.standard_normal((rows, rank)).astype(np.float32)
        orthonormalize(left)
        digest.update(left.tobytes())
    return int.from_bytes(digest.digest()[:7], "little")
