"""One pass over a loader: what its samples are used for, who gets which, and who got which. Pure.

What a pass is for shows only when its batches are used: a loader whose batches a backward follows is read for training,
any other is read as a whole by every worker. Until then a pass is *open*. It deals, or leaves batches whole, by a guess
that cannot lose anything: what the others got is kept and comes later if nobody trains; and a batch that all workers
have as a whole gives, in training, the gradient that one machine would compute.
"""

from __future__ import annotations

import enum
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from poseidon.auto.dealing import Dealer, Part
from poseidon.auto.weighing import Portion

_MODULUS = 1 << 62
"""A power of two, as numpy's sums wrap at one, and fit for signed words."""


class PassPurpose(enum.Enum):
    """What the batches of a pass are used for."""

    OPEN = "not known yet"
    TRAINING = "training"
    READING = "reading"


@dataclass(frozen=True)
class SampleTally:
    """Which samples, as a count and a number that depends on every one of them but not on their order."""

    count: int = 0
    mark: int = 0

    def __add__(self, other: SampleTally) -> SampleTally:
        return SampleTally(self.count + other.count, (self.mark + other.mark) % _MODULUS)


@dataclass(frozen=True)
class BatchShare:
    """What one worker gets with one batch."""

    items: list[Any]
    weight: float = 1.0
    """Factor of this worker's loss."""
    is_dealt: bool = False
    """Whether other workers get other samples, for training."""
    is_common: bool = True
    """Whether all workers get these samples, now."""
    counted: SampleTally = SampleTally()
    """The samples that count as seen."""
    portion: Portion | None = None
    """Which part of the script's batch it is, where a batch was divided."""


class LoaderPass:
    """One iteration over a loader by one worker; all workers' passes take the same turns."""

    def __init__(
        self,
        dealer: Dealer,
        deals: bool,
        *,
        is_batched: bool = True,
        is_sum: bool = False,
        is_frozen: bool = False,
        key: Callable[[Any], Any] | None = None,
        name: str = "a loader",
    ) -> None:
        self.name = name
        """What the script calls the loader."""
        self.purpose = PassPurpose.OPEN
        self.is_dealt = deals
        """Whether the next batch is dealt out."""
        self.is_frozen = is_frozen
        """Whether processes of the loader deal, which cannot learn of a change."""
        self.is_over = False
        """Whether all batches have been handed to the script."""
        self.is_collected = False
        """Whether nobody used a batch before the end, and what the other workers got came behind what this one got."""
        self._dealer = dealer
        self._is_batched = is_batched
        self._is_sum = is_sum
        self._key = key
        self._source: Iterator[list[Any]] = iter(())
        self._parts: Generator[Part[Any], None, list[list[Any]]] | None = None
        self._rests: list[list[Any]] = []
        self._on_their_way: deque[BatchShare] = deque()
        self._order = 0
        self._drawn, self._dropped, self._mine, self._common = (
            SampleTally(),
            SampleTally(),
            SampleTally(),
            SampleTally(),
        )
        self._has_read_rests = False
        self._leans = False
        self._handed = 0

    @property
    def is_glance(self) -> bool:
        """Whether the script took one batch and left."""
        return not self.is_over and self._handed == 1

    @property
    def is_unused(self) -> bool:
        """Whether batches were dealt out to workers, and no backward followed."""
        if self.purpose is PassPurpose.TRAINING:
            return False
        if self.is_frozen:
            return self.is_dealt and self._handed > 0
        return self._mine.count > 0 and bool(self._rests or self._leans)

    # Drawing: called where the loader asks its sampler.

    def begin(self, batches: Iterable[Any]) -> None:
        """Set the script's batches, or single items in lists of one."""
        self._source = self._drawing(batches)
        self._parts = self._dealer.batches(self._source) if self._is_batched else self._dealer.items(self._source)

    def draw(self) -> BatchShare:
        """Return what this worker fetches next; raises ``StopIteration`` at the end."""
        assert self._parts is not None
        share = self._draw_part(self._parts) if self.is_dealt else self._draw_whole()
        self._on_their_way.append(share)
        return share

    def take_rests(self) -> list[BatchShare]:
        """Return what this worker has not seen at the end of a pass that nobody trained on."""
        if self.purpose is PassPurpose.TRAINING or self.is_frozen or self._leans:
            return []
        is_untouched = self.purpose is PassPurpose.OPEN
        self.read()
        rests = []
        while self._rests:
            rests.append(self._draw_whole())
        self.is_collected |= is_untouched and bool(rests)
        self._on_their_way.extend(rests)
        return rests

    # Using: called where the script gets batches and uses them.

    def hand_over(self) -> BatchShare:
        """Return the share of the batch that the script gets now."""
        self._handed += 1
        share = self._on_their_way.popleft() if self._on_their_way else BatchShare([], is_dealt=self.is_dealt)
        if share.is_dealt:
            self._mine += share.counted
        elif share.is_common:
            self._common += share.counted
        else:
            self._has_read_rests = True
        return share

    def train(self) -> None:
        """Note that a backward followed a batch: from now on batches are dealt out."""
        self.purpose = PassPurpose.TRAINING
        if not self.is_frozen:
            self.is_dealt = True
            self._rests.clear()

    def lean(self) -> None:
        """Note that a backward may follow after the end of the pass: what the other workers got shall not be read."""
        self._leans = True

    def read(self) -> None:
        """Note that a batch was used without gradients: unless a backward follows, batches are for everybody."""
        if self.purpose is PassPurpose.OPEN:
            self.purpose = PassPurpose.READING
            self._leans = False
            self.is_dealt = self.is_dealt and self.is_frozen

    # Comparing.

    def account(self) -> list[int]:
        """Return what the workers compare after a training pass; see :func:`find_miscount`."""
        tallies = (self._drawn, self._dropped, self._mine, self._common)
        is_whole = self.is_over and not self._has_read_rests and not self.is_frozen
        return [self._order, int(is_whole), *(number for tally in tallies for number in (tally.count, tally.mark))]

    # Inside.

    def _drawing(self, batches: Iterable[Any]) -> Iterator[list[Any]]:
        for batch in batches:
            items = batch if isinstance(batch, list) else list(batch)
            tally = self._count(items)
            self._drawn += tally
            self._order = (self._order * 31 + _mark(self._names(items), is_ordered=True)) % _MODULUS
            yield items

    def _draw_part(self, parts: Iterator[Part[Any]]) -> BatchShare:
        try:
            part = next(parts)
        except StopIteration as end:
            dropped = end.value or []
            if self.purpose is PassPurpose.OPEN:
                self._rests += dropped
            for batch in dropped:
                self._dropped += self._count(batch)
            raise
        if self.purpose is PassPurpose.OPEN:
            self._rests += part.rest
            part = part.once()
        weight = part.sum_weight if self._is_sum else part.mean_weight
        portion = Portion(len(part.items), part.total, part.added, part.size) if self._is_batched else None
        return BatchShare(part.items, weight, True, False, self._count(part.items[: part.added]), portion)

    def _draw_whole(self) -> BatchShare:
        if self._rests:
            rest = self._rests.pop(0)
            return BatchShare(rest, is_common=False, counted=self._count(rest))
        batch = next(self._source)
        return BatchShare(batch, counted=self._count(batch))

    def _names(self, items: Sequence[Any]) -> Sequence[Any]:
        return items if self._key is None else [self._key(item) for item in items]

    def _count(self, items: Sequence[Any]) -> SampleTally:
        return SampleTally(len(items), _mark(self._names(items)))


def find_miscount(accounts: Sequence[Sequence[int]]) -> str | None:
    """Compare the workers' accounts of one training pass; return what is wrong with them, if anything."""
    for rank, account in enumerate(accounts):
        if account[0] != accounts[0][0]:
            return (
                f"worker {rank} drew other samples ({account[2]:,}) than worker 0 ({accounts[0][2]:,}), so some were "
                "trained on twice and others never. Let the sampler or the stream draw its order from a seed that is "
                "equal on all workers"
            )
    if not all(account[1] for account in accounts):
        return None  # the script left the pass early
    drawn, dropped, _, common = _tallies(accounts[0])
    seen = sum((_tallies(account)[2] for account in accounts), SampleTally()) + common + dropped
    if seen == drawn:
        return None
    each = ", ".join(f"{_tallies(account)[2].count:,}" for account in accounts)
    return (
        f"of {drawn.count:,} samples the workers saw {each}, and {common.count:,} all together ({dropped.count:,} were "
        "dropped): a part was not seen, or seen twice"
    )


def _tallies(account: Sequence[int]) -> tuple[SampleTally, SampleTally, SampleTally, SampleTally]:
    drawn, dropped, mine, common = (SampleTally(*account[place : place + 2]) for place in (2, 4, 6, 8))
    return drawn, dropped, mine, common


def _mark(names: Sequence[Any], is_ordered: bool = False) -> int:
    """Return a number for samples, by what the sampler calls them."""
    if all(type(name) is int for name in names):
        numbers = np.fromiter((name & 0xFFFFFFFFFFFFFFFF for name in names), np.uint64, len(names))
    else:
        numbers = np.fromiter((zlib.crc32(repr(name).encode()) for name in names), np.uint64, len(names))
    # Multiplication by an odd number and shifts, so that sums of neighbouring numbers do not coincide.
    numbers = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    numbers ^= numbers >> np.uint64(29)
    numbers *= np.uint64(0xBF58476D1CE4E5B9)
    numbers ^= numbers >> np.uint64(32)
    if is_ordered:
        numbers *= np.arange(1, 2 * len(names), 2, dtype=np.uint64)
    return int(np.sum(numbers, dtype=np.uint64)) % _MODULUS
