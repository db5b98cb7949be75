"""Many simulations: every system at every machine count, link speed and batch size."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from poseidon.planning.cluster import format_rate
from poseidon.planning.table import format_bytes, format_table
from poseidon.sim.outcome import Outcome
from poseidon.sim.relaxed import simulate_relaxed
from poseidon.sim.setting import Setting
from poseidon.sim.steps import simulate
from poseidon.sim.systems import System

_HEADER = ("machines", "rate", "batch", "system", "ms/step", "speedup", "samples/s", "sent/step", "waits")


@dataclass(frozen=True)
class Axes:
    """What is varied."""

    machines: Sequence[int]
    rates_bits: Sequence[float]
    batches: Sequence[int]
    systems: Sequence[System]


@dataclass(frozen=True)
class Point:
    """One simulation of a sweep."""

    machines: int
    rate_bits: float
    batch: int
    system: str
    outcome: Outcome

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        outcome = self.outcome
        return {
            "machines": self.machines,
            "rate_bits": self.rate_bits,
            "batch": self.batch,
            "system": self.system,
            "step_ms": outcome.step_s * 1e3,
            "compute_ms": outcome.compute_s * 1e3,
            "wire_busy_ms": outcome.busy_s * 1e3,
            "speedup": outcome.speedup,
            "samples_per_s": outcome.samples_per_s,
            "sent_bytes": outcome.sent_bytes,
            "wait_share": outcome.wait_share,
            "routes": outcome.plan.routes if self.system.startswith(("poseidon", "distribute")) else {},
        }


def sweep(base: Setting, axes: Axes, bound: int | None = 0) -> list[Point]:
    """Simulate every combination; workers may be ``bound`` clocks apart (None: any number)."""
    points = []
    for batch, rate, machines, system in itertools.product(axes.batches, axes.rates_bits, axes.machines, axes.systems):
        cluster = replace(base.cluster, machines=machines)
        setting = replace(
            base, profile=base.profile.with_batch(batch), cluster=cluster, system=system,
        ).with_rate(rate)  # fmt: skip
        is_relaxed = bound != 0 and system.has_server and machines > 1
        outcome = simulate_relaxed(setting, bound) if is_relaxed else simulate(setting)
        points.append(Point(machines, rate, batch, system.name, outcome))
    return points


def format_points(points: Sequence[Point]) -> str:
    """Return the sweep as a table for the screen."""
    rows = [
        (
            str(point.machines),
            format_rate(point.rate_bits),
            str(point.batch),
            point.system,
            f"{point.outcome.step_s * 1e3:.1f}",
            f"{point.outcome.speedup:.2f}",
            f"{point.outcome.samples_per_s:.4g}",
            format_bytes(point.outcome.sent_bytes),
            f"{point.outcome.wait_share:.0%}",
        )
        for point in points
    ]
    return format_table(_HEADER, rows)
