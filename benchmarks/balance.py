"""Machines of different speeds in one job: how much of their summed speed is reached, with and without ``--balance``.

Usage: python benchmarks/balance.py [--speeds 1,1,0.5,0.25] [--steps 60] [--modes wrapper,distribute]

Workers on this machine train a small model in double precision. Each sample takes ``--sample-ms`` divided by the
worker's speed, a third of it in forward and the rest in backward; the processor stays free meanwhile, so a few cores
are enough. The speed is that of the last third of the steps. Beside it torch's DistributedDataParallel with equal
shares. At the end, the parameters of every run are compared with those of one worker alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import poseidon

TOLERANCE = 1e-9
"""Of parameters in double precision: what the order of additions may change."""
TARGET = 0.95
BATCHES = 15
"""In an epoch, and a smaller one at its end."""


def main() -> int:
    """Run all systems one after the other; return 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speeds", default="1,1,0.5,0.25", help="of the workers, relative to each other")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=256, help="samples per step of all workers together")
    parser.add_argument("--sample-ms", type=float, default=6.0, help="of a worker of speed 1")
    parser.add_argument("--modes", default="wrapper,distribute")
    parser.add_argument("--output", type=Path, help="file for the figures, as JSON")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--mode", default="wrapper", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options)
        return 0
    speeds = [float(word) for word in options.speeds.split(",")]
    summed = sum(speeds) * 1e3 / options.sample_ms
    systems = {"DDP": ("ddp", ())}
    for mode in options.modes.split(","):
        systems |= {f"{mode}, equal shares": (mode, ()), f"{mode} --balance": (mode, ("--balance",))}
    figures: dict[str, Any] = {"speeds": speeds, "summed": summed, "systems": {}}
    with tempfile.TemporaryDirectory() as scratch:
        alone = run(options, "alone", (), 1, Path(scratch, "alone"))
        print(f"summed speed: {summed:.0f} samples/s (speeds {options.speeds})", flush=True)
        for name, (mode, words) in systems.items():
            found = run(options, mode, words, len(speeds), Path(scratch, name.replace(" ", "-")))
            worst = max(float((found["state"][key] - value).abs().max()) for key, value in alone["state"].items())
            rate = found["samples_per_s"]
            is_exact = worst <= TOLERANCE
            figures["systems"][name] = {"samples_per_s": rate, "part": rate / summed, "difference": worst}
            shares = " ".join(map(str, found["shares"]))
            print(
                f"{name:<26} {rate:7.1f} samples/s, {rate / summed:6.1%} of the sum; shares at the end {shares}; "
                f"{'equals' if is_exact else 'DIFFERS FROM'} the run alone ({worst:.1e})",
                flush=True,
            )
    if options.output is not None:
        options.output.write_text(json.dumps(figures, indent=1) + "\n")
    balanced = [one for name, one in figures["systems"].items() if "--balance" in name]
    print(f"with --balance at least {min(one['part'] for one in balanced):.1%}; target {TARGET:.0%}")
    return int(any(one["difference"] > TOLERANCE for one in balanced))


def run(options: argparse.Namespace, mode: str, words: tuple[str, ...], workers: int, folder: Path) -> dict[str, Any]:
    """Train once; return rank 0's figures."""
    folder.mkdir()
    launcher = [
        sys.executable,
        "-m",
        "poseidon",
        "run",
        "--quiet",
        "--log-dir",
        "none",
        "--nproc",
        str(workers),
        *words,
    ]
    given = ["--worker", str(folder), "--mode", mode, "--speeds", options.speeds, "--steps", str(options.steps)]
    given += ["--batch", str(options.batch), "--sample-ms", str(options.sample_ms)]
    subprocess.run([*launcher, __file__, *given], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=1800)
    found: dict[str, Any] = torch.load(folder / "figures.pt")
    return found


class Paced(nn.Module):
    """Takes a time per sample in forward and twice as much in backward, during which the processor is free."""

    def __init__(self, sample_s: float) -> None:
        super().__init__()
        self._sample_s = sample_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the samples as they are, later."""
        count = len(x)
        time.sleep(count * self._sample_s / 3)
        if x.requires_grad:
            x.register_hook(lambda _: time.sleep(count * self._sample_s * 2 / 3))
        return x


def work(options: argparse.Namespace) -> None:
    """Be one worker."""
    torch.set_num_threads(1)
    speeds = [float(word) for word in options.speeds.split(",")]
    world = poseidon.init(backend="gloo")
    is_alone = options.mode == "alone"
    sample_s = 0.0 if is_alone else options.sample_ms / 1e3 / speeds[world.rank]
    generator = torch.Generator().manual_seed(2)
    count = options.batch * BATCHES + options.batch // 3
    inputs = torch.randn(count, 8, generator=generator, dtype=torch.float64)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(
        nn.Linear(8, 32), nn.Tanh(), Paced(sample_s), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    ).double()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), 0.01)
    if options.mode == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif options.mode == "distribute":
        model, optimizer = poseidon.distribute(model, optimizer)
    elif not is_alone:
        model = poseidon.DistributedDataParallel(model)
    sampler = poseidon.data.ElasticSampler(dataset, options.batch, seed=3)
    loader = DataLoader(dataset, batch_sampler=sampler)
    step, used, share, began = 0, 0, 0, 0.0
    while step < options.steps:
        for x, y in sampler.over(loader):
            if step == options.steps * 2 // 3:
                used, began = 0, time.perf_counter()
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y) * sampler.weight
            loss.backward()
            optimizer.step()
            used += round(len(x) * world.size / sampler.weight)
            share = len(x) if round(len(x) * world.size / sampler.weight) == options.batch else share
            step += 1
            if step == options.steps:
                break
    state = getattr(model, "module", model).state_dict()
    seconds = time.perf_counter() - began
    shares: list[int] = [share] * world.size
    if world.size > 1:
        torch.distributed.all_gather_object(shares, share)
    if world.rank == 0:
        figures = {"samples_per_s": used / seconds, "shares": shares, "state": state}
        torch.save(figures, options.worker / "figures.pt")


if __name__ == "__main__":
    sys.exit(main())
