"""A machine joins an elastic job: how fast its state comes, and what that costs the others.

``python benchmarks/joining.py --machines 4 --state-mb 500`` trains on emulated machines at 1 Gbit/s (needs root, sshd
and the extra ``lab``); one more comes while they train. It reports how fast the state was copied while the others
trained, as a share of the link; how much longer their steps took meanwhile; what had changed by the time the machine
took its seat, and how long all waited for it. Compute is paced, since the machines share this one's processors.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "cluster"))

from sshd import ensure_sshd, serving

from poseidon.lab import Lab

JOB = Path(__file__).with_name("joining_job.py").resolve()
BEFORE = 6
"""Steps before the machine comes."""


@dataclass
class Worker:
    """What one worker has written down."""

    ready: float = 0.0
    entered: list[float] = field(default_factory=list)
    steps: dict[int, float] = field(default_factory=dict)
    """When each step ended."""
    handed: list[float] = field(default_factory=list)


def read_notes(folder: Path) -> list[Worker]:
    """Return the workers' notes."""
    found = []
    for path in sorted(folder.glob("worker-*")):
        worker = Worker()
        for line in path.read_text().split("\n")[:-1]:
            kind, *words = line.split()
            numbers = [float(word) for word in words]
            if kind == "ready":
                worker.ready = numbers[0]
            elif kind == "enter":
                worker.entered.append(numbers[1])
            elif kind == "step":
                worker.steps[int(numbers[0])] = numbers[1]
            elif kind == "handed":
                worker.handed = numbers
        found.append(worker)
    return found


def wait_for(what: str, is_so: object, limit_s: float) -> None:
    """Wait until a condition holds."""
    assert callable(is_so)
    deadline = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} did not happen within {limit_s:g} s")
        time.sleep(0.1)


def report(workers: list[Worker], rate_bit: float) -> dict[str, float]:
    """Return what the notes say of the machine that joined last."""
    joiner = max(workers, key=lambda worker: worker.ready)
    others = [worker for worker in workers if worker is not joiner]
    ahead_bytes, ahead_s, came, took_s = joiner.handed or [0.0, 0.0, 0.0, 0.0]
    first = min(others, key=lambda worker: worker.ready)
    seated = min(when for when in first.entered if when > joiner.ready)
    ended = sorted(when for when in first.steps.values() if when < seated)
    took = [(later - earlier, later) for earlier, later in itertools.pairwise(ended)]
    calm = [step_s for step_s, when in took[2:] if when < joiner.ready]
    busy = [step_s for step_s, when in took if joiner.ready + step_s / 2 < when < joiner.ready + ahead_s + step_s / 2]
    calm_s = statistics.median(calm)
    result = {
        "ahead_mb": ahead_bytes / 1e6,
        "ahead_s": ahead_s,
        "of_link": ahead_bytes * 8 / ahead_s / rate_bit if ahead_s else 0.0,
        "calm_step_s": calm_s,
        "busy_step_s": statistics.mean(busy) if busy else 0.0,
        "at_boundary_mb": came / 1e6,
        "at_boundary_s": took_s,
    }
    # From the last step without the machine to the first with it, beyond what a step takes.
    result["all_waited_s"] = min(when for when in first.steps.values() if when > seated) - ended[-1] - calm_s
    result["step_growth"] = result["busy_step_s"] / result["calm_step_s"] - 1 if busy else 0.0
    return {name: round(value, 4) for name, value in result.items()}


def main() -> int:
    """Train, let a machine join, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--machines", type=int, default=4, help="before one more joins")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--state-mb", type=float, default=500.0, help="model and optimizer")
    parser.add_argument("--frozen", type=float, default=0.0, help="share of the model that is not trained")
    parser.add_argument("--step", type=float, default=1.0, help="seconds of paced compute in a step")
    parser.add_argument("--route", default="auto", help="of all gradients, such as allreduce")
    parser.add_argument("--limit", type=float, default=300.0)
    parser.add_argument("--source", type=Path, help="use the library in this folder, to compare with another version")
    parser.add_argument("--show", action="store_true", help="print the job's output at the end")
    arguments = parser.parse_args()
    problem = ensure_sshd()
    if problem:
        raise SystemExit(problem)
    with tempfile.TemporaryDirectory() as text, Lab(machines=arguments.machines + 1, rate=arguments.rate) as lab:
        folder = Path(text)
        with serving(lab, folder) as ssh, (folder / "output").open("wb") as output:
            hosts = folder / "hosts"
            names = [f"machine{number}" for number in range(arguments.machines + 1)]
            hosts.write_text("\n".join(names[:-1]) + "\n")
            command = [sys.executable, "-m", "poseidon", "run", "--quiet", "--log-dir", "none"]
            command += ["--nodes", f"2:{len(names)}", "--hostfile", str(hosts), "--env", "OMP_NUM_THREADS=1"]
            if arguments.source is not None:
                command += ["--env", f"PYTHONPATH={arguments.source}"]
            command += [str(JOB), "--notes", text, "--state-mb", str(arguments.state_mb)]
            command += ["--frozen", str(arguments.frozen), "--step", str(arguments.step), "--route", arguments.route]
            env = {**os.environ, **ssh.env, "OMP_NUM_THREADS": "1"}
            job = lab.spawn(0, command, env=env, stdout=output, stderr=subprocess.STDOUT)
            try:
                workers = []

                def has_trained(count: int, least: int) -> bool:
                    nonlocal workers
                    workers = read_notes(folder)
                    if job.poll() is not None:
                        raise SystemExit((folder / "output").read_text()[-4000:])
                    return sum(len(worker.steps) >= least for worker in workers) >= count

                wait_for("training", lambda: has_trained(arguments.machines, BEFORE), arguments.limit)
                hosts.write_text("\n".join(names) + "\n")
                wait_for("joining", lambda: has_trained(arguments.machines + 1, 2), arguments.limit)
                (folder / "stop").touch()
                job.wait(60)
            finally:
                job.terminate()
                job.wait()
            if arguments.show:
                print((folder / "output").read_text())
    gbit = {"gbit": 1e9, "mbit": 1e6}[arguments.rate[-4:]] * float(arguments.rate[:-4])
    facts = {name: str(value) for name, value in vars(arguments).items() if name not in ("limit", "show", "source")}
    print(json.dumps({**facts, **report(workers, gbit)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
