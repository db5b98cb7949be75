"""Time to a loss, as pure data: curves, when a system reached the target, and the table.

A run is one system with one seed. Its losses come from real training; its seconds either from the same training, done
on the clock, or from the same system's measured time per step (its :class:`Tempo`) times the number of steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, median, stdev
from typing import Any

from poseidon.lab.spec import format_rate

REFERENCE = "ddp"
"""The system whose final loss is the target, unless one is given."""
SMOOTHED = 3
"""A loss counts as the mean of so many evaluations, the latest among them, so that one lucky batch decides nothing."""
BUSY = 1.25
"""A paced step without exchange that takes longer by this factor says that the machine could not keep the pace."""


@dataclass(frozen=True)
class Mark:
    """How far a run is at one evaluation."""

    step: int
    loss: float
    """Over the validation data, mean over the workers' replicas."""
    seconds: float | None = None
    """Of training since its beginning; None where it was not done on the clock."""
    sent_bytes: float | None = None
    """That a machine sent since then."""


@dataclass(frozen=True)
class Tempo:
    """A system's step on the emulated cluster."""

    step_ms: float = 0.0
    sent_bytes: float = 0.0
    note: str = ""
    failure: str = ""


@dataclass(frozen=True)
class LossRun:
    """One system with one seed."""

    system: str
    seed: int
    marks: tuple[Mark, ...] = ()
    failure: str = ""
    note: str = ""

    @property
    def is_timed(self) -> bool:
        """Whether training itself was on the clock."""
        return bool(self.marks) and self.marks[0].seconds is not None

    @property
    def final_loss(self) -> float:
        """Loss at the end, smoothed."""
        return smooth(self.marks)[-1].loss


@dataclass(frozen=True)
class Comparison:
    """All runs of one lesson on one cluster."""

    lesson: str
    source: str
    parameters: int
    machines: int
    rate_bits: int
    batch: int
    """Samples per worker and step."""
    compute: str
    """Who computes, in words; how long a step without exchange really took is the tempo of ``linear``."""
    paced_ms: float | None
    """Time of a paced forward and backward, with stalls as they come on average; None where compute is not paced."""
    tolerance: float
    """How far above the reference's final loss the target is, as a fraction."""
    target: float | None = None
    """A given target; None: the reference's final loss, seed by seed."""
    tempos: Mapping[str, Tempo] = field(default_factory=dict)
    runs: tuple[LossRun, ...] = ()

    @property
    def systems(self) -> list[str]:
        """Every system with a run, in order."""
        return list(dict.fromkeys(run.system for run in self.runs))

    def runs_of(self, system: str) -> list[LossRun]:
        """Return a system's runs that have a curve on the clock."""
        return [run for run in (self.timed(run) for run in self.runs if run.system == system) if run.marks]

    def timed(self, run: LossRun) -> LossRun:
        """Return the run with seconds and bytes at every mark; without marks where its tempo is unknown."""
        if run.is_timed or not run.marks:
            return run
        tempo = self.tempos.get(run.system)
        if tempo is None or tempo.failure:
            return replace(run, marks=(), failure=tempo.failure if tempo else "its time per step was not measured")
        marks = [
            replace(mark, seconds=mark.step * tempo.step_ms / 1e3, sent_bytes=mark.step * tempo.sent_bytes)
            for mark in run.marks
        ]
        return replace(run, marks=tuple(marks))

    def target_of(self, seed: int) -> float | None:
        """Return the loss to reach with a seed; None before the reference has run."""
        if self.target is not None:
            return self.target
        for run in self.runs:
            if run.system == REFERENCE and run.seed == seed and run.marks:
                return run.final_loss * (1 + self.tolerance)
        return None


@dataclass(frozen=True)
class Outline:
    """A row of the table: one system over its seeds."""

    system: str
    seeds: int
    reached: int
    """Seeds that reached the target."""
    steps: float | None
    sent_bytes: float | None
    seconds: float | None
    """Median over those seeds, as are steps and bytes; None if there are none."""
    spread_s: tuple[float, float] | None
    final_loss: float
    """Mean over all seeds."""
    final_spread: float
    total_s: float
    """Median time of whole runs."""
    speedups: tuple[float, ...]
    """Over the reference with the same seed, where both reached the target."""
    way: str
    """``timed``: trained on the clock; ``steps``: curve by steps, times a measured step."""
    failure: str = ""

    @property
    def speedup(self) -> float | None:
        """Median over seeds."""
        return median(self.speedups) if self.speedups else None


def smooth(marks: Sequence[Mark]) -> list[Mark]:
    """Return the marks with each loss the mean of the last :data:`SMOOTHED`."""
    losses = [mark.loss for mark in marks]
    return [
        replace(mark, loss=fmean(losses[max(0, place + 1 - SMOOTHED) : place + 1])) for place, mark in enumerate(marks)
    ]


def reach(marks: Sequence[Mark], target: float) -> Mark | None:
    """Return the first mark at which the smoothed loss is at most the target; None if there is none."""
    return next((mark for mark in smooth(marks) if mark.loss <= target), None)


def outline(comparison: Comparison, system: str) -> Outline:
    """Return a system's row."""
    runs = comparison.runs_of(system)
    if not runs:
        failures = [comparison.timed(run).failure for run in comparison.runs if run.system == system]
        return Outline(system, 0, 0, None, None, None, None, 0.0, 0.0, 0.0, (), "", failures[0] if failures else "")
    reached = {run.seed: mark for run in runs if (mark := _reached(comparison, run)) is not None}
    reference = {
        run.seed: mark for run in comparison.runs_of(REFERENCE) if (mark := _reached(comparison, run)) is not None
    }
    seconds = [mark.seconds or 0.0 for mark in reached.values()]
    finals = [run.final_loss for run in runs]
    return Outline(
        system=system,
        seeds=len(runs),
        reached=len(reached),
        steps=median(mark.step for mark in reached.values()) if reached else None,
        sent_bytes=median(mark.sent_bytes or 0.0 for mark in reached.values()) if reached else None,
        seconds=median(seconds) if reached else None,
        spread_s=(min(seconds), max(seconds)) if reached else None,
        final_loss=fmean(finals),
        final_spread=stdev(finals) if len(finals) > 1 else 0.0,
        total_s=median(run.marks[-1].seconds or 0.0 for run in runs),
        speedups=tuple(
            (reference[seed].seconds or 0.0) / mark.seconds
            for seed, mark in reached.items()
            if seed in reference and mark.seconds
        ),
        way="timed" if any(run.is_timed for run in comparison.runs if run.system == system) else "steps",
    )


def _reached(comparison: Comparison, run: LossRun) -> Mark | None:
    target = comparison.target_of(run.seed)
    return None if target is None else reach(run.marks, target)


def format_comparison(comparison: Comparison) -> str:
    """Return the table as lines for the screen."""
    lines = [
        f"{comparison.lesson}: {comparison.parameters / 1e6:.2f}M parameters, batch {comparison.batch} per worker, "
        f"{comparison.machines} machines at {format_rate(comparison.rate_bits)}",
        f"  data: {comparison.source}",
        f"  compute: {comparison.compute}{_describe_linear(comparison)}",
        f"  target: {_describe_target(comparison)}",
        f"  {'system':<26}{'steps':>7}{'sent MB':>10}{'seconds':>10}{'min .. max':>18}{'final loss':>18}"
        f"{'total s':>9}{'speedup':>9}  way",
        *(_format_outline(outline(comparison, system)) for system in comparison.systems),
        "  way: timed = trained on the clock of the emulated cluster; steps = trained apart, each step counted as long "
        "as the emulated cluster takes for one",
    ]
    return "\n".join(lines)


def _describe_linear(comparison: Comparison) -> str:
    linear = comparison.tempos.get("linear")
    if linear is None or linear.failure:
        return ""
    text = f", {linear.step_ms:.0f} ms for a step without exchange"
    if comparison.paced_ms is not None and linear.step_ms > BUSY * comparison.paced_ms:
        text += ": MORE than paced, so this machine was too busy or too slow, and all its times are too long"
    return text


def _describe_target(comparison: Comparison) -> str:
    if comparison.target is not None:
        return f"validation loss {comparison.target:g}"
    targets = [comparison.target_of(seed) for seed in dict.fromkeys(run.seed for run in comparison.runs)]
    known = [target for target in targets if target is not None]
    if not known:
        return f"{REFERENCE}'s final validation loss, which is not known yet"
    values = ", ".join(f"{target:.4f}" for target in known)
    return f"{REFERENCE}'s final validation loss within {comparison.tolerance:.1%}: {values} by seed"


def _format_outline(row: Outline) -> str:
    if not row.seeds:
        return f"  {row.system:<26}{'-':>7}  failed: {row.failure}"
    final = f"{row.final_loss:.4f} +- {row.final_spread:.4f}"
    if row.seconds is None or row.spread_s is None or row.steps is None or row.sent_bytes is None:
        middle = f"{'-':>7}{'-':>10}{'target not reached':>28}"
    else:
        low, high = row.spread_s
        middle = f"{row.steps:>7.0f}{row.sent_bytes / 1e6:>10.1f}{row.seconds:>10.1f}{f'{low:.1f} .. {high:.1f}':>18}"
    speedup = "-" if row.speedup is None else f"{row.speedup:.2f}x"
    some = f"; reached with {row.reached} of {row.seeds} seeds" if 0 < row.reached < row.seeds else ""
    return f"  {row.system:<26}{middle}{final:>18}{row.total_s:>9.1f}{speedup:>9}  {row.way}{some}"


def comparison_to_json(comparison: Comparison) -> dict[str, Any]:
    """Return plain data for a file: the measurements and, for readers, the table's figures."""
    plain = asdict(comparison)
    # A mark is a short list: thousands of lines less.
    for run, entry in zip(comparison.runs, plain["runs"], strict=True):
        entry["marks"] = [[mark.step, mark.loss, mark.seconds, mark.sent_bytes] for mark in run.marks]
    plain["table"] = [
        {**asdict(row), "speedup": row.speedup} for row in (outline(comparison, name) for name in comparison.systems)
    ]
    return plain


def comparison_from_json(data: Mapping[str, Any]) -> Comparison:
    """Return what :func:`comparison_to_json` wrote; the table is recomputed."""
    plain = {name: value for name, value in data.items() if name != "table"}
    plain["tempos"] = {name: Tempo(**tempo) for name, tempo in data["tempos"].items()}
    plain["runs"] = tuple(_run_from_json(run) for run in data["runs"])
    return Comparison(**plain)


def _run_from_json(data: Mapping[str, Any]) -> LossRun:
    return LossRun(**{**data, "marks": tuple(Mark(*mark) for mark in data["marks"])})


def merge_runs(old: Iterable[LossRun], new: LossRun) -> tuple[LossRun, ...]:
    """Return the runs with a new one in place of an earlier one of the same system and seed."""
    kept = [run for run in old if (run.system, run.seed) != (new.system, new.seed)]
    return (*kept, new)
