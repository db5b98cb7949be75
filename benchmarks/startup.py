"""From the command to the first training step: ``poseidon run --nproc 2`` beside torchrun, by turns.

::

    python benchmarks/startup.py [--repetitions 5] [--workers 2]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.randn(32, 64)).square().mean().backward()
optimizer.step()
if dist.get_rank() == 0:
    open(sys.argv[1], "w").write(repr(time.time()))
dist.destroy_process_group()
"""


def time_one(command: list[str], folder: Path) -> tuple[float, float]:
    """Return seconds from the command to its first step, and to its end."""
    note = folder / "first_step"
    note.unlink(missing_ok=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.time()
    done = subprocess.run([*command, "train.py", str(note)], cwd=folder, env=env, capture_output=True, text=True)
    ended = time.time()
    if done.returncode != 0:
        raise SystemExit(f"{command[:4]} failed:\n{done.stderr}")
    return float(note.read_text()) - began, ended - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    count = str(arguments.workers)
    commands = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", count],
        "poseidon run": [sys.executable, "-m", "poseidon.cli", "run", "--nproc", count, "--log-dir", "none"],
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        for _ in range(arguments.repetitions):
            for system, command in commands.items():
                times[system].append(time_one(command, folder))
    medians = {
        system: tuple(statistics.median(pair[index] for pair in pairs) for index in (0, 1))
        for system, pairs in times.items()
    }
    print(f"{'':14}{'first step':>12}{'end':>9}   (seconds, median of {arguments.repetitions}, {count} workers)")
    for system, (first, end) in medians.items():
        print(f"{system:14}{first:12.2f}{end:9.2f}")
    ratio = medians["poseidon run"][0] / medians["torchrun"][0]
    print(f"to the first step: {ratio:.2f}x torchrun's time")
    if arguments.output:
        arguments.output.write_text(
            json.dumps({"times": times, "ratio": ratio, "workers": arguments.workers}, indent=1)
        )


if __name__ == "__main__":
    main()
