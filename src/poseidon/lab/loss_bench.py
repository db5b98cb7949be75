"""The benchmark by time to a loss: how long until each system's network is as good as that of the reference.

Systems in lockstep are measured in two parts, because one machine cannot compute for several in real time. What a step
does to the loss does not depend on how long it takes: the *curve* comes from training all workers for real, through
the system itself, on links without limits. How long a step takes does not depend on the values it computes: the
*tempo* comes from some steps on shaped links, with paced compute. Workers that drift apart, and systems whose first
steps take another time than the later ones, are trained on the clock.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from poseidon import files
from poseidon.errors import ConfigError
from poseidon.lab.bench_jobs import RankOutput, run_workers, write_measurements
from poseidon.lab.job import JobResult
from poseidon.lab.loss_results import (
    REFERENCE,
    Comparison,
    LossRun,
    Mark,
    Tempo,
    comparison_from_json,
    comparison_to_json,
    merge_runs,
    reach,
)
from poseidon.lab.loss_worker import LossCell, LossWorkerSettings
from poseidon.lab.results import LINEAR
from poseidon.lab.spec import UNSHAPED, LabSpec
from poseidon.lab.system_names import traits_of
from poseidon.zoo.lessons import make_lesson

STARTING_S = 120.0
"""Most seconds for a job's processes to start."""


@dataclass(frozen=True)
class LossSettings:
    """What to compare and how."""

    lesson: str
    systems: tuple[str, ...]
    seeds: tuple[int, ...]
    machines: int
    rate_bits: int
    steps: int
    """Steps of exact systems."""
    more: float
    """Most steps of the others, as a multiple: they may need more, and take less time for each. A curve ends once it
    has reached the target, but not before the steps of exact systems."""
    batch: int
    every: int
    tolerance: float
    target: float | None = None
    paced_ms: tuple[float, float] | None = None
    stalls: tuple[float, float] | None = None
    dilation: float = 1.0
    """Links and paced compute are so many times slower than said, and measured times are divided by it: a machine that
    emulates several has then that much more time to do their real work."""
    is_real: bool = False
    """Train every system on the clock."""
    tiny: bool = False
    threads: int = 1
    device: str = "cpu"
    cell_timeout_s: float = 900.0

    def steps_of(self, system: str) -> int:
        """Return how many steps a system trains."""
        return self.steps if traits_of(system).is_exact else round(self.steps * self.more)

    def is_timed(self, system: str) -> bool:
        """Return whether a system is trained on the clock."""
        traits = traits_of(system)
        return self.is_real or traits.is_drifting or traits.warms_up

    @property
    def dilated_ms(self) -> tuple[float, float] | None:
        """Time of forward and backward as they really take."""
        if self.paced_ms is None:
            return None
        return self.paced_ms[0] * self.dilation, self.paced_ms[1] * self.dilation

    def cells(self, purpose: str) -> list[LossCell]:
        """Return all cells of a purpose."""
        if purpose == "tempos":
            others = [system for system in self.systems if not self.is_timed(system)]
            return [LossCell(system, 0, 0) for system in (LINEAR, *others)]
        return [
            LossCell(system, seed, self.steps_of(system), self.steps)
            for seed in self.seeds
            for system in self.systems
            if self.is_timed(system) == (purpose == "timed")
        ]

    def blank(self) -> Comparison:
        """Return the comparison before anything is measured."""
        if self.device == "cuda":
            compute = "one GPU, shared by all machines"
        elif self.paced_ms is None:
            compute = f"this machine's processor, shared by {self.machines} machines"
        else:
            compute = f"paced, as on a device that takes {sum(self.paced_ms):g} ms for forward and backward"
        if self.dilation != 1:
            compute += f", with everything {self.dilation:g} times slower and times divided by that"
        if self.stalls is not None:
            compute += f"; with probability {self.stalls[0]:g} a worker stalls for {self.stalls[1]:g} steps' time"
        stalled = 1.0 if self.stalls is None else 1 + self.stalls[0] * self.stalls[1]
        lesson = make_lesson(self.lesson, tiny=self.tiny)
        return Comparison(
            lesson=self.lesson,
            source=lesson.source,
            parameters=sum(parameter.numel() for parameter in lesson.network.model.parameters()),
            machines=self.machines,
            rate_bits=self.rate_bits,
            batch=self.batch,
            compute=compute,
            paced_ms=None if self.paced_ms is None else sum(self.paced_ms) * stalled,
            tolerance=self.tolerance,
            target=self.target,
        )


def run_loss_bench(
    settings: LossSettings, known: Comparison, say: Callable[[str], None], save: Callable[[Comparison], None]
) -> Comparison:
    """Measure what is not in ``known`` yet; ``save`` is called after each cell, so that no measurement is lost."""
    progress = LossEvents(settings, known, say, save)
    for purpose in ("tempos", "curves", "timed"):
        progress.purpose = purpose
        while cells := progress.missing():
            say(f"{purpose}: {len(cells)} to measure")
            result = _run_job(settings, progress, purpose, cells)
            if result.status:
                progress.blame(cells, result.reason)
    return progress.ordered()


def _run_job(settings: LossSettings, progress: LossEvents, purpose: str, cells: list[LossCell]) -> JobResult:
    worker = LossWorkerSettings(
        purpose=purpose,
        lesson=settings.lesson,
        cells=tuple(cells),
        batch=settings.batch,
        every=settings.every,
        paced_ms=settings.dilated_ms,
        stalls=settings.stalls,
        tolerance=settings.tolerance,
        targets=progress.targets(),
        tiny=settings.tiny,
        threads=settings.threads,
        device=settings.device,
        limit_s=settings.cell_timeout_s * 0.8,
        timeout_s=min(120.0, settings.cell_timeout_s),
    )
    rate = UNSHAPED if purpose == "curves" else round(settings.rate_bits / settings.dilation)
    limit_s = STARTING_S + settings.cell_timeout_s * len(cells)
    spec = LabSpec((rate,) * settings.machines)
    return run_workers("poseidon.lab.loss_worker", asdict(worker), spec, limit_s, progress.output.hear)


class LossEvents:
    """Collects the ranks' messages into a comparison, and passes progress on."""

    def __init__(
        self,
        settings: LossSettings,
        known: Comparison,
        say: Callable[[str], None],
        save: Callable[[Comparison], None],
    ) -> None:
        self.purpose = ""
        self.output = RankOutput(
            {
                "begin": self._on_begin,
                "tempo": self._on_tempo,
                "run": self._on_run,
                "failure": self._on_failure,
            }
        )
        self._settings = settings
        # What failed before is tried again.
        self._found = replace(
            known,
            tempos={name: tempo for name, tempo in known.tempos.items() if not tempo.failure},
            runs=tuple(run for run in known.runs if not run.failure),
        )
        self._say = say
        self._save = save
        self._current: LossCell | None = None
        self._measured: set[tuple[str, int]] = set()
        """Now, and not by an earlier comparison."""

    def missing(self) -> list[LossCell]:
        """Return the cells of the present purpose that have neither succeeded nor failed."""
        if self.purpose == "tempos":
            return [cell for cell in self._settings.cells("tempos") if cell.system not in self._found.tempos]
        done = {(run.system, run.seed) for run in self._found.runs if not self._ended_for_another_target(run)}
        return [cell for cell in self._settings.cells(self.purpose) if (cell.system, cell.seed) not in done]

    def _ended_for_another_target(self, run: LossRun) -> bool:
        """Return whether a curve ended where it reached the target of an earlier comparison, and not the present one.

        Training on the clock ends early for want of time only.
        """
        target = self._found.target_of(run.seed)
        if (run.system, run.seed) in self._measured or target is None or run.is_timed or not run.marks:
            return False
        return run.marks[-1].step < self._settings.steps_of(run.system) and reach(run.marks, target) is None

    def targets(self) -> tuple[tuple[int, float], ...]:
        """Return the target of each seed that has one."""
        pairs = [(seed, self._found.target_of(seed)) for seed in self._settings.seeds]
        return tuple((seed, target) for seed, target in pairs if target is not None)

    def ordered(self) -> Comparison:
        """Return what was found: systems in the order of the settings, then those that the file had besides."""
        systems = list(dict.fromkeys((*self._settings.systems, *self._found.systems)))
        return replace(
            self._found, runs=tuple(sorted(self._found.runs, key=lambda run: (systems.index(run.system), run.seed)))
        )

    def blame(self, cells: list[LossCell], reason: str) -> None:
        """Note that the job died, in the cell that was being measured; before the first one, all failed."""
        self.output.tell_failure(reason, self._say)
        for cell in cells if self._current is None else [self._current]:
            self._on_failure(cell.system, cell.seed, reason)
        self._current = None

    def _on_begin(self, system: str, seed: int) -> None:
        self._current = LossCell(system, seed, 0)

    def _on_tempo(self, system: str, step_ms: float, sent_bytes: float, note: str) -> None:
        step_ms /= self._settings.dilation
        self._add_tempo(system, Tempo(step_ms, sent_bytes, note))
        self._say(f"  {system:<26}{step_ms:10.1f} ms/step, {sent_bytes / 1e6:.2f} MB/step")

    def _on_run(self, system: str, seed: int, note: str, marks: list[Any]) -> None:
        is_timed = self.purpose == "timed"
        slow = self._settings.dilation
        read = [
            Mark(int(step), loss, seconds / slow if is_timed else None, sent if is_timed else None)
            for step, loss, seconds, sent in marks
        ]
        self._add_run(LossRun(system, seed, tuple(read), note=note))
        took = f" in {marks[-1][2]:.1f} s" if marks else ""
        last = f"loss {read[-1].loss:.4f} after {read[-1].step} steps{took}" if read else "no evaluation in time"
        self._say(f"  {system:<26} seed {seed}: {last}")

    def _on_failure(self, system: str, seed: int, failure: str) -> None:
        self._say(f"  {system:<26} seed {seed} failed: {failure}")
        if self.purpose == "tempos":
            self._add_tempo(system, Tempo(failure=failure))
        else:
            self._add_run(LossRun(system, seed, failure=failure))

    def _add_tempo(self, system: str, tempo: Tempo) -> None:
        self._found = replace(self._found, tempos={**self._found.tempos, system: tempo})
        self._save(self.ordered())

    def _add_run(self, run: LossRun) -> None:
        self._measured.add((run.system, run.seed))
        self._found = replace(self._found, runs=merge_runs(self._found.runs, run))
        self._save(self.ordered())


def write_losses(path: Path, settings: LossSettings, comparison: Comparison) -> None:
    """Write all measurements, with everything needed to repeat them."""
    write_measurements(path, asdict(settings), {"to_loss": comparison_to_json(comparison)})


def read_losses(path: Path) -> tuple[dict[str, Any], Comparison]:
    """Return the settings and measurements in a file."""
    data = files.read_json(path, "results")
    try:
        return data["settings"], comparison_from_json(data["to_loss"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a file of times to a loss ({type(error).__name__}: {error}); give another --output"
        ) from None


def resume(path: Path, settings: LossSettings) -> Comparison:
    """Return what a file holds already of these settings; more systems and seeds may be added to it."""
    blank = settings.blank()
    if not path.exists():
        return blank
    stored, found = read_losses(path)
    open_ended = {"systems", "seeds", "cell_timeout_s", "target", "tolerance"}
    asked = json.loads(json.dumps(asdict(settings)))
    differing = sorted(name for name in asked if name not in open_ended and asked[name] != stored.get(name))
    if differing:
        values = ", ".join(f"{name} {stored.get(name)} there, {asked[name]} here" for name in differing)
        raise ConfigError(f"{path} holds results of other settings ({values}); give another --output, or remove it")
    if found.source != blank.source:
        raise ConfigError(
            f"{path} holds results of other data ({found.source}, not {blank.source}); give another --output"
        )
    return replace(found, target=settings.target, tolerance=settings.tolerance)


def check_losses(settings: LossSettings) -> None:
    """Refuse settings that cannot give a comparison."""
    if settings.target is None and REFERENCE not in settings.systems:
        raise ConfigError(f"without --target the target is {REFERENCE}'s final loss: add {REFERENCE} to --against")
    if settings.stalls is not None and settings.paced_ms is None:
        raise ConfigError("--stalls are multiples of a paced step: give --paced FORWARD_MS:BACKWARD_MS")
    if not settings.dilation >= 1 or (settings.dilation != 1 and settings.paced_ms is None):
        raise ConfigError(f"--dilate {settings.dilation:g}: at least 1, and only paced compute can be made slower")
    for name in ("steps", "every", "batch", "threads"):
        if getattr(settings, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, not {getattr(settings, name)}")
    if settings.every > settings.steps:
        raise ConfigError(f"--every {settings.every} is more than the {settings.steps} steps: there would be no curve")
    if not settings.seeds:
        raise ConfigError("--seeds: at least 1, or there is nothing to train")
    if settings.target is not None and not math.isfinite(settings.target):
        raise ConfigError(f"--target {settings.target:g}: expected the loss to reach, a finite number")
    if not 0 <= settings.tolerance < math.inf:
        raise ConfigError(
            f"--tolerance {settings.tolerance * 100:g}: expected percent above {REFERENCE}'s final loss, at least 0; "
            "to ask for a loss that is lower, give --target"
        )
    if not 1 <= settings.more < math.inf:
        raise ConfigError(f"--more {settings.more}: systems that are not exact get at least the steps of the others")
