"""Gradients that were accumulated under no_sync() travel in full, by the routes that the plan has for full ones."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import poseidon
from poseidon.engine import choosing
from poseidon.errors import MismatchError
from ranks import run_ranks
from small_net import batch_of
from twins import slow_cluster

STEPS, PARTS = 6, 3


def _net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, precision: str, steps: int = STEPS) -> list[Tensor]:
    """Train with three batches a step, but for one step in the middle that has a single one."""
    for step in range(steps):
        optimizer.zero_grad()
        count = 1 if step == 3 else PARTS
        for part in range(count):
            x, y = batch_of(10 * step + part, dist.get_rank())
            with (
                contextlib.nullcontext() if part == count - 1 else model.no_sync(),
                torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
            ):
                F.cross_entropy(model(x), y).div(count).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def _accumulates(mode: str, precision: str) -> set[str]:
    """Return the routes of full gradients after training like torch's class, and with its results."""
    net = _net()
    expected = _train(nn.parallel.DistributedDataParallel(net), torch.optim.AdamW(net.parameters(), 0.01), precision)
    net = _net()
    model, optimizer = net, torch.optim.AdamW(net.parameters(), 0.01)
    # Of the full gradients most go by the server. What the last layer sends is none after a step alone.
    routes = {"0": "sharded", "1": "allreduce", "2": "sharded", "4": "factors"}
    if mode == "wrapper":
        model = poseidon.DistributedDataParallel(net, routes=routes, cluster=slow_cluster())
    else:
        model, optimizer = poseidon.distribute(net, optimizer, routes=routes, cluster=slow_cluster())
    found = _train(model, optimizer, precision)
    # A product of factors in bf16 is closer to the true one than what autocast computes.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-4 if precision == "bf16" else 1e-6)
    model.verify_replicas()
    schedules = model._engine._schedules
    assert schedules.planned.schedule.route_of == ("sharded", "allreduce", "sharded", "factors")
    used = schedules.dense.schedule.route_of
    model.close()
    return used


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("mode", ["wrapper", "distribute"])
def test_they_take_the_plans_routes_once_there_were_some(mode: str, precision: str) -> None:
    for used in run_ranks(_accumulates, 2, mode, precision):
        assert used == ("sharded", "allreduce", "sharded", "sharded")


def _chooses(mode: str) -> tuple[str, bool]:
    choosing.MOST_LAPS = 3
    net = nn.Sequential(nn.Conv1d(1, 4, 3), nn.Flatten(), nn.LayerNorm(24))
    model, optimizer = net, torch.optim.SGD(net.parameters(), 0.01)
    if mode == "wrapper":
        model = poseidon.DistributedDataParallel(net, cluster=slow_cluster())
    else:
        model, optimizer = poseidon.distribute(net, optimizer, cluster=slow_cluster())
    for step in range(80):
        optimizer.zero_grad()
        for part in range(2):
            x, _ = batch_of(10 * step + part, dist.get_rank())
            with model.no_sync() if part == 0 else contextlib.nullcontext():
                model(x[:, None]).square().mean().backward()
        optimizer.step()
        if step > 3 and not model.is_choosing:
            break
    model.verify_replicas()
    plan, is_open = model.plan, model.is_choosing
    model.close()
    assert len([one for one in plan.tried if one.measured_s is not None]) > 1
    return plan.name, is_open


@pytest.mark.parametrize("mode", ["wrapper", "distribute"])
def test_plans_without_short_forms_are_tried_in_such_steps_too(mode: str) -> None:
    machines = [{"POSEIDON_MACHINE": name, "POSEIDON_TRIALS": "fresh"} for name in ("one", "two")]
    runs = run_ranks(_chooses, 2, mode, env=machines)
    assert len(set(runs)) == 1
    assert not runs[0][1]


def _both_updates() -> bool:
    trained = []
    for options in ({"routes": {"*": "sharded"}}, {"update": "server"}):
        net = _net()
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        model, optimizer = poseidon.distribute(net, optimizer, cluster=slow_cluster(), **options)
        trained.append(_train(model, optimizer, "float32"))
        model.close()
    return all(map(torch.equal, *trained))


def test_owners_that_step_give_the_bits_of_the_server_after_accumulation_too() -> None:
    assert all(run_ranks(_both_updates, 3, env=[{"POSEIDON_MACHINE": str(rank)} for rank in range(3)]))


def _one_accumulates(mode: str) -> str:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    options = {"find_unused_parameters": True, "routes": {"*": "factors", "1": "allreduce"}, "cluster": slow_cluster()}
    if mode == "wrapper":
        model = poseidon.DistributedDataParallel(net, **options)
    else:
        model, optimizer = poseidon.distribute(net, optimizer, **options)
    try:
        for step in range(4):
            optimizer.zero_grad()
            x, y = batch_of(step, dist.get_rank())
            if step == 2 and dist.get_rank() == 1:
                with model.no_sync():
                    F.cross_entropy(model(x), y).backward()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    except MismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mode", ["wrapper", "distribute"])
def test_a_worker_that_accumulates_alone_is_named_whatever_else_travels(mode: str) -> None:
    for error in run_ranks(_one_accumulates, 2, mode):
        assert "use no_sync() on all workers or on none" in error
