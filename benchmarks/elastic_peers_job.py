"""The program of ``elastic_peers.py`` under torchrun and torchft: the same training as ``tests/elastic_job.py``.

It writes the same notes. Under torchrun it saves every ``--every`` steps and goes on from there after a restart; under
torchft the others go on, and one that comes back gets its state from them. Both do what their documentation shows.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from elastic_job import INPUTS, digest, make_model


class Training:
    """Data, model and notes of one worker."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        generator = torch.Generator().manual_seed(2)
        shape = INPUTS[arguments.model]
        self.inputs = torch.randn(arguments.samples, *shape, generator=generator, dtype=torch.float64)
        self.targets = self.inputs.flatten(1).mean(1, keepdim=True).mul(3).tanh()
        self.model = make_model(arguments.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 20, 0.9)
        self.name = f"{arguments.rank}-{os.getpid()}"
        self.notes: IO[str] = (arguments.notes / f"worker-{self.name}").open("a", buffering=1)
        self.notes.write(f"pid {os.getpid()} {os.uname().nodename}\n")

    @property
    def steps(self) -> int:
        """Of the whole training."""
        return int(self.arguments.epochs * (self.arguments.samples // self.arguments.batch))

    def batch(self, step: int) -> torch.Tensor:
        """Return this worker's samples of a step, counted from 0."""
        given = self.arguments
        turn, place = divmod(step, given.samples // given.batch)
        order = torch.randperm(given.samples, generator=torch.Generator().manual_seed(3 + turn))
        return order[place * given.batch : (place + 1) * given.batch].tensor_split(given.workers)[given.rank]

    def backward(self, model: nn.Module, ids: torch.Tensor) -> None:
        """Compute gradients."""
        nn.functional.mse_loss(model(self.inputs[ids]), self.targets[ids]).backward()

    def note_step(self, attempt: int, step: int, ids: torch.Tensor) -> None:
        """Write down a completed step, counted from 1."""
        self.notes.write(f"try {attempt} {step} {' '.join(map(str, ids.tolist()))}\ndone {attempt} {step}\n")
        time.sleep(self.arguments.pause)

    def end(self) -> None:
        """Write down the result."""
        torch.save(self.model.state_dict(), self.arguments.notes / f"final-{self.name}.pt")
        self.notes.write(f"end {digest(self.model)}\n")


def run_torchrun(training: Training) -> None:
    """Train with torch's class; restarts begin at the last checkpoint."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    saved = training.arguments.notes / "checkpoint.pt"
    step = 0
    if saved.exists():
        state = torch.load(saved)
        step = state["step"]
        for part in ("model", "optimizer", "scheduler"):
            getattr(training, part).load_state_dict(state[part])
    model = nn.parallel.DistributedDataParallel(training.model)
    training.notes.write(f"enter {attempt} {step} {time.time():.3f}\n")
    while step < training.steps:
        ids = training.batch(step)
        training.optimizer.zero_grad()
        training.backward(model, ids)
        training.optimizer.step()
        training.scheduler.step()
        step += 1
        training.note_step(attempt, step, ids)
        if step % training.arguments.every == 0 and training.arguments.rank == 0:
            state = {part: getattr(training, part).state_dict() for part in ("model", "optimizer", "scheduler")}
            torch.save({**state, "step": step}, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)


def run_torchft(training: Training) -> None:
    """Train with torchft's manager; a replica is one worker."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    parts = ("model", "optimizer", "scheduler")

    def load(state: dict[str, Any]) -> None:
        for part in parts:
            getattr(training, part).load_state_dict(state[part])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=lambda: {part: getattr(training, part).state_dict() for part in parts},
        min_replica_size=1,
        timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        replica_id=f"replica_{training.arguments.rank}_",
    )
    model = DistributedDataParallel(manager, training.model)
    optimizer = Optimizer(manager, training.optimizer)
    training.notes.write(f"enter 0 0 {time.time():.3f}\n")
    while (step := manager.current_step()) < training.steps:
        ids = training.batch(step)
        optimizer.zero_grad()
        training.backward(model, ids)
        optimizer.step()
        now = manager.current_step()
        if now > step:
            training.scheduler.step()
            # One that has just come takes part from the next step on.
            training.note_step(0, now, ids if manager.is_participating() and now == step + 1 else ids[:0])
    manager.shutdown(wait=False)


def main() -> None:
    """Train as asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("system", choices=["torchrun", "torchft"])
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--model", default="lenet", choices=INPUTS)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--samples", type=int, default=120)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--pause", type=float, default=0.05)
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints, under torchrun")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rank", type=int, default=int(os.environ.get("RANK", "0")))
    training = Training(parser.parse_args())
    (run_torchrun if training.arguments.system == "torchrun" else run_torchft)(training)
    training.end()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # torchft's threads, and gloo's, may outlive the work.
    os._exit(0)
