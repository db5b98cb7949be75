"""Random numbers in graphs: noise differs between workers, the order of a dataset does not.

Worker 0 draws what the script would draw alone. Initial values of variables may differ: all take worker 0's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tensorflow.python.data.util import random_seed as data_seed
from tensorflow.python.framework import random_seed

from poseidon.following.patches import Patches
from poseidon.following.streams import derive

_LARGEST = 2**31 - 1


class Seeds:
    """Replaces how operations and datasets get their seeds."""

    def __init__(self, rank: int, seed: int) -> None:
        self._rank = rank
        self._seed = seed
        self._datasets = 0
        self._is_for_data = False

    def install(self, patches: Patches) -> None:
        """Install the replacements."""
        patches.wrap(random_seed, "get_seed", self._for_operation)
        patches.wrap(data_seed, "get_seed", self._for_dataset)

    def _for_operation(self, original: Callable[..., Any], op_seed: Any) -> tuple[Any, Any]:
        first, second = original(op_seed)
        if self._is_for_data or self._rank == 0 or second is None:
            return first, second
        return first, derive(int(second), self._rank) % _LARGEST

    def _for_dataset(self, original: Callable[..., Any], seed: Any) -> Any:
        """Give a dataset that would draw its own seed one that is the same on all workers."""
        with self._for_data():
            if seed is None and random_seed.get_seed(None) == (None, None):
                self._datasets += 1
                seed = (self._seed + self._datasets) % _LARGEST
            return original(seed)

    @contextlib.contextmanager
    def _for_data(self) -> Iterator[None]:
        self._is_for_data = True
        try:
            yield
        finally:
            self._is_for_data = False
