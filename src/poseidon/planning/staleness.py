"""How stale workers' reads should be, from how long their steps really took. Pure.

Every worker's step times of a window are replayed with each bound: worker ``i`` may begin step ``k`` once all others
have finished step ``k - 1 - bound`` and their updates have travelled. That gives steps per second. What a step is worth
falls with how much of the others' work its reads miss, so the bound with the most *worth* per second wins: loss per
second, not steps per second.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from poseidon.errors import ConfigError

BOUNDS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
"""Bounds to choose from."""
MOST = BOUNDS[-1]
PRICE = 0.01
"""Share of a step's worth that is lost for each clock that its reads miss on average."""
WORTHWHILE = 1.02
"""A larger bound must promise this much more than a smaller one."""
REPEATED = 4
"""Times that a window is replayed, so that running ahead at its beginning counts for little."""


@dataclass(frozen=True)
class StepTimes:
    """What was measured of a window: by worker, for each of its steps."""

    own_s: tuple[tuple[float, ...], ...]
    """Seconds that the worker itself needed, without waiting for anybody."""
    waited_s: tuple[tuple[float, ...], ...]
    """Seconds until the values that it needed next were there."""

    def __post_init__(self) -> None:
        lengths = {len(times) for times in (*self.own_s, *self.waited_s)}
        if not self.own_s or len(self.own_s) != len(self.waited_s) or len(lengths) != 1 or lengths == {0}:
            raise ConfigError(
                f"step times of {len(self.own_s)} and waits of {len(self.waited_s)} workers, of {sorted(lengths)} "
                "steps; expected the same number of steps, at least one, of each worker"
            )

    @property
    def travel_s(self) -> float:
        """Time of an exchange itself: in lockstep the last worker of a step waits for nothing else."""
        shortest = [min(waits) for waits in zip(*self.waited_s, strict=True)]
        return float(median(shortest))


@dataclass(frozen=True)
class Prospect:
    """What a bound promises."""

    bound: int
    step_s: float
    """Time of a step, mean over a replay."""
    lag: float
    """Clocks of another worker that a read misses, mean over reads and workers."""

    @property
    def worth(self) -> float:
        """Worth of the steps of a second; 1 is a step that misses nothing."""
        return 1.0 / self.step_s / (1.0 + PRICE * self.lag)


def replay(own_s: Sequence[Sequence[float]], travel_s: float, bound: int) -> Prospect:
    """Return what a bound makes of measured step times."""
    workers, window = len(own_s), len(own_s[0])
    steps = window * REPEATED
    ends = [0.0] * workers
    arrived: list[list[float]] = [[] for _ in range(workers)]
    """By worker: when the updates of each of its steps are everywhere; a link carries one step after the other."""
    lags = []
    for step in range(steps):
        needed = step - 1 - bound
        free_s = 0.0 if needed < 0 else max(moments[needed] for moments in arrived)
        starts = [max(free_s, end) for end in ends]
        if step >= steps - window:
            lags.append(_mean_lag(arrived, starts, step))
        ends = [start + own_s[worker][step % window] for worker, start in enumerate(starts)]
        for moments, end in zip(arrived, ends, strict=True):
            moments.append(max(end, moments[-1] if moments else 0.0) + travel_s)
    # Until the last worker is done: a worker that is always slow holds up all others with any bound.
    return Prospect(bound, max(moments[-1] for moments in arrived) / steps, fmean(lags))


def _mean_lag(arrived: Sequence[Sequence[float]], starts: Sequence[float], step: int) -> float:
    """Return how many finished steps of another worker are missing when a worker begins a step, on average."""
    missing = [
        max(0, step - bisect_right(moments, start))
        for worker, start in enumerate(starts)
        for other, moments in enumerate(arrived)
        if other != worker
    ]
    return fmean(missing) if missing else 0.0


def choose_bound(own_s: Sequence[Sequence[float]], travel_s: float) -> list[Prospect]:
    """Return what each bound promises, the chosen one first: the smallest that is nearly as good as the best."""
    prospects = [replay(own_s, travel_s, bound) for bound in BOUNDS]
    best = max(prospect.worth for prospect in prospects)
    chosen = next(prospect for prospect in prospects if prospect.worth * WORTHWHILE >= best)
    return [chosen, *(prospect for prospect in prospects if prospect is not chosen)]


def step_towards(bound: int, wanted: int) -> int:
    """Return the bound to use next: one place further, so that a strange window changes little."""
    place, goal = BOUNDS.index(bound), BOUNDS.index(wanted)
    return BOUNDS[place + (goal > place) - (goal < place)]
