"""The benchmark: every system on every model, cluster size and link speed, measured in labs."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from poseidon import files
from poseidon.job import settings as job_settings
from poseidon.lab import gpu
from poseidon.lab.bench_worker import MARK, WorkerSettings
from poseidon.lab.cluster import Lab, own_environment
from poseidon.lab.environment import WorkerPlace
from poseidon.lab.job import Job, JobOptions, JobResult
from poseidon.lab.results import LINEAR, Cell, Measured, Repetition, cells_to_json
from poseidon.lab.spec import LabSpec, format_rate
from poseidon.planning.profile import Profile
from poseidon.sim.cells import Bench, predict_ms
from poseidon.sums.device import can_compact
from poseidon.version import __version__

KEPT_LINES = 400
"""Enough for the stacks of all workers of a job that hung."""


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
    data = {
        "poseidon": __version__,
        "date": time.strftime("%Y-%m-%d"),
        # Without folders: paths on this machine mean nothing on another.
        "command": shlex.join(["poseidon", *(Path(w).name if w.startswith("/") else w for w in sys.argv[1:])]),
        "hardware": describe_hardware(),
        "settings": asdict(settings),
        "tries": tries_plans(),
        "cells": cells_to_json(cells),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, data, "results")


def tries_plans() -> bool:
    """Return whether Poseidon's systems try several plans and keep the fastest."""
    return job_settings.TRIALS.read() != "0"


def describe_hardware() -> dict[str, Any]:
    """Describe the machine that runs the lab: processor, memory, GPU, versions."""
    model = [line for line in _read("/proc/cpuinfo").splitlines() if line.startswith("model name")]
    memory = [line.split()[1] for line in _read("/proc/meminfo").splitlines() if line.startswith("MemTotal")]
    gpu_name = _gpu_name()
    return {
        "processor": model[0].partition(":")[2].strip() if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(int(memory[0]) / 2**20, 1) if memory else None,
        "gpu": gpu_name,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "compacts": gpu_name is not None and can_compact(),
    }


def _gpu_name() -> str | None:
    """Ask the driver's own tool: this process must not hold the GPU that the workers share."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    return answer.stdout.splitlines()[0] if answer.returncode == 0 and answer.stdout else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


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
        say(f"  the job failed: {result.reason}")
        for line in events.lines:
            say(f"    {line}")
        if events.current is None:
            lost |= dict.fromkeys(left, result.reason)
        else:
            lost[events.current] = result.reason
    return events.cell(lost, order=worker.systems)


def _run_workers(events: RankEvents, spec: LabSpec, timeout_s: float) -> JobResult:
    worker = events.worker
    on_gpu = worker.device == "cuda"
    env = {
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **own_environment(),
        "OMP_NUM_THREADS": str(worker.threads),
    }
    command = [sys.executable, "-m", "poseidon.lab.bench_worker", json.dumps(asdict(worker))]
    with Lab.from_spec(spec) as lab, gpu.sharing(lab.name, on_gpu) as mps_folder:
        options = JobOptions(share_gpu=on_gpu, mps_folder=mps_folder, timeout_s=timeout_s)
        return Job(lab, command, options, env, events.hear).run()


class RankEvents:
    """Collects the ranks' messages into a cell, and passes progress on."""

    def __init__(self, worker: WorkerSettings, spec: LabSpec, say: Callable[[str], None]) -> None:
        self.worker = worker
        self.current: str | None = None
        """The system being measured now, to blame if the job dies."""
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        """The latest other output of the ranks."""
        self._spec = spec
        self._say = say
        self._sizes = (0, 0)
        self._repetitions: dict[str, list[Repetition]] = {}
        self._failures: dict[str, str] = {}
        self._notes: dict[str, str] = {}
        self._profile: tuple[Profile, float] | None = None

    def hear(self, place: WorkerPlace, line: str) -> None:
        """Handle one line of a rank's output."""
        if not line.startswith(MARK):
            self.lines.append(f"{place.label} | {line}")
            return
        event = json.loads(line.removeprefix(MARK))
        getattr(self, f"_on_{event.pop('event')}")(**event)

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
        """Return the simulator's prediction for a system, from the linear one's time and the units' shares of it."""
        linear = measured.get(LINEAR)
        if self._profile is None or linear is None or not linear.repetitions:
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

    def _on_repetition(self, system: str, note: str, **figures: float) -> None:
        if note and system not in self._notes:
            self._notes[system] = note
            self._say(f"  {system:<14} {note}")
        done = self._repetitions.setdefault(system, [])
        done.append(Repetition(**figures))
        count = f"{len(done)}/{self.worker.repetitions}"
        self._say(f"  {system:<14}{count:>5}: {done[-1].step_ms:10.1f} ms/step, loss {done[-1].last_loss:.5f}")

    def _on_failure(self, system: str, failure: str) -> None:
        self._failures[system] = failure
        self._repetitions.pop(system, None)
        self._say(f"  {system:<14} failed: {failure}")
