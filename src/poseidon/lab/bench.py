"""The benchmark: every system on every model, cluster size and link speed, measured in labs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from poseidon.job import settings as job_settings
from poseidon.lab.bench_jobs import RankOutput, run_workers, write_measurements
from poseidon.lab.bench_worker import END, WorkerSettings
from poseidon.lab.job import TIMED_OUT, JobResult
from poseidon.lab.results import LINEAR, Cell, Measured, Repetition, cells_to_json
from poseidon.lab.spec import LabSpec, format_rate
from poseidon.planning.profile import Profile
from poseidon.sim.cells import Bench, predict_ms
from poseidon.sums.device import can_compact


@dataclass(frozen=True)
class BenchSettings:
    """What to measure and how."""

    models: tuple[str, ...]
    machines: tuple[int, ...]
    rates_bits: tuple[int, ...]
    worker: WorkerSettings
    """Shared by all cells; its model and batch are replaced in each."""
    batches: dict[str, int] = field(default_factory=dict)
    """Batch sizes of models that differ from the common one."""
    cell_timeout_s: float = 600.0

    def clusters(self) -> Iterator[tuple[LabSpec, tuple[WorkerSettings, ...]]]:
        """Yield each cluster with a worker's settings for every model, in the order of measurement."""
        workers = tuple(
            replace(self.worker, model=model, batch=self.batches.get(model, self.worker.batch)) for model in self.models
        )
        for rate in self.rates_bits:
            for machines in self.machines:
                yield LabSpec((rate,) * machines), workers


def run_bench(settings: BenchSettings, say: Callable[[str], None], save: Callable[[list[Cell]], None]) -> list[Cell]:
    """Measure every cell; ``save`` is called after each, so that no measurement is lost."""
    cells: list[Cell] = []

    def keep(cell: Cell) -> None:
        cells.append(cell)
        save(cells)

    for spec, workers in settings.clusters():
        _run_cluster(workers, spec, settings.cell_timeout_s, say, keep)
    return cells


def write_results(path: Path, settings: BenchSettings, cells: list[Cell]) -> None:
    """Write all measurements, with everything needed to repeat them."""
    write_measurements(path, asdict(settings), {"tries": tries_plans(), "cells": cells_to_json(cells)})


def tries_plans() -> bool:
    """Return whether Poseidon's systems try several plans and keep the fastest."""
    return job_settings.TRIALS.read() != "0"


def _run_cluster(
    workers: tuple[WorkerSettings, ...],
    spec: LabSpec,
    timeout_s: float,
    say: Callable[[str], None],
    keep: Callable[[Cell], None],
) -> None:
    """Measure all models in one job; what a job that dies has not measured is measured in another."""
    left = [CellEvents(worker, spec, say) for worker in workers]
    while left:
        job = JobEvents(left, keep)
        result = _run_workers(tuple(events.to_measure() for events in left), job, spec, timeout_s)
        left = left[job.done :]
        if result.status or left:
            reason = result.reason or "it ended before everything was measured"
            job.output.tell_failure(reason, say)
            if left and not left[0].goes_on_without(reason, is_late=result.status == TIMED_OUT):
                keep(left.pop(0).cell())


def _run_workers(workers: tuple[WorkerSettings, ...], job: JobEvents, spec: LabSpec, timeout_s: float) -> JobResult:
    settings = {"threads": workers[0].threads, "device": workers[0].device, "cells": [asdict(one) for one in workers]}
    return run_workers("poseidon.lab.bench_worker", settings, spec, timeout_s, job.output.hear)


class JobEvents:
    """Passes the ranks' messages to the cell that is being measured; ``keep`` gets each one that is finished."""

    def __init__(self, cells: Sequence[CellEvents], keep: Callable[[Cell], None]) -> None:
        self.done = 0
        """Cells in which everything was measured."""
        self.output = RankOutput(
            {
                "model": lambda **said: self.current.on_model(**said),
                "profile": lambda **said: self.current.on_profile(**said),
                "begin": lambda **said: self.current.on_begin(**said),
                "repetition": lambda **said: self.current.on_repetition(**said),
                "failure": lambda **said: self.current.on_failure(**said),
                END: self._on_end,
            }
        )
        self._cells = cells
        self._keep = keep
        self.current.announce()

    @property
    def current(self) -> CellEvents:
        """The cell being measured."""
        return self._cells[self.done]

    def _on_end(self) -> None:
        self._keep(self.current.cell())
        self.done += 1
        if self.done < len(self._cells):
            self.current.announce()


class CellEvents:
    """Collects the ranks' messages into a cell, and passes progress on."""

    def __init__(self, worker: WorkerSettings, spec: LabSpec, say: Callable[[str], None]) -> None:
        self._worker = worker
        self._system: str | None = None
        """The one being measured now, to blame if the job dies."""
        self._spec = spec
        self._say = say
        self._sizes = (0, 0)
        self._repetitions: dict[str, list[Repetition]] = {}
        self._failures: dict[str, str] = {}
        self._notes: dict[str, str] = {}
        self._profile: tuple[Profile, float] | None = None
        self._linear_is_late = False
        """Whether a job's time was up while the linear bound was measured again: it is not, another time."""

    def announce(self) -> None:
        """Say what is measured next."""
        self._say(f"{self._worker.model}: {self._spec.machines} machines at {format_rate(self._spec.rates_bits[0])}")

    def to_measure(self) -> WorkerSettings:
        """Return what to tell the ranks: systems that another job measured, or that took it down, are left out."""
        done = {*self._failures, *(system for system in self._repetitions if system != LINEAR or self._linear_is_late)}
        return replace(self._worker, systems=tuple(one for one in self._worker.systems if one not in done))

    def goes_on_without(self, reason: str, is_late: bool) -> bool:
        """Hear that the job died; return whether there is more to measure, in another job.

        The system that was being measured failed, unless it only came too late for another repetition.
        """
        blamed, self._system = self._system, None
        if blamed is None:
            unmeasured = [system for system in self.to_measure().systems if system not in self._repetitions]
            self._failures |= dict.fromkeys(unmeasured, reason)
        elif is_late and self._repetitions.get(blamed):
            self._linear_is_late |= blamed == LINEAR
        else:
            self._repetitions.pop(blamed, None)
            self._failures[blamed] = reason
        return bool(set(self.to_measure().systems) - {LINEAR})

    def cell(self) -> Cell:
        """Return the measurements."""
        measured = {
            system: Measured(
                tuple(self._repetitions.get(system, ())), self._failures.get(system, ""), self._notes.get(system, "")
            )
            for system in self._worker.systems
            if system in self._repetitions or system in self._failures
        }
        measured = {
            system: replace(one, predicted_ms=self._predict(system, measured)) for system, one in measured.items()
        }
        return Cell(
            model=self._worker.model,
            machines=self._spec.machines,
            rate_bits=self._spec.rates_bits[0],
            batch=self._worker.batch,
            parameters=self._sizes[0],
            parameter_bytes=self._sizes[1],
            systems=measured,
            profile=None if self._profile is None else self._profile[0],
            flops=0.0 if self._profile is None else self._profile[1],
        )

    def on_model(self, parameters: int, parameter_bytes: int) -> None:
        """Hear of the model's size."""
        self._sizes = (parameters, parameter_bytes)

    def on_profile(self, profile: dict[str, Any], flops: float) -> None:
        """Hear what its units compute, and of the device's matrix rate."""
        self._profile = (Profile.from_dict(profile), flops)

    def _predict(self, system: str, measured: dict[str, Measured]) -> float | None:
        """Return the simulator's prediction for a system, from the linear one's time and the units' shares of it.

        None where it knows no such step: of several batches.
        """
        linear = measured.get(LINEAR)
        if self._worker.accumulate > 1 or self._profile is None or linear is None or not linear.repetitions:
            return None
        profile, flops = self._profile
        bench = Bench(
            profile=profile,
            linear_s=linear.step_ms / 1e3,
            machines=self._spec.machines,
            rate_bits=self._spec.rates_bits[0],
            is_gpu=self._worker.device == "cuda",
            cores=len(os.sched_getaffinity(0)),
            flops=flops,
            compacts=self._worker.device == "cuda" and can_compact(),
            precision=self._worker.precision,
            uses_cores=self._worker.device == "cpu" and self._worker.paced_ms is None,
            tries=tries_plans(),
        )
        return predict_ms(bench, system)

    def on_begin(self, system: str) -> None:
        """Hear which system is measured from now on."""
        self._system = system

    def on_repetition(self, system: str, note: str, **figures: Any) -> None:
        """Hear what was measured."""
        if note and system not in self._notes:
            self._notes[system] = note
            self._say(f"  {system:<14} {note}")
        done = self._repetitions.setdefault(system, [])
        done.append(Repetition(**figures))
        count = f"{len(done)}/{max(len(done), self._worker.repetitions)}"
        laps = f" ({min(done[-1].laps_ms):.1f} .. {max(done[-1].laps_ms):.1f})" if done[-1].laps_ms else ""
        self._say(f"  {system:<14}{count:>5}: {done[-1].step_ms:10.1f} ms/step{laps}, loss {done[-1].last_loss:.5f}")

    def on_failure(self, system: str, failure: str) -> None:
        """Hear that a system failed on some rank, after which the others went on."""
        self._failures[system] = failure
        self._repetitions.pop(system, None)
        self._say(f"  {system:<14} failed: {failure}")
