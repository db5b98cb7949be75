"""What both comparisons of ``poseidon bench`` need: a job in a lab, what its ranks say, and the file of results."""

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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from poseidon import files
from poseidon.lab import gpu
from poseidon.lab.bench_worker import END, MARK
from poseidon.lab.cluster import Lab, own_environment
from poseidon.lab.environment import WorkerPlace
from poseidon.lab.job import Job, JobOptions, JobResult
from poseidon.lab.spec import LabSpec
from poseidon.sums.device import can_compact
from poseidon.version import __version__

KEPT_LINES = 400
"""Enough for the stacks of all workers of a job that hung."""


class RankOutput:
    """The output of a job's ranks: ``handlers`` get the messages, by event; the latest other lines are kept."""

    def __init__(self, handlers: Mapping[str, Callable[..., None]]) -> None:
        self._handlers = handlers
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)

    def hear(self, place: WorkerPlace, line: str) -> str:
        """Handle one line of a rank's output; return the message's event, empty for another line."""
        if not line.startswith(MARK):
            self._lines.append(f"{place.label} | {line}")
            return ""
        event = json.loads(line.removeprefix(MARK))
        name = str(event.pop("event"))
        self._handlers[name](**event)
        return name

    def tell_failure(self, reason: str, say: Callable[[str], None]) -> None:
        """Say that the job failed, and what its ranks said last."""
        say(f"  the job failed: {reason}")
        for line in self._lines:
            say(f"    {line}")


def run_workers(
    module: str,
    settings: Mapping[str, Any],
    spec: LabSpec,
    timeout_s: float,
    hear: Callable[[WorkerPlace, str], str],
) -> JobResult:
    """Run a worker's module in a lab; ``settings`` are its argument, with ``threads`` and ``device`` among them.

    The time limit begins anew whenever ``hear`` returns :data:`~poseidon.lab.bench_worker.END`.
    """
    env = {"TORCH_CPP_LOG_LEVEL": "ERROR", **own_environment(), "OMP_NUM_THREADS": str(settings["threads"])}
    command = [sys.executable, "-m", module, json.dumps(settings)]
    on_gpu = settings["device"] == "cuda"
    with Lab.from_spec(spec) as lab, gpu.sharing(lab.name, on_gpu) as mps_folder:
        options = JobOptions(share_gpu=on_gpu, mps_folder=mps_folder, timeout_s=timeout_s)

        def listen(place: WorkerPlace, line: str) -> None:
            if hear(place, line) == END:
                job.restart_clock()

        job = Job(lab, command, options, env, listen)
        return job.run()


def write_measurements(path: Path, settings: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Write what was found, with everything needed to repeat it."""
    data = {
        "poseidon": __version__,
        "date": time.strftime("%Y-%m-%d"),
        # Without folders: paths on this machine mean nothing on another.
        "command": shlex.join(["poseidon", *(Path(w).name if w.startswith("/") else w for w in sys.argv[1:])]),
        "hardware": describe_hardware(),
        "settings": settings,
        **found,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, data, "results")


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
