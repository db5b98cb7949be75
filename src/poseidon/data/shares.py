"""How a batch is divided among workers of different speeds, and how the division follows what they measure. Pure.

Every worker computes the shares itself, from the same reports, and all must get the same ones whatever their
processors and Python versions are. So only operations are used here whose results IEEE 754 and Python define to the
last bit: additions of floats go through ``fsum``, since ``sum`` rounds differently from version to version.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

SMOOTHING = 0.2
"""How much a new measurement counts beside all earlier ones."""
JUMP = 1.25
"""Two measurements in a row that differ so much from the earlier ones, both up or both down, take their place."""
STRIDE = 1.25
"""By which factor a share may grow or shrink at once; by one sample at least."""
LEAST_GAIN = 0.005
"""Part of a step's time that the best shares would have to save to count at all..."""
PAYING_GAIN = 0.08
"""... and in sum over the reports since the last change, or nothing is changed: much at once, or little for long."""
LEAST_SHARE = 2
"""Samples that each worker keeps where there are enough: batch normalisation fails with one."""
NO_BOUND = 1 << 40
"""The largest share of a worker that has not said how much it can hold."""


@dataclass(frozen=True)
class Report:
    """What one worker says of itself."""

    pace_s: float
    """Seconds of its own work per sample, without waits for others; 0: not known yet."""
    most: int = NO_BOUND
    """The largest share that it may have."""
    room: int = NO_BOUND
    """The largest share that its memory is sure to hold; more is tried only where there is no other way."""


@dataclass(frozen=True)
class BatchShares:
    """Shares of a batch of the usual size, and bounds, from which those of other sizes follow."""

    shares: tuple[int, ...]
    """Samples of each worker, by rank."""
    most: tuple[int, ...]

    def divide(self, total: int) -> tuple[int, ...]:
        """Return the shares of a batch of any size, in the same proportions."""
        usual = sum(self.shares)
        return self.shares if total == usual else divide(total, self.shares, least(total, self.most), self.most)


class PaceMeter:
    """A worker's own measurements: the median over some steps, so that a single slow one does not count."""

    def __init__(self) -> None:
        self._paces: list[tuple[bool, float]] = []

    def __len__(self) -> int:
        """Return the number of steps since the last :meth:`take`."""
        return len(self._paces)

    def add(self, samples: int, seconds: float, is_usual: bool = True) -> None:
        """Note one step's samples, the seconds of this worker's own work, and whether it was a step like others."""
        self._paces.append((is_usual, max(0.0, seconds) / max(1, samples)))

    def take(self) -> float:
        """Return the median pace of usual steps since the last call; of all, if none was usual."""
        laps, self._paces = self._paces, []
        paces = [pace for is_usual, pace in laps if is_usual] or [pace for _, pace in laps]
        return statistics.median(paces) if paces else 0.0


class Balance:
    """The shares in force, and the paces behind them. The same calls on all workers give the same shares."""

    def __init__(self, total: int, reports: Sequence[Report]) -> None:
        self._total = total
        self._paces = [report.pace_s for report in reports]
        self._last = [*self._paces]
        """The last measurements as they came."""
        self._missed = 0.0
        """What the best shares would have gained since the last change."""
        self._most = tuple(report.most for report in reports)
        self.dealing = BatchShares(self._best(reports), self._most)

    @property
    def paces_s(self) -> tuple[float, ...]:
        """Smoothed seconds per sample, by rank; 0: not known."""
        return tuple(self._paces)

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each worker, by rank, in a batch of the usual size."""
        return self.dealing.shares

    def hear(self, reports: Sequence[Report]) -> bool:
        """Take new reports into account; return whether the shares have changed."""
        for rank, report in enumerate(reports):
            if report.pace_s > 0:
                self._paces[rank] = smooth(self._paces[rank], self._last[rank], report.pace_s)
                self._last[rank] = report.pace_s
        best, before = self._best(reports), self.shares
        gain = self._step_s(before) / self._step_s(best) - 1
        self._missed = self._missed + gain if gain > LEAST_GAIN else 0.0
        if self._missed < PAYING_GAIN:
            return False
        self._missed = 0.0
        self.dealing = BatchShares(self._toward(best, reports), self._most)
        return self.shares != before

    def _best(self, reports: Sequence[Report]) -> tuple[int, ...]:
        speeds = [1 / pace for pace in self._known_paces()]
        most = [min(report.most, report.room) for report in reports]
        if sum(most) < self._total:
            most = [*self._most]
        return divide(self._total, speeds, least(self._total, most), most)

    def _toward(self, best: Sequence[int], reports: Sequence[Report]) -> tuple[int, ...]:
        """Return shares on the way to the best ones, not too far from the present ones."""
        lowest = [max(1, min(int(share / STRIDE), share - 1)) for share in self.shares]
        highest = [max(math.ceil(share * STRIDE), share + 1) for share in self.shares]
        room = [max(share, min(report.most, report.room)) for share, report in zip(self.shares, reports, strict=True)]
        floor = [min(pair) for pair in zip(least(self._total, self._most), self.shares, strict=True)]
        return divide(self._total, best, [*map(max, lowest, floor)], [*map(min, highest, room)])

    def _known_paces(self) -> list[float]:
        """Return the paces, with that of a usual worker for those who have not measured yet."""
        known = sorted(pace for pace in self._paces if pace > 0)
        usual = known[len(known) // 2] if known else 1.0
        return [pace if pace > 0 else usual for pace in self._paces]

    def _step_s(self, shares: Sequence[int]) -> float:
        return max(share * pace for share, pace in zip(shares, self._known_paces(), strict=True))


def least(total: int, most: Sequence[int]) -> list[int]:
    """Return the smallest shares of a batch that workers may have."""
    floor = min(LEAST_SHARE, total // len(most))
    return [min(floor, each) for each in most]


def smooth(known: float, last: float, new: float) -> float:
    """Return what to believe after measurements ``last`` and ``new``, if ``known`` was believed; 0: nothing yet."""
    if not known:
        return new
    if min(last, new) > known * JUMP:
        return min(last, new)
    if max(last, new) < known / JUMP:
        return max(last, new)
    return known + SMOOTHING * (new - known)


def divide(total: int, speeds: Sequence[float], least: Sequence[int], most: Sequence[int]) -> tuple[int, ...]:
    """Divide ``total`` samples so that the slowest worker is done as early as possible, each within its bounds.

    The bounds must leave room: the sum of ``least`` up to that of ``most``.
    """
    assert sum(least) <= total <= sum(most), f"{total} samples for {least} to {most}"
    shares = [0] * len(speeds)
    free, left = [*range(len(speeds))], total
    while free:
        level = left / math.fsum(speeds[rank] for rank in free)
        ideal = {rank: level * speeds[rank] for rank in free}
        low = [rank for rank in free if ideal[rank] < least[rank]]
        high = [rank for rank in free if ideal[rank] > most[rank]]
        if not low and not high:
            break
        # Those on the side that lacks more are certain to end at their bounds.
        lacking = math.fsum(least[rank] - ideal[rank] for rank in low)
        excess = math.fsum(ideal[rank] - most[rank] for rank in high)
        for rank in low if lacking >= excess else high:
            shares[rank] = least[rank] if lacking >= excess else most[rank]
            left -= shares[rank]
            free.remove(rank)
    for rank in free:
        shares[rank] = min(most[rank], max(least[rank], int(ideal[rank])))
    # What rounding has left over goes, one by one, to whoever is done with it first.
    everybody = range(len(speeds))
    while (rest := total - sum(shares)) != 0:
        if rest > 0:
            takers = [rank for rank in everybody if shares[rank] < most[rank]]
            shares[min(takers, key=lambda rank: ((shares[rank] + 1) / speeds[rank], rank))] += 1
        else:
            givers = [rank for rank in everybody if shares[rank] > least[rank]]
            shares[max(givers, key=lambda rank: (shares[rank] / speeds[rank], rank))] -= 1
    return tuple(shares)


def cut(start: int, shares: Sequence[int], rank: int) -> range:
    """Return where a worker's share of the samples from ``start`` on lies."""
    first = start + sum(shares[:rank])
    return range(first, first + shares[rank])
