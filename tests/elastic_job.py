"""The program of an elastic job, for tests and benchmarks: trains, and writes down which samples it used in which step.

``poseidon run --nproc 2:4 elastic_job.py --notes FOLDER``. Each worker appends to a file of its own: ``try EPOCH STEP
IDS`` before it exchanges gradients, ``done EPOCH STEP`` when the step is complete, ``left EPOCH TIME`` when it is
interrupted, ``handed`` with how its state came when it has joined, ``end DIGEST`` at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import poseidon
from poseidon.job.elastic import this_job

INPUTS = {"mlp": (8,), "lenet": (1, 12, 12), "transformer": (6, 16)}


class Counting(nn.Module):
    """Counts its calls in a buffer, which workers must have in common as they have statistics of BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return what comes in."""
        self.calls += 1
        return inputs


class SmallTransformer(nn.Module):
    """One layer of attention over a few vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Sequential(Counting(), nn.Linear(16, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return a number for each sample."""
        return self.head(self.layer(inputs).mean(1))


def make_model(name: str) -> nn.Module:
    """Return a small model in double precision, in which only the order of additions can make a difference."""
    torch.manual_seed(1)
    if name == "lenet":
        features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(4, 8, 3), nn.Tanh())
        classifier = nn.Sequential(nn.Linear(72, 16), nn.Tanh(), nn.Linear(16, 1))
        return nn.Sequential(features, nn.Flatten(), Counting(), classifier).double()
    if name == "transformer":
        return SmallTransformer().double()
    layers = [nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)]
    return nn.Sequential(Counting(), *layers).double()


def build(name: str, mode: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and its optimizer, on all workers."""
    model = make_model(name)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    if mode in ("distribute", "server"):
        return poseidon.distribute(model, optimizer, update="server" if mode == "server" else "worker")
    if mode == "local":
        return poseidon.distribute(model, optimizer, consistency="local", sync_every=4, outer="nesterov")
    return poseidon.DistributedDataParallel(model), optimizer


def delay_joining(how: str) -> None:
    """Let this worker be the last to join, for as long as the first epoch lasts: ``waits`` inside gloo, or ``fails``.

    Its connections are open, so the others have joined. gloo in fact waits so for a connection that a lost worker has
    opened and closed again, and fails so if one is cut.
    """
    from torch.distributed import distributed_c10d as torch_groups

    real = torch_groups.ProcessGroupGloo
    held = []

    def make(*arguments: object, **options: object) -> object:
        torch_groups.ProcessGroupGloo = real
        held.append(real(*arguments, **options))
        if how == "waits":
            threading.Event().wait()
        job = this_job()
        assert job is not None
        assert job.wait_for_end(60)
        raise RuntimeError("a connection ended")

    torch_groups.ProcessGroupGloo = make


def digest(model: nn.Module) -> str:
    """Return a short text that is equal for equal bits."""
    module = model.module if hasattr(model, "module") else model
    content = b"".join(value.detach().numpy().tobytes() for value in module.state_dict().values())
    return hashlib.sha256(content).hexdigest()[:16]


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--mode", default="wrapper", choices=["wrapper", "distribute", "server", "local"])
    parser.add_argument("--replicas", type=int, default=1, help="of each shard, with --mode server")
    parser.add_argument("--model", default="mlp", choices=INPUTS)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=120)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds per sample of a fast worker; others take more")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--every", type=int, help="steps between two checkpoints")
    parser.add_argument("--die", default="", help="which worker is killed before the training, and where: 1:model")
    parser.add_argument("--last", default="", help="which worker joins last, and how: 1:waits or 1:fails")
    arguments = parser.parse_args()
    launched = os.environ.get("RANK", "0")

    def come_to(place: str) -> None:
        if arguments.die == f"{launched}:{place}":
            os.kill(os.getpid(), signal.SIGKILL)

    if arguments.last.startswith(f"{launched}:"):
        delay_joining(arguments.last.partition(":")[2])
    come_to("init")
    poseidon.init()
    job = this_job()
    number = f"{launched}-{os.getpid()}"
    notes = (arguments.notes / f"worker-{number}").open("a", buffering=1)
    notes.write(f"pid {os.getpid()} {os.uname().nodename}\n")
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(arguments.samples, *INPUTS[arguments.model], generator=generator, dtype=torch.float64)
    targets = inputs.flatten(1).mean(1, keepdim=True).mul(3).tanh()
    dataset = TensorDataset(torch.arange(arguments.samples), inputs, targets)
    come_to("model")
    model, optimizer = build(arguments.model, arguments.mode)
    come_to("checkpoint")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.9)
    sampler = poseidon.data.ElasticSampler(dataset, arguments.batch, seed=3)
    loader = DataLoader(dataset, batch_sampler=sampler)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}

    def train(step: int) -> None:
        epoch = 0 if job is None or job.seat is None else job.seat.epoch
        notes.write(f"enter {epoch} {step} {time.time():.3f}\n")
        if checkpoint.handed is not None:
            notes.write(f"handed {checkpoint.handed}\n")
        try:
            go_on(epoch, step)
        except BaseException:
            notes.write(f"left {epoch} {time.time():.3f}\n")
            raise

    def go_on(epoch: int, step: int) -> None:
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
        if arguments.mode == "local":
            model.synchronize()
        notes.write(f"finished {epoch} {step}\n")

    saved = {"every": arguments.every, "replicas": arguments.replicas}
    with poseidon.Checkpoint(arguments.save, **saved, **parts) as checkpoint:
        come_to("run")
        checkpoint.run(train)
    final = model.module.state_dict()
    torch.save(final, arguments.notes / f"final-{number}.pt")
    notes.write(f"end {digest(model)}\n")


if __name__ == "__main__":
    main()
