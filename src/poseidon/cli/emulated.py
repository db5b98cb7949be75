"""One emulated machine of the quickstart: the same fully connected net without communication, with DDP, with Poseidon.

Started by :mod:`poseidon.cli.quickstart` inside a lab. The images are noise: reading real ones would take longer than
all the training here, and the same noise shows just as well that both systems reach the same loss.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import poseidon
from poseidon import files
from poseidon.job.world import World
from poseidon.lab.bench_worker import bytes_sent

BATCH = 16
"""Images of each machine in a step."""
HIDDEN = 2048
WARMUP = 3
"""Steps before timing starts: Poseidon plans after the first, DDP rebuilds its buckets after the first."""

SYSTEMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "linear": lambda model: model,
    "ddp": nn.parallel.DistributedDataParallel,
    "poseidon": poseidon.DistributedDataParallel,
}


def main() -> None:
    """Measure every system in turn; the first machine writes what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--result", type=Path)
    args = parser.parse_args()
    world = poseidon.init("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(28 * 28, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10)
    )
    figures = {name: _measure(wrap(copy.deepcopy(net)), world, args.steps) for name, wrap in SYSTEMS.items()}
    figures["net"] = {"parameters": sum(parameter.numel() for parameter in net.parameters())}
    if world.rank == 0 and args.result is not None:
        files.write_json(args.result, figures, "result")
    dist.destroy_process_group()


def _measure(model: nn.Module, world: World, steps: int) -> dict[str, float]:
    """Return the time of a step on the slowest machine, what a machine sends in it, and the mean of the last losses."""
    noise = torch.Generator().manual_seed(world.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(WARMUP + steps):
        if step == WARMUP:
            dist.barrier()
            sent, began = bytes_sent(), time.perf_counter()
        images = torch.rand(BATCH, 28 * 28, generator=noise)
        digits = torch.randint(10, (BATCH,), generator=noise)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), digits)
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - began
    dist.barrier()
    found = torch.tensor([seconds / steps * 1e3, (bytes_sent() - sent) / steps / 1e6, loss.item()], dtype=torch.float64)
    every = [torch.zeros_like(found) for _ in range(world.size)]
    dist.all_gather(every, found)
    times, sizes, losses = torch.stack(every).unbind(1)
    if isinstance(model, poseidon.DistributedDataParallel):
        model.close()
    return {"step_ms": times.max().item(), "sent_mb": sizes.mean().item(), "loss": losses.mean().item()}


if __name__ == "__main__":
    main()
