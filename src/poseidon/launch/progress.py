"""How far each worker is, from the engine's reports or from the worker's output. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from poseidon.launch.countdown import clock
from poseidon.team.watch import IS_WAITING, PHASES

_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf)"
_STEP = re.compile(r"\b(?:step|iter|iteration|batch)\b\s*[:=#]?\s*(\d+)", re.IGNORECASE)
_LOSS = re.compile(rf"\b(?:train[_ ]?)?loss\b\s*[:=]?\s*{_NUMBER}", re.IGNORECASE)
_RATE = re.compile(r"([\d,]+\.?\d*)\s*(?:samples|images|examples|imgs?|it)\s*/\s*s(?:ec)?\b", re.IGNORECASE)


def is_finite(value: object) -> TypeGuard[float]:
    """Return whether a value that a program reported is a number."""
    return isinstance(value, int | float) and math.isfinite(value)


@dataclass
class Standing:
    """The known state of one worker."""

    step: int | None = None
    doing: str = ""
    loss: float | None = None
    samples_per_s: float | None = None
    last_line: str = ""
    changed_at: float = 0.0
    """When it last showed any activity."""

    def read_line(self, line: str, now: float) -> None:
        """Update from a line that the worker printed; that it still waits for the others is not progress."""
        if IS_WAITING.search(line):
            return
        self.changed_at = now
        if not line.strip():
            return
        self.last_line = line.strip()
        if (found := _STEP.search(line)) and not self.doing:
            self.step = int(found[1])
        if found := _LOSS.search(line):
            self.loss = float(found[1])
        if found := _RATE.search(line):
            self.samples_per_s = float(found[1].replace(",", ""))

    def read_report(self, facts: Mapping[str, Any], now: float) -> None:
        """Update from a report of the engine or the script; a repeated report is not progress."""
        before = (self.step, self.doing, self.loss)
        # Any program may report, and one that reports words for numbers must not end the launcher.
        step, loss, rate = (facts.get(name) for name in ("step", "loss", "samples_per_s"))
        self.step = int(step) if is_finite(step) else self.step
        self.doing = str(facts.get("doing", self.doing))
        self.loss = float(loss) if isinstance(loss, int | float) else self.loss
        self.samples_per_s = float(rate) if is_finite(rate) else self.samples_per_s
        if (self.step, self.doing, self.loss) != before:
            self.changed_at = now

    @property
    def rank_of_progress(self) -> tuple[int, int]:
        """Sort key for workers, the one furthest behind first."""
        phase = PHASES.index(self.doing) if self.doing in PHASES else -1
        return (-1 if self.step is None else self.step), phase

    def describe(self, now: float) -> str:
        """Return the worker's state, in words."""
        parts = []
        if self.step is not None:
            parts.append(f"at step {self.step}" + (f", {self.doing}" if self.doing else ""))
        elif not self.last_line:
            parts.append("no output yet")
        if self.last_line:
            text = self.last_line if len(self.last_line) <= 60 else self.last_line[:57] + "..."
            parts.append(f"last line: {text!r}")
        quiet_s = now - self.changed_at
        if quiet_s > 5:
            parts.append(f"quiet for {quiet_s:.0f} s")
        return "; ".join(parts)


def status_line(
    standings: Sequence[Standing],
    ended: int,
    elapsed_s: float,
    observed: Sequence[str],
    width: int,
    is_observed: bool = False,
) -> str:
    """Return the status line: time, workers, step, speed, loss, and what the workers' records say if there are any."""
    parts = [clock(elapsed_s), f"{len(standings) - ended}/{len(standings)} workers"]
    steps = [standing.step for standing in standings if standing.step is not None]
    if steps:
        parts.append(f"step {max(steps)}")
    rates = [standing.samples_per_s for standing in standings if standing.samples_per_s is not None]
    if rates and not is_observed:
        parts.append(f"{sum(rates):,.0f} samples/s")
    loss = next((standing.loss for standing in standings if standing.loss is not None), None)
    if loss is not None:
        parts.append(f"loss {loss:.4g}")
    return " | ".join([*parts, *observed])[: max(0, width - 1)]


def furthest_behind(standings: Sequence[Standing], candidates: Sequence[int]) -> int:
    """Return the candidate furthest behind; with equal progress, the one quiet for longest."""
    return min(candidates, key=lambda rank: (*standings[rank].rank_of_progress, standings[rank].changed_at))
