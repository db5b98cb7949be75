"""Kills processes while they save checkpoints, and measures what saving costs the steps meanwhile.

Usage: python benchmarks/checkpoints.py kill [--rounds 200]     each time the newest checkpoint left must be whole
       python benchmarks/checkpoints.py cost [--megabytes 500]  needs an otherwise idle machine
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import poseidon

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
STEPS = 60


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kill", "cost"])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.what == "kill":
            kill(Path(folder), arguments.rounds, arguments.seed)
        else:
            cost(Path(folder), arguments.megabytes)
    return 0


def kill(folder: Path, rounds: int, seed: int) -> None:
    """Kill a saving process at random moments."""
    from killed_saves import kill_while_saving

    chance = random.Random(seed)
    for number in range(rounds):
        kill_while_saving(folder / str(number), chance.random() * 0.1)
    print(f"{rounds} processes killed while saving: each left a whole checkpoint that is the newest (seed {seed})")


def cost(folder: Path, megabytes: int) -> None:
    """Compare steps while a checkpoint is written with steps when none is."""
    torch.set_num_threads(1)
    ballast = nn.Embedding(megabytes * 2**20 // 4 // 64, 64)
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)])
    inputs = torch.randn(128, 1024)

    def step() -> float:
        began = time.perf_counter()
        model(inputs).square().mean().backward()
        return time.perf_counter() - began

    with poseidon.Checkpoint(folder, keep=1, model=model, ballast=ballast) as checkpoint:
        writer = checkpoint._saving.writer
        assert writer is not None
        quiet, busy, copying = [], [], []
        for round_number in range(4):
            quiet += [step() for _ in range(STEPS)]
            began = time.perf_counter()
            checkpoint.save(round_number + 1)
            copying.append(time.perf_counter() - began)
            while writer._jobs.unfinished_tasks:
                busy.append(step())
    plain_s, writing_s = statistics.median(quiet), statistics.median(busy)
    print(f"a state of {megabytes} MB: copied in {statistics.median(copying):.2f} s; {len(busy)} steps meanwhile")
    print(f"step {plain_s * 1e3:.2f} ms, while writing {writing_s * 1e3:.2f} ms: {writing_s / plain_s - 1:+.1%}")


if __name__ == "__main__":
    sys.exit(main())
