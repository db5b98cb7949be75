"""Batch normalisation over the samples of all workers: what travels, and how it is combined.

Each worker computes the moments of its own rows, sends them to all workers, and combines everyone's in the same order,
so all get the same bits. Each framework decides how to call this in the middle of a step and how to differentiate it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from poseidon.engine.outside import Array
from poseidon.team.team import Team


class Sums(Protocol):
    """A blocking sum over all workers, used for moments."""

    def sum(self, array: Array, what: str) -> Array:
        """Return the sum of all workers' arrays, bit-identical everywhere. Blocks."""


class MomentsExchange:
    """Sums of moments and of their gradients. Both calls block, in the order that ``channel`` requires."""

    def __init__(self, team: Team, channel: Sums, weight: Callable[[], float]) -> None:
        self._team = team
        self._channel = channel
        self._weight = weight
        """Returns the factor that multiplies this worker's gradients in this step."""

    def forward(self, mean: Array, variance: Array, count: float, name: str) -> tuple[Array, Array, float]:
        """Return mean and variance over all workers, and the share of this worker's ``count`` rows in them."""
        whole_mean, whole_variance, share = combine(self.gather(mean, variance, count, name), self._team.rank)
        return whole_mean.astype(mean.dtype), whole_variance.astype(mean.dtype), share

    def gather(self, mean: Array, variance: Array, count: float, name: str) -> Array:
        """Return all workers' moments, in the form :func:`combine` takes."""
        rows = np.zeros((self._team.size, 1 + 2 * mean.size))
        rows[self._team.rank] = np.concatenate([[count], mean, variance])
        return self._channel.sum(rows, f"the moments of {name}")

    def backward(self, by_mean: Array, by_variance: Array, name: str) -> tuple[Array, Array]:
        """Return the gradients of all workers' losses with respect to the moments over all workers."""
        # This worker's gradients are multiplied by its weight later, so the others' contribution must be too.
        weight = self._weight()
        both = np.concatenate([by_mean, by_variance]).astype(np.float64)
        both = both * weight if weight else np.zeros_like(both)  # a loss over no samples may have NaN gradients
        total = self._channel.sum(both, f"the gradients of the moments of {name}")
        total = (total / weight if weight else np.zeros_like(total)).astype(by_mean.dtype)
        return total[: by_mean.size], total[by_mean.size :]


def combine(parts: Array, rank: int) -> tuple[Array, Array, float]:
    """Return mean and variance over all workers, and the share of ``rank``'s rows in them. Pure.

    ``parts`` has one row per worker: its row count, then its means, then its variances.
    """
    width = (parts.shape[1] - 1) // 2
    counts = parts[:, :1]
    # The moments of no rows are NaN, which would survive a multiplication by 0.
    known = np.where(counts > 0, parts[:, 1:], 0.0)
    means, variances = known[:, :width], known[:, width:]
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    variance = (counts * (variances + (means - mean) ** 2)).sum(0) / total
    return mean, variance, float(counts[rank, 0] / total)


def differentiate(by_mean: Any, by_variance: Any, mean: Any, whole_mean: Any, share: Any) -> tuple[Any, Any]:
    """Return gradients with respect to a worker's own moments, given those with respect to the combined moments."""
    from_variance = by_variance * share
    return by_mean * share + 2.0 * from_variance * (mean - whole_mean), from_variance
