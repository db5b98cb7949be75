"""Each route against the plain mean of all workers' gradients, on random shapes, batches and layouts of machines."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import nightly
import poseidon
from poseidon.planning.cluster import Cluster, Link, parse_rate
from poseidon.routes import gather
from poseidon.routes.room import Room
from poseidon.routes.rows import RowsExchanger
from ranks import run_ranks
from twins import seed_of_rank, slow_cluster, wrap


def _mean_gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    """Return what the exchange must give: local gradients of a plain model, averaged in rank order."""
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    means = []
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        mine = torch.zeros_like(parameter) if gradient is None else gradient
        everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, mine.contiguous())
        means.append(torch.stack(everybody).mean(0))
    return means


def _check(make: Any, draw: Any, routes: dict[str, str], steps: int, options: dict[str, Any]) -> Any:
    plain = make()
    wrapped = wrap(make(), routes=routes, **options)
    wrapped.module.load_state_dict(plain.state_dict())
    kept: list[tuple[Tensor, Tensor]] = []
    for number in range(steps):
        inputs = draw(number)
        expected = _mean_gradients(plain, plain(*inputs).square().sum())
        wrapped.zero_grad()
        wrapped(*inputs).square().sum().backward()
        for (name, parameter), want in zip(wrapped.module.named_parameters(), expected, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, want, rtol=1e-9, atol=1e-12, msg=f"{name} in step {number}")
        for mine in wrapped.parameters():
            everybody = [torch.empty_like(mine.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(everybody, mine.grad)
            assert all(torch.equal(everybody[0], other) for other in everybody)
            kept.append((mine.grad, mine.grad.clone()))
    # Memory may be used again, but not while somebody holds a gradient of an earlier step.
    assert all(torch.equal(gradient, copy) for gradient, copy in kept)
    assert wrapped.plan is not None
    assert set(wrapped.plan.routes.values()) == set(routes.values())
    return wrapped


def _random_linears(seed: int, route: str, options: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)
    shapes = random.Random(seed)
    for _ in range(nightly.amount(2, 40)):
        inputs, outputs, has_bias = shapes.randint(1, 40), shapes.randint(1, 40), shapes.random() < 0.7
        leading = [shapes.randint(1, 4) for _ in range(shapes.randint(0, 2))]
        rows = [[shapes.randint(0, 5) for _ in range(dist.get_world_size())] for _ in range(3)]

        def draw(number: int, leading: list[int] = leading, rows: Any = rows, inputs: int = inputs) -> tuple[Tensor]:
            generator = torch.Generator().manual_seed(seed + 10 * number + dist.get_rank())
            size = rows[number][dist.get_rank()] if number else 2  # the plan needs rows in the first step
            return (torch.randn(size, *leading, inputs, generator=generator),)

        def make(inputs: int = inputs, outputs: int = outputs, has_bias: bool = has_bias) -> nn.Module:
            torch.manual_seed(seed)
            return nn.Linear(inputs, outputs, bias=has_bias)

        _check(make, draw, {"*": route}, 3, options).close()


def _random_embeddings(seed: int, route: str, options: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)
    shapes = random.Random(seed)
    for _ in range(nightly.amount(2, 40)):
        rows, width = shapes.randint(1, 60), shapes.randint(1, 9)
        counts = [[shapes.randint(0, 12) for _ in range(dist.get_world_size())] for _ in range(3)]

        def draw(number: int, rows: int = rows, counts: Any = counts) -> tuple[Tensor]:
            generator = torch.Generator().manual_seed(seed + 10 * number + dist.get_rank())
            size = counts[number][dist.get_rank()] if number else 3
            return (torch.randint(0, rows, (size,), generator=generator),)

        def make(rows: int = rows, width: int = width) -> nn.Module:
            torch.manual_seed(seed)
            return nn.Embedding(rows, width)

        _check(make, draw, {"*": route}, 3, options).close()


class _Tables(nn.Module):
    """Tables and layers whose parcels leave together."""

    def __init__(self, tables: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(10 + table, width + table // 2) for table in range(tables))
        self.layers = nn.ModuleList(nn.Linear(width + table // 2, 3) for table in range(tables))

    def forward(self, *indices: Tensor) -> Tensor:
        looked_up = [table(one) for table, one in zip(self.tables, indices, strict=True)]
        return torch.cat([layer(one) for layer, one in zip(self.layers, looked_up, strict=True)])


def _shared_messages(seed: int, packs_aside: bool) -> None:
    # As on CUDA, where that waits for the device.
    RowsExchanger._packs_aside = property(lambda _: packs_aside, lambda *_: None)  # type: ignore[assignment]
    torch.set_default_dtype(torch.float64)
    shapes = random.Random(seed)
    size, count = dist.get_world_size(), 3
    counts = [[[shapes.randint(0, 12) for _ in range(count)] for _ in range(size)] for _ in range(4)]

    def draw(number: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed + 10 * number + dist.get_rank())
        mine = counts[number][dist.get_rank()] if number else [5] * count
        return tuple(torch.randint(0, 10, (rows,), generator=generator) for rows in mine)

    def make() -> nn.Module:
        torch.manual_seed(seed)
        return _Tables(count, 4)

    routes = {"tables.*": "rows", "layers.*": "factors"}
    wrapped = _check(make, draw, routes, 4, {"cluster": Cluster(size)})
    found = {item.shipment for item in wrapped._engine._schedules.planned.schedule.items}
    assert sorted(map(len, found)) == [count, count], found
    wrapped.close()


def _train_gathered(defers: bool, dtype: torch.dtype, least_s: float) -> tuple[list[Tensor], list[Room], int]:
    """Train while the share of zeros changes, left out if that saves ``least_s``; return weights, rooms, bytes sent."""
    gather.LEAST_SAVED_S = least_s  # type: ignore[attr-defined]
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(40, 33), nn.ReLU(), nn.Linear(33, 24), nn.ReLU(), nn.Linear(24, 5)).to(dtype)
    options: Any = {"cluster": slow_cluster(), "routes": {"*": "factors"}, "gather_factors": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    wrapped: Any = poseidon.distribute(model, optimizer, **options)[0] if defers else wrap(model, **options)
    for number in range(10):
        x = torch.randn(9 if number == 6 else 6, 40, generator=seed_of_rank(number)).to(dtype).relu()
        if number in (3, 7) and dist.get_rank() == dist.get_world_size() - 1:
            x = x + 1  # no zeros here: on this worker they do not fit
        optimizer.zero_grad()
        wrapped(x).square().sum().backward()
        optimizer.step()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    exchanger = wrapped._engine._schedules._exchangers["factors"]
    wrapped.close()
    return weights, list(exchanger._rooms.values()), exchanger.sent_by_route()["factors"]


def _without_zeros(defers: bool, dtype: torch.dtype) -> None:
    weights, rooms, sent = _train_gathered(defers, dtype, 0.0)
    assert any(room.values for room in rooms), rooms
    assert max(room.overflows for room in rooms) > 0, rooms
    assert max(room.misfits for room in rooms) > 0, rooms
    plain_weights, plain_rooms, plain_sent = _train_gathered(defers, dtype, math.inf)
    assert not any(room.values for room in plain_rooms), plain_rooms
    assert sent < plain_sent
    for one, other in zip(weights, plain_weights, strict=True):
        assert torch.equal(one, other)


ROUTES = [
    (_random_linears, "factors", {}),
    (_random_linears, "factors", {"gather_factors": True}),
    (_random_linears, "allreduce", {}),
    (_random_linears, "sharded", {}),
    (_random_embeddings, "rows", {}),
    (_random_embeddings, "allreduce", {}),
]
LAYOUTS = ["a", "ab", "abc", "aabb", "abab", "aab", "aaabb"]
"""One letter per rank: the machine it is on."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("draws", "route", "options"), ROUTES, ids=["factors", "gather", "linear", "sharded", "rows", "table"]
)
def test_route_gives_the_mean(draws: Any, route: str, options: dict[str, Any], layout: str) -> None:
    ranks = max(2, len(layout))
    machines = [{"POSEIDON_MACHINE": layout[rank % len(layout)]} for rank in range(ranks)]
    run_ranks(draws, ranks, len(layout) + ord(layout[-1]), route, options, env=machines)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("defers", [False, True], ids=["wrapper", "distribute"])
def test_an_all_gather_without_zeros_gives_the_same_bits(defers: bool, dtype: torch.dtype) -> None:
    run_ranks(_without_zeros, 3, defers, dtype)


@pytest.mark.parametrize(("layout", "packs_aside"), [("abc", False), ("aab", True)])
def test_parcels_that_share_messages_give_the_mean(layout: str, packs_aside: bool) -> None:
    machines = [{"POSEIDON_MACHINE": machine} for machine in layout]
    run_ranks(_shared_messages, 3, ord(layout[1]), packs_aside, env=machines)


class _Bags(nn.Module):
    """Bags of rows, whose rows' gradients repeat, and a layer behind a ReLU, half of whose factors are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(300, 16, mode=mode) for mode in ("sum", "mean"))
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, bags: Tensor) -> Tensor:
        looked_up: Tensor = self.layers(torch.cat([table(bags) for table in self.tables], dim=1))
        return looked_up


def _train_bags(rate: str) -> tuple[list[Tensor], int]:
    torch.manual_seed(0)
    cluster = Cluster(dist.get_world_size(), between=Link(parse_rate(rate), 1e-4), source="given")
    model = wrap(_Bags(), cluster=cluster, routes={"tables.*": "rows", "layers.*": "factors"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for number in range(5):
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randint(0, 300, (12, 5), generator=generator)).square().sum().backward()
        optimizer.step()
    model.verify_replicas()
    assert model._engine is not None
    sent_bytes = model._engine._schedules._context.pairs._transport.stats.sent_bytes
    return [parameter.detach().clone() for parameter in model.parameters()], sent_bytes


@pytest.mark.parametrize("layout", ["abc", "aab"])
def test_messages_are_shorter_on_slow_links_and_give_the_same_bits(layout: str) -> None:
    machines = [{"POSEIDON_MACHINE": machine} for machine in layout]
    in_pieces = [{**machine, "POSEIDON_WIRE_MAX_MESSAGE_BYTES": "1024"} for machine in machines]
    fast = run_ranks(_train_bags, 3, "10gbit", env=machines)
    slow = run_ranks(_train_bags, 3, "500mbit", env=in_pieces)
    for (values, sent_bytes), (short_values, short_bytes) in zip(fast, slow, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(values, short_values, strict=True))
        assert short_bytes < 0.7 * sent_bytes


def _train_small(layout: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Conv1d(1, 3, 5), nn.Flatten(), nn.Linear(138, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(6):
        x = torch.randn(3, 1, 30, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
        optimizer.zero_grad()
        F.mse_loss(model(x), torch.ones(3, 4)).backward()
        optimizer.step()
    model.verify_replicas()
    assert model._team is not None
    assert len(model._team.topology.machines) == len(set(layout))
    return [parameter.detach() for parameter in model.parameters()]


def test_two_machines_of_two_workers_train_as_four_machines() -> None:
    flat = run_ranks(_train_small, 4, "abcd", env=[{"POSEIDON_MACHINE": name} for name in "abcd"])
    levels = run_ranks(_train_small, 4, "aabb", env=[{"POSEIDON_MACHINE": name} for name in "aabb"])
    for left, right in zip(flat[0], levels[0], strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


def _speeds_of_a_model_without_short_forms() -> str:
    model = poseidon.DistributedDataParallel(nn.Sequential(nn.Conv1d(1, 3, 5), nn.Flatten()))
    assert model._engine is not None
    return model._engine.cluster.source


@pytest.mark.parametrize(("layout", "source"), [("ab", "measured"), ("aa", "assumed")])
def test_links_between_machines_are_measured_even_where_all_layers_travel_whole(layout: str, source: str) -> None:
    # Sizes of chunks and buffers depend on them.
    machines = [{"POSEIDON_MACHINE": name} for name in layout]
    assert run_ranks(_speeds_of_a_model_without_short_forms, 2, env=machines) == [source, source]
