"""Random numbers that depend on a seed and a record's place alone, not on which thread asks for them, or when."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

_ALL = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
"""Of SplitMix64: odd, so that the steps reach every number, and far from any pattern."""
_PER_RECORD = 4
"""Numbers reserved for each record; what draws more would repeat the next one's."""


MOST_SEED = 2**62
"""Seeds are below this: they travel and are stored as signed numbers of 64 bits."""


class Draws:
    """The random numbers of one record: SplitMix64, which computes the n-th number without the ones before it."""

    def __init__(self, seed: int, record: int) -> None:
        self._at = seed + record * _PER_RECORD * _STEP

    def below(self, limit: int) -> int:
        """Return a whole number from 0 to ``limit`` - 1."""
        self._at += _STEP
        mixed = self._at & _ALL
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _ALL
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _ALL
        return (mixed ^ mixed >> 31) * limit >> 64


def new_seed() -> int:
    """Return a seed derived from the one set for fillers; a solver gives all its workers the first one's."""
    return int(torch.randint(MOST_SEED, ()).item())


def permuted(count: int, seed: int, *turn: int) -> NDArray[np.int64]:
    """Return the numbers below ``count`` in a random order, which seed and ``turn`` (a pass over a source) decide."""
    return np.random.default_rng([seed, *turn]).permutation(count)
