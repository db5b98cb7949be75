"""A small job that every file in this folder starts: saves checkpoints, stops cleanly, goes on when started again."""

import argparse

import torch

import poseidon
from poseidon.job.tell import tell


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--checkpoints", default="checkpoints", help="a folder on the machine of worker 0")
    arguments = parser.parse_args()

    world = poseidon.init()
    torch.manual_seed(world.rank)
    model = poseidon.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with poseidon.Checkpoint(arguments.checkpoints, every=10, model=model, optimizer=optimizer) as checkpoint:
        first = checkpoint.resume()
        loss = torch.zeros(())
        for step in range(first, arguments.steps):
            inputs = torch.randn(16, 32)
            optimizer.zero_grad()
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            tell(loss=loss.item())  # for the launcher's status line
            checkpoint.step(step + 1)  # after Ctrl-C: saves, and ends the job
        checkpoint.save(arguments.steps)
    done = arguments.steps - first
    print(f"worker {world.rank} of {world.size}: {done} steps from step {first}, loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
