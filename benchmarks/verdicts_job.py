"""The job of ``verdicts.py``: trains a small net with paced compute, and does what a control file says.

``verdicts_job.py control.json``: an object with ``kind`` (``slow``, ``input``, ``disk``, ``hang`` or anything else),
``rank``, ``factor`` and ``seconds``. It is read before every step, so that causes begin and end while the job runs.
Beside it lie the pipes of worker N's slow disk: it writes a byte to ``askN`` and reads its batch from ``diskN``.
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
BURN_S = 0.008
"""Of a processor's time in backward, so that a worker whose processor is busy is slower."""
ROWS, WIDTH = 16, 512
"""Of a batch."""


class Pace(torch.autograd.Function):
    """Takes time in forward and in backward, nearly all of it without a processor."""

    @staticmethod
    def forward(ctx, x, forward_s, backward_s, burn_s):  # noqa: D102
        time.sleep(forward_s)
        ctx.backward_s, ctx.burn_s = backward_s, burn_s
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # noqa: D102
        burn(ctx.burn_s)
        time.sleep(ctx.backward_s)
        return gradient, None, None, None


def burn(seconds: float) -> None:
    """Use so much of a processor's time, however long it takes to get it."""
    matrix = torch.ones(128, 128)
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        matrix @ matrix


class Disk:
    """A worker's batches: a file, or a pipe that another process fills as slowly as it likes."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.size = size
        # Both ways, so that neither opening waits nor a read sees an end.
        self.ask, self.slow = (os.open(folder / f"{name}{rank}", os.O_RDWR) for name in ("ask", "disk"))
        self.file = os.open(folder / "batches", os.O_RDONLY)

    def read(self, is_slow: bool) -> bytearray:
        """Return a batch; the read blocks until it is there."""
        if not is_slow:
            return bytearray(os.pread(self.file, self.size, 0))
        os.write(self.ask, b"?")
        data = bytearray()
        while len(data) < self.size:
            data += os.read(self.slow, self.size - len(data))
        return data


def main() -> None:
    poseidon.init()
    rank, control = int(os.environ["RANK"]), Path(sys.argv[1])
    torch.manual_seed(0)
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)
    net = nn.Sequential(first, nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), last)

    class Paced(nn.Module):
        """Waits, then computes."""

        def __init__(self) -> None:
            super().__init__()
            self.net = net
            self.times = (FORWARD_S, BACKWARD_S, BURN_S)

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
    disk = Disk(control.parent, rank, 4 * ROWS * WIDTH)

    def load(wait_s: float, is_slow: bool) -> torch.Tensor:
        data = disk.read(is_slow)
        time.sleep(wait_s)
        return torch.frombuffer(data, dtype=torch.float32).reshape(ROWS, WIDTH).requires_grad_()

    for step in range(10**9):
        asked = json.loads(control.read_text())
        is_mine = asked["rank"] == rank
        if asked["kind"] == "stop":
            break
        factor = asked["factor"] if is_mine and asked["kind"] == "slow" else 1.0
        paced.times = (FORWARD_S * factor, BACKWARD_S * factor, BURN_S * factor)
        x = load(asked["seconds"] if is_mine and asked["kind"] == "input" else 0.0, is_mine and asked["kind"] == "disk")
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
