"""What a simulation found."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

from poseidon.planning.planner import Plan


@dataclass(frozen=True)
class Span:
    """Something that took time on one machine, for the timeline."""

    place: str
    """``device``, ``out`` or ``in``."""
    name: str
    start_s: float
    end_s: float
    step: int = -1
    route: str = ""


@dataclass(frozen=True)
class Outcome:
    """A step in the long run, and where its time goes."""

    step_s: float
    """From one step's end to the next, once every step is like the one before."""
    compute_s: float
    """What one worker alone would take."""
    busy_s: float
    """Time a card's busier direction is at work, per step, on the machine where it is longest."""
    sent_bytes: float
    """What a machine's card sends per step, on the machine that sends most."""
    machines: int
    workers: int
    batch: int
    plan: Plan
    spans: tuple[Span, ...] = field(default=(), repr=False)
    """One machine's timeline, where it was asked for."""
    waits: tuple[float, ...] = ()
    """Share of its time that each worker waited, with relaxed consistency."""

    events: int = 0
    """How much had to be simulated."""

    @property
    def speedup(self) -> float:
        """How many workers' worth of work is done; a worker alone is 1."""
        return self.workers * self.compute_s / self.step_s

    @property
    def samples_per_s(self) -> float:
        """What the whole cluster trains."""
        return self.workers * self.batch / self.step_s

    @property
    def exposed_s(self) -> float:
        """What the step takes beyond computing."""
        return max(0.0, self.step_s - self.compute_s)

    @property
    def wait_share(self) -> float:
        """Share of its time that an average worker waits."""
        return fmean(self.waits) if self.waits else self.exposed_s / self.step_s
