"""How parts of a batch make up what a whole batch does to a number: a sum, a mean, the largest, the smallest. Pure.

A count of correct answers is a sum over the workers, a loss a mean. Nothing in a graph says which, so it is found by
trying: what the whole batch gives is compared with what two parts of it give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

SUM, MEAN, LARGEST, SMALLEST = 1, 2, 4, 8
ANY = SUM | MEAN | LARGEST | SMALLEST
"""Ways to combine, as bits; several while trials have not told them apart."""

_CLOSE = 1e-4
"""Relative difference that rounding may make in float32."""
_CLEARLY = 4.0
"""How many times as far off the other must be, where neither fits exactly: with dropout, say."""


def fitting(whole: Array, parts: tuple[Array, Array], counts: tuple[int, int]) -> int:
    """Return the ways to get ``whole`` from two parts, which have ``counts`` rows; 0 if none fits."""
    first, second = (np.asarray(part, np.float64) for part in parts)
    whole = np.asarray(whole, np.float64)
    share = counts[0] / sum(counts)
    guesses = {
        SUM: first + second,
        MEAN: share * first + (1.0 - share) * second,
        LARGEST: np.maximum(first, second),
        SMALLEST: np.minimum(first, second),
    }
    scale = max(np.abs(array).max(initial=0.0) for array in (whole, first, second))
    misses = {way: float(np.abs(guess - whole).max(initial=0.0)) for way, guess in guesses.items()}
    if not np.isfinite(scale):
        return ANY  # it tells nothing
    found = sum(way for way, miss in misses.items() if miss <= _CLOSE * scale)
    if not found:
        near, far = sorted((SUM, MEAN), key=misses.__getitem__)
        found = near if misses[near] * _CLEARLY < misses[far] else 0
    return found


def chosen(ways: int) -> int:
    """Return the way to use of those still possible; 0 if there is none.

    What one part alone has changed looks like a sum as well as an extreme; then it is the extreme, if it can be one.
    """
    if ways == SUM | LARGEST or ways == SUM | SMALLEST:
        ways &= ~SUM
    return next((way for way in (SUM, MEAN, LARGEST, SMALLEST) if ways & way), 0)


def is_settled(ways: int) -> bool:
    """Return whether further trials would change nothing: what is the same for any part is a mean, too."""
    return not ways & SUM or ways == SUM


def combine(way: int, values: Sequence[Array], counts: Sequence[int]) -> Array:
    """Return the workers' values as one, added in rank order."""
    if way == SUM:
        total: Array = sum(values[1:], start=np.array(values[0]))
        return total
    if way == MEAN:
        if all((value == values[0]).all() for value in values):
            return values[0]
        shares = [count / sum(counts) for count in counts]
        parts = [np.asarray(value, np.float64) * share for value, share in zip(values, shares, strict=True)]
        mean: Array = sum(parts[1:], start=parts[0])
        return mean
    function = np.maximum if way == LARGEST else np.minimum
    extreme: Array = function.reduce(list(values))
    return extreme
