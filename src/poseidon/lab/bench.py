"""The benchmark: every system on every model, cluster size and link speed, measured in labs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from poseidon.job import settings as job_settings
from poseidon.lab.bench_jobs import RankOutput, run_workers, write_measurements
from poseidon.lab.bench_worker import WorkerSettings
from poseidon.lab.job import JobResult
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

    def cells(self) -> Iterator[tuple[WorkerSettings, int, int]]:
        """Yield a worker's settings, the machines and the rate of each cell, in the order of measurement."""
        for model in self.models:
            batch = self.batches.get(model, self.worker.batch)
            for rate in self.rates_bits:
                for machines in self.machines:
                    yield replace(self.worker, model=model, batch=batch), machines, rate


def run_bench(settings: BenchSettings, say: Callable[[str], None], save: Callable[[list[Cell]], None]) -> list[Cell]:
    """Measure every cell; ``save`` is called after each, so that no measurement is lost."""
    cells: list[Cell] = []
    for worker, machines, rate in settings.cells():
        say(f"{worker.model}: {machines} machines at {format_rate(rate)}")
        cells.append(_run_cell(worker, LabSpec((rate,) * machines), settings.cell_timeout_s, say))
        save(cells)
    return cells


def write_results(path: Path, settings: BenchSettings, cells: list[Cell]) -> None:
    """Write all measurements, with everything needed to repeat them."""
    write_measurements(path, asdict(settings), {"tries": tries_plans(), "cells": cells_to_json(cells)})


def tries_plans() -> bool:
    """Return whether Poseidon's systems try several plans and keep the fastest."""
    return job_settings.TRIALS.read() != "0"


def _run_cell(worker: WorkerSettings, spec: LabSpec, timeout_s: float, say: Callable[[str], None]) -> Cell:
    """Measure one cell; if a system takes the whole job down, measure the others again without it."""
    lost: dict[str, str] = {}
    while True:
        left = tuple(system for system in worker.systems if system not in lost)
        events = RankEvents(replace(worker, systems=left), spec, say)
        if lost and set(left) <= {LINEAR}:
            break
        result = _run_workers(events, spec, timeout_s)
        if result.status == 0:
            break
        events.output.tell_failure(result.reason, say)
        if events.current is None:
            lost |= dict.fromkeys(left, result.reason)
        else:
            lost[events.current] = result.reason
    return events.cell(lost, order=worker.systems)


def _run_workers(events: RankEvents, spec: LabSpec, timeout_s: float) -> JobResult:
    return run_workers("poseidon.lab.bench_worker", asdict(events.worker), spec, timeout_s, events.output.hear)


class RankEvents:
    """Collects the ranks' messages into a cell, and passes progress on."""

    def __init__(self, worker: WorkerSettings, spec: LabSpec, say: Callable[[str], None]) -> None:
        self.worker = worker
        self.current: str | None = None
        """The system being measured now, to blame if the job dies."""
        self.output = RankOutput(
            {
                "model": self._on_model,
                "profile": self._on_profile,
                "begin": self._on_begin,
                "repetition": self._on_repetition,
                "failure": self._on_failure,
            }
        )
        self._spec = spec
        self._say = say
        self._sizes = (0, 0)
        self._repetitions: dict[str, list[Repetition]] = {}
        self._failures: dict[str, str] = {}
        self._notes: dict[str, str] = {}
        self._profile: tuple[Profile, float] | None = None

    def cell(self, lost: dict[str, str], order: tuple[str, ...]) -> Cell:
        """Return the measurements; ``lost`` names the systems that took a job down, with the reason."""
        failures = self._failures | lost
        measured = {
            system: Measured(
                tuple(self._repetitions.get(system, ())), failures.get(system, ""), self._notes.get(system, "")
            )
            for system in order
            if system in self._repetitions or system in failures
        }
        measured = {
            system: replace(one, predicted_ms=self._predict(system, measured)) for system, one in measured.items()
        }
        return Cell(
            model=self.worker.model,
            machines=self._spec.machines,
            rate_bits=self._spec.rates_bits[0],
            batch=self.worker.batch,
            parameters=self._sizes[0],
            parameter_bytes=self._sizes[1],
            systems=measured,
            profile=None if self._profile is None else self._profile[0],
            flops=0.0 if self._profile is None else self._profile[1],
        )

    def _on_model(self, parameters: int, parameter_bytes: int) -> None:
        self._sizes = (parameters, parameter_bytes)

    def _on_profile(self, profile: dict[str, Any], flops: float) -> None:
        self._profile = (Profile.from_dict(profile), flops)

    def _predict(self, system: str, measured: dict[str, Measured]) -> float | None:
        """Return the simulator's prediction for a system, from the linear one's time and the units' shares of it.

        None where it knows no such step: of several batches.
        """
        linear = measured.get(LINEAR)
        if self.worker.accumulate > 1 or self._profile is None or linear is None or not linear.repetitions:
            return None
        profile, flops = self._profile
        bench = Bench(
            profile=profile,
            linear_s=linear.step_ms / 1e3,
            machines=self._spec.machines,
            rate_bits=self._spec.rates_bits[0],
            is_gpu=self.worker.device == "cuda",
            cores=len(os.sched_getaffinity(0)),
            flops=flops,
            compacts=self.worker.device == "cuda" and can_compact(),
            precision=self.worker.precision,
            uses_cores=self.worker.device == "cpu" and self.worker.paced_ms is None,
            tries=tries_plans(),
        )
        return predict_ms(bench, system)

    def _on_begin(self, system: str) -> None:
        self.current = system

    def _on_repetition(self, system: str, note: str, **figures: Any) -> None:
        if note and system not in self._notes:
            self._notes[system] = note
            self._say(f"  {system:<14} {note}")
        done = self._repetitions.setdefault(system, [])
        done.append(Repetition(**figures))
        count = f"{len(done)}/{self.worker.repetitions}"
        laps = f" ({min(done[-1].laps_ms):.1f} .. {max(done[-1].laps_ms):.1f})" if done[-1].laps_ms else ""
        self._say(f"  {system:<14}{count:>5}: {done[-1].step_ms:10.1f} ms/step{laps}, loss {done[-1].last_loss:.5f}")

    def _on_failure(self, system: str, failure: str) -> None:
        self._failures[system] = failure
        self._repetitions.pop(system, None)
        self._say(f"  {system:<14} failed: {failure}")
