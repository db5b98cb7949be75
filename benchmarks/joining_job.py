"""The job of ``joining.py``: trains a model of a given size, and writes down when each step ended."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import poseidon
from poseidon.lab.pace import paced

WIDTH = 1024
LAYER_BYTES = WIDTH * WIDTH * 4


def build(state_mb: float, frozen: float, step_s: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model that takes so many MB with its optimizer's state, of which a share is not trained."""
    # A trained layer has two moments besides its weights.
    layers = max(2, round(state_mb * 1e6 / LAYER_BYTES / (1 + 2 * (1 - frozen))))
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    for layer in list(model)[: round(layers * frozen)]:
        layer.requires_grad_(False)
    paced(model, step_s * 1e3 / 3, step_s * 2e3 / 3)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trained, 1e-4)


def main() -> None:
    """Train until a file ``stop`` is there."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--state-mb", type=float, required=True)
    parser.add_argument("--frozen", type=float, required=True)
    parser.add_argument("--step", type=float, required=True)
    parser.add_argument("--route", required=True)
    arguments = parser.parse_args()
    poseidon.init()
    torch.set_num_threads(1)
    model, optimizer = build(arguments.state_mb, arguments.frozen, arguments.step)
    wrapped = poseidon.DistributedDataParallel(
        model, routes=None if arguments.route == "auto" else {"*": arguments.route}, trials=False
    )
    dataset = TensorDataset(torch.randn(64, WIDTH))
    sampler = poseidon.data.ElasticSampler(dataset, 8)
    loader = DataLoader(dataset, batch_sampler=sampler)
    notes = (arguments.notes / f"worker-{os.uname().nodename}-{os.getpid()}").open("a", buffering=1)

    def train(step: int) -> None:
        notes.write(f"enter {step} {time.time():.4f}\n")
        handed = getattr(checkpoint, "handed", None)
        if handed is not None:
            notes.write(f"handed {handed.ahead_bytes} {handed.ahead_s:.4f} {handed.bytes} {handed.took_s:.4f}\n")
        while True:
            for (inputs,) in sampler.over(loader):
                optimizer.zero_grad()
                (wrapped(inputs).square().mean() * sampler.weight).backward()
                optimizer.step()
                step += 1
                # Together: whoever sees the file in another step would leave the others.
                notes.write(f"step {step} {time.time():.4f}\n")
                checkpoint.step(step)
                if torch.distributed.get_world_size() > 1:
                    ends = torch.tensor([int((arguments.notes / "stop").exists())])
                    torch.distributed.all_reduce(ends)
                    if ends.item():
                        return

    notes.write(f"ready {time.time():.4f}\n")
    with poseidon.Checkpoint(None, model=wrapped, optimizer=optimizer, sampler=sampler) as checkpoint:
        checkpoint.run(train)


if __name__ == "__main__":
    main()
