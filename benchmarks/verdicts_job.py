"""The job of ``verdicts.py``: trains a small net with paced compute, and does what a control file says.

``verdicts_job.py control.json``: an object with ``kind`` (``slow``, ``input``, ``hang`` or anything else), ``rank``,
``factor`` and ``seconds``. It is read before every step, so that causes begin and end while the job runs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import poseidon

FORWARD_S, BACKWARD_S = 0.03, 0.06


class Pace(torch.autograd.Function):
    """Takes time in forward and in backward, without a processor."""

    @staticmethod
    def forward(ctx, x, forward_s, backward_s):  # noqa: D102
        time.sleep(forward_s)
        ctx.backward_s = backward_s
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # noqa: D102
        time.sleep(ctx.backward_s)
        return gradient, None, None


def main() -> None:
    poseidon.init()
    rank, control = int(os.environ["RANK"]), Path(sys.argv[1])
    torch.manual_seed(0)
    width = int(os.environ.get("VERDICTS_WIDTH", "512"))
    first, last = nn.Linear(width, width), nn.Linear(width, 10)
    net = nn.Sequential(first, nn.ReLU(), nn.Linear(width, width), nn.ReLU(), last)

    class Paced(nn.Module):
        """Waits, then computes."""

        def __init__(self) -> None:
            super().__init__()
            self.net = net
            self.times = (FORWARD_S, BACKWARD_S)

        def forward(self, x):
            return self.net(Pace.apply(x, *self.times))

    paced = Paced()
    routes = {"*": os.environ.get("VERDICTS_ROUTE", "allreduce")}
    mode = os.environ.get("VERDICTS_MODE", "wrapper")
    optimizer = torch.optim.SGD(net.parameters(), 0.001)
    if mode == "wrapper":
        model = poseidon.DistributedDataParallel(paced, routes=routes, trials=False)
    else:
        model, optimizer = poseidon.distribute(paced, optimizer, routes=routes, trials=False)
    batch = torch.randn(16, width)

    def load(wait_s: float) -> torch.Tensor:
        time.sleep(wait_s)
        return batch.clone().requires_grad_()

    for step in range(10**9):
        asked = json.loads(control.read_text())
        is_mine = asked["rank"] == rank
        if asked["kind"] == "stop":
            break
        factor = asked["factor"] if is_mine and asked["kind"] == "slow" else 1.0
        paced.times = (FORWARD_S * factor, BACKWARD_S * factor)
        x = load(asked["seconds"] if is_mine and asked["kind"] == "input" else 0.0)
        loss = model(x).square().mean()
        while is_mine and asked["kind"] == "hang":
            time.sleep(0.05)
            asked = json.loads(control.read_text())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 100 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
