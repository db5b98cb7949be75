"""Every whole plan, over real routes, tried while training goes on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import nn

import poseidon
from poseidon.engine.backward import LiveSchedule
from poseidon.planning import candidates
from poseidon.planning.cluster import Cluster, Link
from poseidon.planning.schedule import Schedule
from poseidon.routes.sharded import ShardedExchanger
from ranks import run_ranks

WORKERS = 2
STEPS = 130


def build() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Embedding(5000, 16), nn.Flatten(), nn.Linear(16 * 4, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 3)
    )


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, 5000, (4, 4), generator=torch.Generator().manual_seed(100 * step + rank))


def try_all(defers: bool) -> tuple[list[str], list[tuple[str, float | None]], set[str], list[torch.Tensor]]:
    """Train while every candidate has its turn, however far apart the predictions are."""
    from poseidon.engine import choosing

    candidates.CLOSE, candidates.MOST_TRIED = 1e9, 100
    choosing.FEWEST_LAPS = choosing.MOST_LAPS = 2
    rank = torch.distributed.get_rank()
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    cluster = Cluster(WORKERS, between=Link(1e9, 1e-4), flops=1e12)
    if defers:
        wrapped, optimizer = poseidon.distribute(model, optimizer, cluster=cluster)
    else:
        wrapped = poseidon.DistributedDataParallel(model, cluster=cluster)
    names: list[str] = []
    routes: set[str] = set()
    for step in range(STEPS):
        optimizer.zero_grad()
        wrapped(batch(rank, step)).square().mean().backward()
        optimizer.step()
        plan = wrapped.plan
        assert plan is not None
        routes |= set(plan.routes.values())
        if plan.name not in names[-1:]:
            names.append(plan.name)
    wrapped.finish_step()
    wrapped.verify_replicas()
    assert wrapped.plan is not None
    tried = [(one.name, one.measured_s) for one in wrapped.plan.tried]
    values = [parameter.detach().clone() for parameter in model.parameters()]
    wrapped.close()
    return names, tried, routes, values


def alone() -> list[torch.Tensor]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(WORKERS):
            (model(batch(rank, step)).square().mean() / WORKERS).backward()
        optimizer.step()
    return list(model.parameters())


@pytest.mark.parametrize("defers", [False, True])
def test_workers_agree_on_every_plan_and_replicas_stay_identical(defers: bool, tmp_path) -> None:
    common = {"POSEIDON_TRIALS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    env = [{**common, "POSEIDON_MACHINE": f"machine {rank}"} for rank in range(WORKERS)]
    first, second = run_ranks(try_all, WORKERS, defers, env=env)
    names, tried, routes, values = first
    assert second[:3] == first[:3]
    assert len(tried) > 4
    assert all(measured is not None for _, measured in tried), "not all plans had their turn"
    assert set(names) == {name for name, _ in tried}
    assert routes == {"allreduce", "sharded", "factors", "rows"}
    assert names[-1] == min(tried, key=lambda one: one[1])[0]
    for one, two, expected in zip(values, second[3], alone(), strict=True):
        assert torch.equal(one, two)
        torch.testing.assert_close(one, expected, atol=2e-5, rtol=1e-3)
    again = run_ranks(remembered, WORKERS, defers, env=env)
    assert again == [(names[-1], True)] * WORKERS


def remembered(defers: bool) -> tuple[str, bool]:
    """The plan after one step."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    cluster = Cluster(WORKERS, between=Link(1e9, 1e-4), flops=1e12)
    wrapped = (
        poseidon.distribute(model, optimizer, cluster=cluster)[0]
        if defers
        else poseidon.DistributedDataParallel(model, cluster=cluster)
    )
    wrapped(batch(torch.distributed.get_rank(), 0)).square().mean().backward()
    assert wrapped.plan is not None
    found = wrapped.plan.name, wrapped.plan.is_remembered
    wrapped.close()
    return found


def train_on_random_batches(defers: bool) -> tuple[int, list[int], list[int]]:
    """Train on batches of random size; return how often a plan was bound, and how many slots and sums were held."""
    from poseidon.engine.schedules import Schedules

    bound, bind = [0], Schedules._bind

    def count(self: Schedules, schedule: Schedule) -> LiveSchedule:
        bound[0] += 1
        return bind(self, schedule)

    Schedules._bind = count  # type: ignore[method-assign]
    torch.manual_seed(5)
    model: nn.Module = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40, bias=False), nn.Linear(40, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # On this wire, factors of a 40 x 40 layer pay up to about 10 rows.
    cluster = Cluster(WORKERS, between=Link(1e6, 0), flops=1e15, source="given")
    if defers:
        wrapped, optimizer = poseidon.distribute(model, optimizer, cluster=cluster, routes={"2": "sharded"})
    else:
        wrapped = poseidon.DistributedDataParallel(model, cluster=cluster, routes={"2": "sharded"})
    sizes, slots, sums = random.Random(3), [], []
    for step in range(300):
        rows = sizes.choice([4, 64]) if step < 150 else sizes.randint(1, 100)
        optimizer.zero_grad()
        wrapped(torch.randn(rows, 40)).square().mean().backward()
        optimizer.step()
        for exchanger in wrapped._engine._schedules._exchangers.values():
            if isinstance(exchanger, ShardedExchanger):
                slots.append(len(exchanger._slots))
                sums.append(len(exchanger._server._ledgers))
    wrapped.finish_step()
    wrapped.verify_replicas()
    wrapped.close()
    return bound[0], slots, sums


@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize("trials", ["0", "1"])
def test_random_batches_change_the_plan_seldom_and_keep_few_sums(defers: bool, trials: str, tmp_path: Path) -> None:
    machines = [{"POSEIDON_MACHINE": name, "POSEIDON_TRIALS": trials, "XDG_CACHE_HOME": str(tmp_path)} for name in "ab"]
    found = run_ranks(train_on_random_batches, WORKERS, defers, env=machines)
    for bound, slots, sums in found:
        assert bound <= 11  # the first, and two for each plan
        assert slots
        assert max(slots) == 1
        assert max(sums) <= 2
