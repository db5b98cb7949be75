"""The bytes that workers say they sent by each route are those that the route's arithmetic asks for."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

import poseidon
from poseidon.job import tell
from ranks import run_ranks

STEPS, BATCH = 6, 4


class Mixed(nn.Module):
    """One layer for each route."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 16)
        self.short = nn.Linear(16, 24)
        self.whole = nn.Linear(24, 40)
        self.joint = nn.Linear(40, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.joint(self.whole(self.short(self.table(x))))
        return found


ROUTES = {"table": "rows", "short": "factors", "whole": "sharded", "joint": "allreduce"}


def _send() -> dict[str, float]:
    """Return the bytes per step that this worker's routes count, once the plan is in force."""
    writing = os.pipe()[1]
    os.environ[tell.VARIABLE] = tell.name_pipe(writing)
    model = poseidon.DistributedDataParallel(Mixed(), routes=ROUTES, trials=False)
    assert model._team is not None
    recorder = model._team.watch.recorder
    assert recorder is not None
    recorder.close()  # its thread would look too, and each look returns what is new

    def train(steps: int) -> None:
        for _ in range(steps):
            model.zero_grad()
            model(torch.arange(BATCH)).square().sum().backward()
        torch.distributed.barrier()

    train(3)  # the first goes in full, and the plan follows
    recorder.traffic.look()
    train(STEPS)
    sent, queued, _ = recorder.traffic.look()
    assert queued == 0
    model.close()
    return {route: count / STEPS for route, count in sent.items()}


def test_workers_report_what_each_route_sent() -> None:
    workers = 3
    machines = [{"POSEIDON_MACHINE": f"machine {rank}"} for rank in range(workers)]
    told = run_ranks(_send, workers, env=machines)
    for sent in told:
        assert sent["allreduce"] == 2 * (workers - 1) * 4 * (40 * 8 + 8) / workers
        # Every row of input and output gradient to every other worker, and a few words.
        factors = (workers - 1) * 4 * BATCH * (16 + 24)
        assert factors <= sent["factors"] <= factors + 100 * (workers - 1)
        rows = (workers - 1) * 4 * BATCH * 16
        assert rows <= sent["rows"] <= rows + (workers - 1) * (8 * BATCH + 100)
    # Each value goes to its owner once and comes back once; who owns what differs.
    values = 24 * 40 + 40
    assert sum(sent["sharded"] for sent in told) == 2 * (workers - 1) * 4 * values
