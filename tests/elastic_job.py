"""The program of an elastic job, for tests and benchmarks: trains, and writes down which samples it used in which step.

``poseidon run --nproc 2:4 elastic_job.py --notes FOLDER``. Each worker appends to a file of its own: ``try EPOCH STEP
IDS`` before it exchanges gradients, ``done EPOCH STEP`` when the step is complete, ``end STEP DIGEST`` at the end. With
``--fault kill@7`` a worker does that to itself in step 7, if a file ``FOLDER/chosen-STEP`` names its number.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import poseidon
from poseidon.job.elastic import this_job


def build(arguments: argparse.Namespace) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
    ).double()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), 0.01)
    if arguments.mode == "distribute":
        return poseidon.distribute(model, optimizer)
    return poseidon.DistributedDataParallel(model), optimizer


def digest(model: torch.nn.Module) -> str:
    module = model.module if hasattr(model, "module") else model
    content = b"".join(value.detach().numpy().tobytes() for value in module.state_dict().values())
    return hashlib.sha256(content).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--mode", default="wrapper", choices=["wrapper", "distribute"])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=120)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds per sample of a fast worker; others take more")
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    launched = os.environ.get("RANK", "0")
    poseidon.init()
    job = this_job()
    number = f"{launched}-{os.getpid()}"
    notes = (arguments.notes / f"worker-{number}").open("a", buffering=1)
    notes.write(f"pid {os.getpid()}\n")
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(arguments.samples, 8, generator=generator, dtype=torch.float64)
    dataset = TensorDataset(torch.arange(arguments.samples), inputs, inputs.sum(1, keepdim=True).tanh())
    model, optimizer = build(arguments)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    sampler = poseidon.data.ElasticSampler(dataset, arguments.batch, seed=3)
    loader = DataLoader(dataset, batch_sampler=sampler)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}

    def train(step: int) -> None:
        epoch = 0 if job is None or job.seat is None else job.seat.epoch
        notes.write(f"enter {epoch} {step} {time.time():.3f}\n")
        for _ in range(sampler.epoch, arguments.epochs):
            for ids, x, y in sampler.over(loader):
                optimizer.zero_grad()
                notes.write(f"try {epoch} {step + 1} {' '.join(map(str, ids.tolist()))}\n")
                loss = torch.nn.functional.mse_loss(model(x), y) * sampler.weight
                time.sleep(arguments.pace * len(ids) * (1 + int(launched) % 3))
                loss.backward()
                optimizer.step()
                scheduler.step()
                step += 1
                checkpoint.step(step)
                notes.write(f"done {epoch} {step}\n")
                time.sleep(arguments.pause)
        notes.write(f"finished {epoch} {step}\n")

    with poseidon.Checkpoint(arguments.save, **parts) as checkpoint:
        checkpoint.run(train)
    final = model.module.state_dict()
    torch.save(final, arguments.notes / f"final-{number}.pt")
    notes.write(f"end {digest(model)}\n")


if __name__ == "__main__":
    main()
