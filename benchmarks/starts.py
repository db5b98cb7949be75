"""Starts many small jobs, several at a time so that the machine is busy, and counts those that fail.

::

    python benchmarks/starts.py [--starts 200] [--at-once 6] [--workers 2]

Every job is a whole one: ``poseidon run`` finds a port, starts the workers, they meet, wrap a model (by turns the
wrapper, ``distribute`` and a plain script under ``--auto``), take two steps, compare their replicas and end. A failed
start is shown with what it printed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SCRIPTS = {
    "wrapper": """
import torch, poseidon
poseidon.init()
model = poseidon.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
model.verify_replicas()
""",
    "distribute": """
import torch, poseidon
poseidon.init()
model = torch.nn.Linear(64, 64)
model, optimizer = poseidon.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
model.verify_replicas()
""",
    "auto": """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for (x,) in DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=16, shuffle=True):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
""",
}
LIMIT_S = 300


def start(number: int, workers: int, folder: Path) -> tuple[str, float, str]:
    """Run one job; return its kind, its seconds, and what it printed if it failed."""
    kind = list(SCRIPTS)[number % len(SCRIPTS)]
    words = [sys.executable, "-m", "poseidon", "run", "--nproc", str(workers), "--log-dir", "none"]
    words += ["--auto"] * (kind == "auto") + [str(folder / f"{kind}.py")]
    began = time.monotonic()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        return kind, time.monotonic() - began, f"did not end within {LIMIT_S} s\n{error.stderr!r}"
    return kind, time.monotonic() - began, "" if done.returncode == 0 else done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    failed, longest = 0, 0.0
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(arguments.at_once) as pool:
        folder = Path(name)
        for kind, text in SCRIPTS.items():
            (folder / f"{kind}.py").write_text(text)
        jobs = pool.map(lambda number: start(number, arguments.workers, folder), range(arguments.starts))
        for number, (kind, seconds, problem) in enumerate(jobs):
            longest = max(longest, seconds)
            if problem:
                failed += 1
                print(f"start {number} ({kind}) failed after {seconds:.0f} s:\n{problem}", flush=True)
            if (number + 1) % 20 == 0:
                load = os.getloadavg()[0]
                print(f"{number + 1} started, {failed} failed, longest {longest:.0f} s, load {load:.0f}", flush=True)
    print(f"{arguments.starts} starts of {arguments.workers} workers, {failed} failed, longest {longest:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
