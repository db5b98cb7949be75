"""Which worker gets which samples of a batch: pure functions with the same result on every worker.

All workers get the same number of batches. If the end of an epoch is too short for all of them, it is split as evenly
as possible, a worker that would get nothing repeats a sample, and each part has a *weight*: its loss counts for the
samples it really adds, so that the mean over workers is the mean over samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Part(Generic[T]):
    """One worker's part of one step's samples."""

    items: list[T]
    added: int
    """How many of the items count; the others are repeated as padding."""
    total: int
    """Items that count over all parts."""
    size: int
    """Number of workers."""

    @property
    def mean_weight(self) -> float:
        """Factor of a loss that is a mean over items, so that the mean over workers is the mean over all items."""
        return self.added * self.size / self.total

    @property
    def sum_weight(self) -> float:
        """Factor of a loss that is a sum over items, so that the mean over workers is the sum over all items."""
        return self.added * self.size / len(self.items)


@dataclass(frozen=True)
class Dealer:
    """Deals batches, or single items, to ``size`` workers; this one is ``rank``."""

    rank: int
    size: int
    divides: bool
    """Split each batch between the workers instead of giving each worker its own batch."""
    drop_last: bool = False
    """Drop the rest that does not fill a batch for every worker."""

    def batches(self, batches: Iterable[list[T]]) -> Iterator[Part[T]]:
        """Yield this worker's parts of the script's batches."""
        return self._divided(batches) if self.divides else self._grouped(batches)

    def stream(self, items: Iterable[T], batch: int) -> Iterator[Part[T]]:
        """Yield this worker's parts of a stream that the script cuts into batches of ``batch``."""
        block = batch if self.divides else batch * self.size
        source = iter(items)
        while pool := list(islice(source, block)):
            if len(pool) < block and self.drop_last:
                return
            yield self._part(pool, batch // self.size if self.divides else batch)

    def items(self, items: Iterable[T]) -> Iterator[Part[T]]:
        """Yield this worker's items where items are whole batches, or the script does not batch."""
        source = iter(items)
        while group := list(islice(source, self.size)):
            if len(group) < self.size and self.drop_last:
                return
            is_mine = self.rank < len(group)
            yield Part([group[self.rank if is_mine else 0]], int(is_mine), len(group), self.size)

    def count_batches(self, batches: int) -> int:
        """Return how many parts each worker gets of that many batches of the script."""
        if self.divides:
            return batches
        return batches // self.size if self.drop_last else -(-batches // self.size)

    def bounds(self, count: int) -> tuple[int, int]:
        """Return start and end of this worker's even share of ``count`` items."""
        return self.rank * count // self.size, (self.rank + 1) * count // self.size

    def _divided(self, batches: Iterable[list[T]]) -> Iterator[Part[T]]:
        usual = 0
        for batch in batches:
            usual = usual or len(batch)
            yield self._part(list(batch), usual // self.size)

    def _grouped(self, batches: Iterable[list[T]]) -> Iterator[Part[T]]:
        source = iter(batches)
        usual = 0
        while group := [list(batch) for batch in islice(source, self.size)]:
            usual = usual or len(group[0])
            if len(group) == self.size:
                mine = group[self.rank]
                yield Part(_at_least_two(mine, usual), len(mine), sum(map(len, group)), self.size)
            elif not self.drop_last:
                yield self._part([item for batch in group for item in batch], usual)

    def _part(self, pool: list[T], usual: int) -> Part[T]:
        start, stop = self.bounds(len(pool))
        mine = pool[start:stop]
        return Part(_at_least_two(mine or pool[:1], usual), len(mine), len(pool), self.size)


def _at_least_two(items: list[T], usual: int) -> list[T]:
    """Double a single sample if batches are usually larger: the mean stays, and batch normalisation needs two."""
    return items * 2 if len(items) == 1 and usual > 1 else items
