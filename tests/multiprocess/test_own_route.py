"""A route of one's own, from this file alone: registered, planned, trained with, simulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import poseidon
from poseidon.errors import ConfigError
from poseidon.planning.cluster import Cluster
from poseidon.planning.costs import Cost
from poseidon.planning.planner import make_plan
from poseidon.planning.route import Route
from poseidon.planning.schedule import Model, Packing, make_schedule
from poseidon.planning.transfers import Conditions
from poseidon.routes import register, standard_routes, unregister
from poseidon.routes.base import Brought, Context, Exchange, Exchanger, LiveItem
from poseidon.team.team import Team
from poseidon.units import Load, ParameterSpec, Unit
from ranks import run_ranks


class EverybodyRoute(Route):
    """Every worker sends its whole gradient to every other one, and all add them up in rank order."""

    name = "everybody"
    summary = "whole gradients from everybody to everybody"

    @property
    def queue(self) -> str:
        return "everybody"

    def accepts(self, unit: Unit) -> bool:
        return not unit.is_sparse

    def cost(self, unit: Unit, load: Load | None, cluster: Cluster) -> Cost:
        wire_bytes = unit.size_bytes * (cluster.machines - 1)
        return Cost(wire_bytes, wire_bytes / cluster.between.bytes_per_s, 0.0)

    def is_offered(self, cluster: Cluster) -> bool:
        return False

    def open(self, context: Context) -> Exchanger:
        return EverybodyExchanger(context.team)


class EverybodyExchanger(Exchanger):
    def __init__(self, team: Team) -> None:
        self._team = team
        self._group = team.new_group()

    def start(self, item: LiveItem, brought: Sequence[Brought], step: int) -> Exchange:
        flat = item.pack()
        parts = [torch.empty_like(flat) for _ in range(self._team.size)]
        work = dist.all_gather(parts, flat, group=self._group, async_op=True)
        return EverybodyExchange(self._team, work, parts, flat, item.name)


class EverybodyExchange(Exchange):
    def __init__(self, team: Team, work: Any, parts: list[Tensor], flat: Tensor, name: str) -> None:
        self._team, self._work, self._parts, self._flat, self._name = team, work, parts, flat, name

    def finish(self, is_used: bool) -> None:
        self._team.wait(self._work, self._name)
        self._flat.copy_(torch.stack(self._parts).mean(0))


class ProductsRoute(EverybodyRoute):
    """Every worker multiplies its own factors, and all add the products up in rank order."""

    name = "products"
    summary = "products of a linear layer's factors from everybody to everybody"
    delivers = "factors"

    def accepts(self, unit: Unit) -> bool:
        return unit.kind == "linear"

    def open(self, context: Context) -> Exchanger:
        return ProductsExchanger(context.team)


class ProductsExchanger(EverybodyExchanger):
    def start(self, item: LiveItem, brought: Sequence[Brought], step: int) -> Exchange:
        ((x, g),) = brought[0].take_pieces()
        flat = torch.cat([(g.t() @ x).flatten(), g.sum(0)])
        parts = [torch.empty_like(flat) for _ in range(self._team.size)]
        work = dist.all_gather(parts, flat, group=self._group, async_op=True)
        return ProductsExchange(self._team, work, parts, flat, item)


class ProductsExchange(EverybodyExchange):
    def __init__(self, team: Team, work: Any, parts: list[Tensor], flat: Tensor, item: LiveItem) -> None:
        super().__init__(team, work, parts, flat, item.name)
        self._parameters = item.parameters

    def finish(self, is_used: bool) -> None:
        super().finish(is_used)
        sizes = [parameter.numel() for parameter in self._parameters]
        for parameter, mean in zip(self._parameters, self._flat.split(sizes), strict=True):
            parameter.grad = mean.view_as(parameter)


@pytest.fixture
def _registered() -> Iterator[None]:
    register(EverybodyRoute())
    yield
    unregister("everybody")


def _train(distributes: bool, route: str) -> list[Tensor]:
    for own in (EverybodyRoute(), ProductsRoute()):
        if own.name not in standard_routes():
            register(own)
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    routes = {"*": route}
    if distributes:
        wrapped, _ = poseidon.distribute(model, optimizer, routes=routes)
    else:
        wrapped = poseidon.DistributedDataParallel(model, routes=routes)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(5):
        optimizer.zero_grad()
        wrapped(torch.randn(4, 6, generator=generator)).square().mean().backward()
        optimizer.step()
    wrapped.verify_replicas()
    assert wrapped.plan is not None
    assert set(wrapped.plan.routes.values()) == {route}
    values = [parameter.detach().clone() for parameter in model.parameters()]
    wrapped.close()
    return values


@pytest.mark.parametrize("route", ["everybody", "products"])
@pytest.mark.parametrize("distributes", [False, True])
def test_a_route_of_ones_own_trains_to_the_same_result(distributes: bool, route: str) -> None:
    own = run_ranks(_train, 3, distributes, route)
    standard = run_ranks(_train, 3, distributes, "allreduce")
    for one, other in zip(own[0], standard[0], strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("_registered")
def test_planner_and_simulator_know_it_too() -> None:
    routes, cluster = standard_routes(), Cluster(4)
    conv = Unit("conv", "dense", (ParameterSpec("conv.weight", (64, 9), 4),))
    plan = make_plan([conv], {}, cluster, routes, {"conv": "everybody"})
    assert plan.routes == {"conv": "everybody"}
    assert "everybody" in str(plan)
    assert make_plan([conv], {}, cluster, routes).routes == {"conv": "allreduce"}
    schedule = make_schedule(Model.of([conv]), ["everybody"], [0], routes, Packing(cluster))
    (transfer,) = routes["everybody"].transfers(schedule.items[0], Conditions(cluster))
    assert transfer.out_bytes == 64 * 9 * 4 * 3
    assert transfer.is_collective


@pytest.mark.usefixtures("_registered")
def test_a_second_route_of_the_same_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="two routes are named 'everybody'"):
        register(EverybodyRoute())


def test_an_unknown_route_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown route 'everybody'; known: allreduce, factors, rows, sharded"):
        poseidon.DistributedDataParallel(nn.Linear(2, 2), routes={"*": "everybody"})
