"""Where a worker's time goes: phases of its steps and waits for others, added up as they happen. Pure.

The training thread marks and adds, a few assignments each; another thread looks (:meth:`StepClock.look`). Sums only
grow, so whoever looks subtracts what it saw before, and neither waits for the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

STARTING, FORWARD, BACKWARD, ENDING, BETWEEN = range(5)
"""Phases of a step: before the first one; forward; backward; the end of backward; and until the next forward, in which
the means land, the optimizer steps and the next batch is made."""


@dataclass(frozen=True)
class ClockSums:
    """Everything a clock has counted up to one moment."""

    at_s: float
    step: int
    phase: int
    since_s: float
    """When that phase began."""
    steps: int
    samples: int
    phases_s: tuple[float, ...]
    """By phase, waits included."""
    waited_s: tuple[float, ...]
    """By phase: the part of it that went by waiting for others."""
    waits_s: Mapping[str, float]
    """By what was waited for."""
    waits_for: str = ""
    """What it waits for at this moment; empty: nothing."""


@dataclass(frozen=True)
class Spent:
    """What happened between two looks."""

    span_s: float
    steps: int
    samples: int
    phases_s: tuple[float, ...]
    """By phase, without waits."""
    wait_s: float
    waits_s: Mapping[str, float] = field(default_factory=dict)


MOST_SPANS = 20_000
"""A trace that has so many ends with the step it is in: it must fit into memory, and into Perfetto."""


class StepClock:
    """The sums of one worker. The training thread writes; any thread may look."""

    def __init__(self, now: float) -> None:
        self.step = 0
        self.phase = STARTING
        self.since = now
        self.marks = 0
        self.steps = 0
        self.samples = 0
        self.phases_s = [0.0] * 5
        self.waited_s = [0.0] * 5
        self.waits_s: dict[str, float] = {}
        self.waiting: tuple[str, float] | None = None
        """The wait under way: what for, since when."""
        self.settle: Callable[[], None] | None = None
        """Called before a wait: completes what the worker's own device has still to do, which is no wait for others."""
        self.spans: list[tuple[str, str, float, float]] | None = None
        """Of a step that is recorded in full: kind, name, begin and end; None while none is."""
        self.spans_step = 0
        """The first step in it."""
        self.recorded: tuple[int, list[tuple[str, str, float, float]]] | None = None
        """The last step that was recorded in full, and its spans, to which a late landing may still add."""
        self.every = 0
        """Record every so many steps in full, the same on all workers; 0: none."""
        self.traced = range(0)
        """Record all of these in full."""

    def mark(self, phase: int, step: int, now: float, samples: int = 0) -> None:
        """Note that a phase begins."""
        before, since = self.phase, self.since
        self.phases_s[before] += now - since
        if self.spans is not None:
            self.spans.append(("phase", str(before), since, now))
        if phase == FORWARD and (self.every or self.traced):
            self._follow_spans(step)
        self.phase, self.since, self.step = phase, now, step
        if phase == BETWEEN:
            self.steps += 1
        self.samples += samples
        self.marks += 1

    def _follow_spans(self, step: int) -> None:
        """Begin or end a record in full as a step begins."""
        if self.spans is not None and len(self.spans) >= MOST_SPANS and step in self.traced:
            self.traced = range(self.traced.start, step)
        is_wanted = step in self.traced or bool(self.every and step % self.every == 0 and not self.traced)
        if self.spans is not None and not (is_wanted and step in self.traced):
            self.recorded, self.spans = (self.spans_step, self.spans), None
        if is_wanted and self.spans is None:
            self.spans_step, self.spans = step, []

    def begin_wait(self, what: str) -> float:
        """Note that a wait for others begins, and return when; nothing (0) on a thread of Poseidon's own."""
        if threading.current_thread().name.startswith("poseidon-"):
            return 0.0
        if self.settle is not None:
            self.settle()
        now = time.monotonic()
        self.waiting = (what, now)
        return now

    def end_wait(self, what: str, since: float) -> None:
        """Note that the wait that began then is over."""
        if since:
            self.waited(what, since, time.monotonic())

    def waited(self, what: str, since: float, now: float) -> None:
        """Note that a wait for others is over."""
        self.waited_s[self.phase] += now - since
        # Names are those of units and buckets; a caller with ever new ones must not fill the memory.
        if what in self.waits_s or len(self.waits_s) < 1000:
            self.waits_s[what] = self.waits_s.get(what, 0.0) + now - since
        if self.spans is not None:
            self.spans.append(("wait", what, since, now))
        self.waiting = None
        self.marks += 1

    def look(self, now: float) -> ClockSums:
        """Return the sums, what is under way included."""
        for _ in range(4):
            marks = self.marks
            phase, since, waiting = self.phase, self.since, self.waiting
            phases_s, waited_s, waits_s = list(self.phases_s), list(self.waited_s), self.waits_s.copy()
            step, steps, samples = self.step, self.steps, self.samples
            if marks == self.marks:
                break
        phases_s[phase] += max(0.0, now - since)
        if waiting is not None:
            what, began = waiting
            waited_s[phase] += max(0.0, now - began)
            waits_s[what] = waits_s.get(what, 0.0) + max(0.0, now - began)
        waits_for = "" if waiting is None else waiting[0]
        return ClockSums(now, step, phase, since, steps, samples, tuple(phases_s), tuple(waited_s), waits_s, waits_for)


def between(earlier: ClockSums, later: ClockSums) -> Spent:
    """Return what happened between two looks."""
    phases = [
        max(0.0, (b - a) - (after - before))
        for a, b, before, after in zip(earlier.phases_s, later.phases_s, earlier.waited_s, later.waited_s, strict=True)
    ]
    waits = {
        what: seconds - earlier.waits_s.get(what, 0.0)
        for what, seconds in later.waits_s.items()
        if seconds - earlier.waits_s.get(what, 0.0) > 0.0
    }
    return Spent(
        later.at_s - earlier.at_s,
        later.steps - earlier.steps,
        later.samples - earlier.samples,
        tuple(phases),
        max(0.0, sum(later.waited_s) - sum(earlier.waited_s)),
        waits,
    )
