"""A job that encrypts: nothing of it goes through torch.distributed, and what would have to is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import poseidon
from poseidon.errors import ConfigError, UnsupportedError
from poseidon.planning.cluster import Cluster
from ranks import run_ranks

ENCRYPT = {"POSEIDON_WIRE_ENCRYPT": "1"}


class Model(nn.Module):
    """Something for every route: a convolution, a table, a wide linear layer, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(200, 16)
        self.conv = nn.Conv1d(16, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.wide = nn.Linear(64, 300)
        self.head = nn.Linear(300, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        seen = self.norm(self.conv(self.table(words).transpose(1, 2)))
        return self.head(torch.relu(self.wide(seen.flatten(1))))


def _forbid_collectives() -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("torch.distributed was asked to send something")

    for name in ("all_reduce", "broadcast", "all_gather", "isend", "irecv", "new_group", "all_to_all_single"):
        setattr(dist, name, refuse)


def _train(mode: str, encrypts: bool) -> tuple[list[str], float]:
    if encrypts:
        _forbid_collectives()
    # Rank 0's parameters count; the others' must be replaced.
    torch.manual_seed(dist.get_rank())
    model = Model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    if mode == "wrapper":
        wrapped: Any = poseidon.DistributedDataParallel(model, cluster=Cluster(3))
    else:
        # Factors, so that the plan's prediction has to know them without an allreduce to compare with.
        options: dict[str, Any] = {"update": "server"} if mode == "server" else {"routes": {"wide": "factors"}}
        wrapped, optimizer = poseidon.distribute(model, optimizer, cluster=Cluster(3), **options)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(6):
        words = torch.randint(0, 200, (6, 8), generator=generator)
        optimizer.zero_grad()
        # The penalty reaches weights that travel in a short form, outside of it.
        penalty = 0.01 * model.wide.weight.square().sum()
        (wrapped(words).square().mean() + penalty).backward()
        optimizer.step()
    if mode != "server":
        wrapped.verify_replicas()
    routes = sorted({entry.route for entry in wrapped.plan.entries})
    total = float(sum(p.detach().double().abs().sum() for p in model.parameters()))
    wrapped.close()
    return routes, total


@pytest.mark.parametrize("mode", ["wrapper", "distribute", "server"])
def test_every_route_of_an_encrypted_job_is_the_wire_and_brings_the_same_means(mode: str) -> None:
    encrypted = run_ranks(_train, 3, mode, True, env=ENCRYPT)
    plain = run_ranks(_train, 3, mode, False)
    assert len({total for _, total in encrypted}) == 1, "replicas differ"
    assert "allreduce" not in encrypted[0][0]
    assert encrypted[0][1] == pytest.approx(plain[0][1], rel=1e-5)


def _refused() -> list[str]:
    forced = {"conv": "allreduce"}
    complex_ones = nn.ParameterList([torch.zeros(2, dtype=torch.complex64)])
    hooked = poseidon.DistributedDataParallel(Model(), cluster=Cluster(2))
    told = []
    for make in (
        lambda: poseidon.DistributedDataParallel(Model(), routes=forced, cluster=Cluster(2)),
        lambda: poseidon.DistributedDataParallel(Model(), routes={"*": "allreduce"}, cluster=Cluster(2)),
        lambda: hooked.register_comm_hook(None, _hook),
        lambda: poseidon.DistributedDataParallel(complex_ones, cluster=Cluster(2)),
    ):
        with pytest.raises((ConfigError, UnsupportedError)) as caught:
            make()
        told.append(str(caught.value))
    hooked.close()
    return told


def _hook(state: object, bucket: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def test_what_cannot_be_encrypted_is_refused_in_one_line() -> None:
    for told in run_ranks(_refused, 2, env=ENCRYPT):
        assert len(told) == 4
        assert all("POSEIDON_WIRE_ENCRYPT" in one and "\n" not in one for one in told), told
