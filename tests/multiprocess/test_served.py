"""``update="server"`` gives the bits that ``distribute`` gives, whatever is read in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import poseidon
import twins
from ranks import run_ranks

Loop = Callable[[nn.Module, torch.optim.Optimizer, int], Any]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-3),
}


def _net() -> nn.Module:
    """Large enough for a bucket to be cut inside a parameter, at odd places."""
    return nn.Sequential(
        nn.Conv2d(3, 7, 3, padding=1),
        nn.BatchNorm2d(7),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(7 * 36, 101),
        nn.ReLU(),
        nn.Linear(101, 5),
    )


def _loss(model: nn.Module, number: int) -> Tensor:
    generator = twins.seed_of_rank(number)
    x, y = torch.randn(6, 3, 6, 6, generator=generator), torch.randint(0, 5, (6,), generator=generator)
    return nn.functional.cross_entropy(model(x), y)


def _plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    _loss(model, number).backward()
    optimizer.step()


def _train(update: str, make: MakeOptimizer, loop: Loop, steps: int = 5, **options: Any) -> list[Tensor]:
    torch.manual_seed(3)
    model = _net()
    optimizer = make(model)
    routes = {} if update == "server" else {"routes": {"*": "sharded"}}
    wrapped, optimizer = poseidon.distribute(
        model, optimizer, cluster=twins.slow_cluster(), update=update, **routes, **options
    )
    for number in range(steps):
        loop(wrapped, optimizer, number)
    found = [p.detach().clone() for p in model.parameters()]
    for _, entry in sorted(optimizer.state_dict()["state"].items()):
        found += [value.detach().clone() for value in entry.values() if isinstance(value, Tensor)]
    wrapped.verify_replicas()
    wrapped.close()
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert type(optimizer) is type(make(_net()))
    return found


def _compare(make: MakeOptimizer, loop: Loop, steps: int = 5, **options: Any) -> None:
    twins.quiet()
    plain, ours = (_train(update, make, loop, steps, **options) for update in ("worker", "server"))
    assert len(plain) == len(ours)
    for a, b in zip(plain, ours, strict=True):
        assert torch.equal(a, b), (a - b).abs().max()


def _apart(workers: int) -> list[dict[str, str]]:
    """Return an environment that makes every worker a machine of its own."""
    return [{"POSEIDON_MACHINE": str(rank)} for rank in range(workers)]


def _compare_optimizer(name: str) -> None:
    _compare(OPTIMIZERS[name], _plain_loop)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_bits_with_every_optimizer(name: str) -> None:
    run_ranks(_compare_optimizer, 3, name, env=_apart(3))
