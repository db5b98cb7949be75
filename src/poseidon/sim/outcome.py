"""The result of a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

from poseidon.planning.planner import Plan


@dataclass(frozen=True)
class Span:
    """A busy interval on one machine, for the timeline."""

    place: str
    """``device``, ``out`` or ``in``."""
    name: str
    start_s: float
    end_s: float
    step: int = -1
    route: str = ""


@dataclass(frozen=True)
class Outcome:
    """A steady-state step, and where its time goes."""

    step_s: float
    """Time from one step's end to the next, in steady state."""
    compute_s: float
    """Step time of one worker alone."""
    busy_s: float
    """Time per step that a card's busier direction is in use, on the busiest machine."""
    sent_bytes: float
    """Bytes per step sent by the machine that sends most."""
    machines: int
    workers: int
    batch: int
    plan: Plan
    spans: tuple[Span, ...] = field(default=(), repr=False)
    """One machine's timeline, if requested."""
    waits: tuple[float, ...] = ()
    """Share of its time each worker spent waiting, with relaxed consistency."""

    events: int = 0
    """Number of simulated events."""

    @property
    def speedup(self) -> float:
        """Throughput relative to one worker alone."""
        return self.workers * self.compute_s / self.step_s

    @property
    def samples_per_s(self) -> float:
        """Throughput of the whole cluster."""
        return self.workers * self.batch / self.step_s

    @property
    def exposed_s(self) -> float:
        """Step time beyond computation."""
        return max(0.0, self.step_s - self.compute_s)

    @property
    def wait_share(self) -> float:
        """Share of its time the average worker spends waiting."""
        return fmean(self.waits) if self.waits else self.exposed_s / self.step_s
