"""Batch normalisation over the samples of all workers: what travels and how it is put together.

Each worker computes the moments of its own rows, sends them to everybody, and combines those of all workers in the same
way, and so to the same bits. How a framework calls this in the middle of a step, and differentiates it, is up to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from poseidon.engine.outside import Array
from poseidon.team.team import Team


class Sums(Protocol):
    """Where moments are added up."""

    def sum(self, array: Array, what: str) -> Array:
        """Return the sum of everybody's array, the same bits everywhere; blocks."""


class MomentsExchange:
    """Sums of moments and of their gradients. Both calls block; ``channel`` says in which order they must come."""

    def __init__(self, team: Team, channel: Sums, weight: Callable[[], float]) -> None:
        self._team = team
        self._channel = channel
        self._weight = weight
        """Returns the factor by which this worker's gradients will be multiplied in this step."""

    def forward(self, mean: Array, variance: Array, count: float, name: str) -> tuple[Array, Array, float]:
        """Return mean and variance over all workers, and the share that this worker's ``count`` rows have in them."""
        whole_mean, whole_variance, share = combine(self.gather(mean, variance, count, name), self._team.rank)
        return whole_mean.astype(mean.dtype), whole_variance.astype(mean.dtype), share

    def gather(self, mean: Array, variance: Array, count: float, name: str) -> Array:
        """Return everybody's moments, as :func:`combine` takes them."""
        rows = np.zeros((self._team.size, 1 + 2 * mean.size))
        rows[self._team.rank] = np.concatenate([[count], mean, variance])
        return self._channel.sum(rows, f"the moments of {name}")

    def backward(self, by_mean: Array, by_variance: Array, name: str) -> tuple[Array, Array]:
        """Return the gradients by the moments over all workers, of the losses of all workers."""
        # This worker's gradients will be multiplied by its weight later on; what comes from the others must be too.
        weight = self._weight()
        both = np.concatenate([by_mean, by_variance]).astype(np.float64)
        both = both * weight if weight else np.zeros_like(both)  # gradients of a loss of no samples may be NaN
        total = self._channel.sum(both, f"the gradients of the moments of {name}")
        total = (total / weight if weight else np.zeros_like(total)).astype(by_mean.dtype)
        return total[: by_mean.size], total[by_mean.size :]


def combine(parts: Array, rank: int) -> tuple[Array, Array, float]:
    """Return mean and variance over all workers, and the share that ``rank``'s rows have in them. Pure.

    ``parts`` has a row for each worker: the number of its rows, then its means, then its variances.
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
    """Return gradients by a worker's own moments, given those by the moments over all workers."""
    from_variance = by_variance * share
    return by_mean * share + 2.0 * from_variance * (mean - whole_mean), from_variance
