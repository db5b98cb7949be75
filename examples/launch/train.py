"""A small job that every file in this folder starts: saves checkpoints, stops cleanly, resumes after a restart."""

import argparse
import os
from pathlib import Path

import torch

import poseidon
from poseidon.job.tell import tell
from poseidon.launch.stopping import Stopping


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    arguments = parser.parse_args()

    world = poseidon.init()
    torch.manual_seed(world.rank)
    model = poseidon.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first = 0
    if int(os.environ.get("POSEIDON_RESTART", "0")) > 0 and arguments.checkpoint.exists():
        state = torch.load(arguments.checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        first = state["step"] + 1

    loss = torch.zeros(())
    with Stopping() as stop:  # Ctrl-C: finish the step, save, end
        for step in range(first, arguments.steps):
            inputs = torch.randn(16, 32)
            optimizer.zero_grad()
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            tell(loss=loss.item())  # for the launcher's status line
            is_last = stop.agreed() or step == arguments.steps - 1
            if world.rank == 0 and (is_last or step % 10 == 9):
                torch.save({"model": model.state_dict(), "step": step}, arguments.checkpoint)
            if is_last:
                print(f"worker {world.rank} of {world.size}: step {step}, loss {loss.item():.4f}")
                break


if __name__ == "__main__":
    main()
