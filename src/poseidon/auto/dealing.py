"""Which worker gets which samples of a batch: pure functions with the same result on every worker.

All workers get the same number of batches. If the end of an epoch is too short for all of them, it is split as evenly
as possible, a worker that would get nothing repeats a sample, and each part has a *weight*: its loss counts for the
samples it really adds, so that the mean over workers is the mean over samples.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
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
    rest: list[list[T]] = field(default_factory=list)
    """What this worker did not get of the script's batches."""

    @property
    def mean_weight(self) -> float:
        """Factor of a loss that is a mean over items, so that the mean over workers is the mean over all items."""
        return self.added * self.size / self.total

    @property
    def sum_weight(self) -> float:
        """Factor of a loss that is a sum over items, so that the mean over workers is the sum over all items."""
        return self.added * self.size / len(self.items)

    def once(self) -> Part[T]:
        """Return the part with no sample doubled."""
        return replace(self, items=self.items[: max(1, self.added)])


@dataclass(frozen=True)
class Dealer:
    """Deals batches, or single items, to ``size`` workers; this one is ``rank``."""

    rank: int
    size: int
    divides: bool
    """Split each batch between the workers instead of giving each worker its own batch."""
    drop_last: bool = False
    """Drop the rest that does not fill a batch for every worker."""

    def batches(self, batches: Iterable[list[T]]) -> Generator[Part[T], None, list[list[T]]]:
        """Yield this worker's parts of the script's batches; return the batches that are dropped at the end."""
        return self._divided(batches) if self.divides else self._grouped(batches)

    def items(self, items: Iterable[list[T]]) -> Generator[Part[T], None, list[list[T]]]:
        """Do the same where an item, alone in its list, is a whole batch, or the script does not batch."""
        source = iter(items)
        while group := list(islice(source, self.size)):
            if len(group) < self.size and self.drop_last:
                return group
            mine = self.rank if self.rank < len(group) else 0
            rest = [item for place, item in enumerate(group) if place != mine]
            yield Part(group[mine], int(mine == self.rank), len(group), self.size, rest)
        return []

    def count_batches(self, batches: int) -> int:
        """Return how many parts each worker gets of that many batches of the script."""
        if self.divides:
            return batches
        return batches // self.size if self.drop_last else -(-batches // self.size)

    def bounds(self, count: int) -> tuple[int, int]:
        """Return start and end of this worker's even share of ``count`` items."""
        return self.rank * count // self.size, (self.rank + 1) * count // self.size

    def _divided(self, batches: Iterable[list[T]]) -> Generator[Part[T], None, list[list[T]]]:
        usual = 0
        for batch in batches:
            usual = usual or len(batch)
            yield self._part(list(batch), usual // self.size)
        return []

    def _grouped(self, batches: Iterable[list[T]]) -> Generator[Part[T], None, list[list[T]]]:
        source = iter(batches)
        usual = 0
        while group := [list(batch) for batch in islice(source, self.size)]:
            usual = usual or len(group[0])
            if len(group) == self.size:
                mine = group[self.rank]
                rest = [batch for place, batch in enumerate(group) if place != self.rank]
                yield Part(_at_least_two(mine, usual), len(mine), sum(map(len, group)), self.size, rest)
            elif self.drop_last:
                return group
            else:
                yield self._part([item for batch in group for item in batch], usual)
        return []

    def _part(self, pool: list[T], usual: int) -> Part[T]:
        start, stop = self.bounds(len(pool))
        mine = pool[start:stop]
        left = pool[:start] + pool[stop:] if mine else pool[1:]
        return Part(_at_least_two(mine or pool[:1], usual), len(mine), len(pool), self.size, [left] if left else [])


def cut(items: Iterable[T], batch: int, drop_last: bool) -> Iterator[list[T]]:
    """Cut a stream into batches; a short one at the end is dropped if the script says so."""
    source = iter(items)
    while block := list(islice(source, batch)):
        if len(block) == batch or not drop_last:
            yield block


def _at_least_two(items: list[T], usual: int) -> list[T]:
    """Double a single sample if batches are usually larger: the mean stays, and batch normalisation needs two."""
    return items * 2 if len(items) == 1 and usual > 1 else items
