"""Workers that come, go and wait at different times: each is told what the others do, and nobody waits in vain."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import poseidon
from poseidon.errors import WorkerLostError
from poseidon.team.team import Team
from ranks import run_ranks
from run_jobs import run_poseidon
from twins import wrap

SCRIPT = """
import sys
import torch
import poseidon

world = poseidon.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
model = poseidon.DistributedDataParallel(model, routes={{"*": "{route}"}})
for step in range(6):
    if world.rank == 1 and step == 3:
        {leave}
    model(torch.randn(4, 8)).square().sum().backward()
"""


@pytest.mark.parametrize("route", ["sharded", "allreduce"])
def test_a_worker_that_finishes_early_says_so_at_once(tmp_path: Path, route: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(route=route, leave="break"))
    ended = run_poseidon("--nproc", "2", script, folder=tmp_path)
    assert ended.status == 1
    assert "rank 0" in ended.err
    assert "finished at step 2, finished backward" in ended.err
    assert "worker 1 had already ended with status 0: did it do fewer steps than the others?" in ended.err


def test_a_worker_that_fails_is_the_cause(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(route="sharded", leave="raise ValueError('the loss is nan')"))
    ended = run_poseidon("--nproc", "2", script, folder=tmp_path)
    assert ended.status == 1
    # The launcher may end the other before that has told its own story, which test_life.py has.
    assert "worker 1 on localhost failed first" in ended.err
    assert "ValueError: the loss is nan" in ended.err


# Some workers wrap a model and others do something else.

LIMIT_S = 3.0


def _start_different_things(other: str) -> str:
    # As --auto has one before the script starts. Both would give up at the same time.
    team = Team(None, LIMIT_S if dist.get_rank() == 0 else 60.0)

    def start() -> None:
        if dist.get_rank() == 0:
            wrap(nn.Linear(8, 8), timeout_s=LIMIT_S)
        elif other == "new_group":
            # A group of all workers is for all to make, in the same order.
            dist.new_group()
        else:
            team.gather_ints([1], "a decision of all workers")

    with pytest.raises(WorkerLostError) as caught:
        start()
    team.close(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("other", "waits_for"),
    [("new_group", "new_group() of torch.distributed"), ("gather", "a decision of all workers")],
)
def test_workers_that_start_different_things_are_told_so_within_the_limit(other: str, waits_for: str) -> None:
    lost = [1] if other == "new_group" else []
    results = run_ranks(_start_different_things, 2, other, lost=lost, timeout_s=40)
    assert "for all workers to wrap a model (rank 1 did not come)" in results[0]
    assert f"is alive, at step 0, starting, waiting for {waits_for}" in results[0]


def _wrap_on_all_in_one_order() -> bool:
    evens = dist.new_group([0, 1])
    first = wrap(nn.Linear(8, 8))
    halves = dist.new_group([0])
    second = wrap(nn.Linear(4, 4), process_group=evens)
    del halves
    for model, width in ((first, 8), (second, 4)):
        model(torch.randn(3, width)).square().sum().backward()
    return True


def test_groups_and_models_made_in_one_order_work() -> None:
    assert run_ranks(_wrap_on_all_in_one_order, 2) == [True, True]


# What a script draws at random does not depend on Poseidon.


def _random_states() -> list[bytes]:
    state = np.random.get_state()
    return [
        torch.get_rng_state().numpy().tobytes(),
        np.asarray(state[1]).tobytes() + str(state[2:]).encode(),
        repr(random.getstate()).encode(),
    ]


def _wrap_and_compare(kind: str) -> list[bool]:
    torch.manual_seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    random.seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    inputs = torch.randn(4, 8)
    before = _random_states()
    wrapped: nn.Module
    if kind == "wrap":
        wrapped = wrap(model)
    elif kind == "stale":
        wrapped, optimizer = poseidon.distribute(model, optimizer, consistency="ssp", staleness=1)
    else:
        update = "server" if kind == "server" else "worker"
        wrapped, optimizer = poseidon.distribute(model, optimizer, update=update)
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(inputs).square().sum().backward()
        optimizer.step()
    return [left == right for left, right in zip(before, _random_states(), strict=True)]


@pytest.mark.parametrize("kind", ["wrap", "distribute", "server", "stale"])
def test_wrapping_and_training_leave_all_random_numbers_alone(kind: str) -> None:
    assert run_ranks(_wrap_and_compare, 2, kind) == [[True, True, True]] * 2
