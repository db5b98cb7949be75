"""Training loops for tests that compare two ways to train bit by bit: one call is one step, on pictures of 6 x 6."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import twins


def loss(model: nn.Module, number: int) -> Tensor:
    """Return the loss for a batch that differs between ranks and numbers."""
    generator = twins.seed_of_rank(number)
    x, y = torch.randn(6, 3, 6, 6, generator=generator), torch.randint(0, 5, (6,), generator=generator)
    return nn.functional.cross_entropy(model(x), y)


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    loss(model, number).backward()
    optimizer.step()


def accumulating(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    with model.no_sync():  # type: ignore[operator]
        loss(model, 10 * number).backward()
    loss(model, 10 * number + 1).backward()
    optimizer.step()
    optimizer.zero_grad()


def clipping(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    loss(model, number).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def evaluating(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    plain(model, optimizer, number)
    model.eval()
    with torch.no_grad():
        loss(model, 100 + number)
    model.train()


def stepping_twice(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    loss(model, number).backward()
    optimizer.step()
    optimizer.step()


def sharing(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Leave the first layer to another optimizer, which steps on the gradients of two backwards, and then of one."""
    mine, others = [*model.parameters()][:2], [*model.parameters()][2:]
    optimizer.param_groups[0]["params"] = others
    optimizer.zero_grad() if number < 3 else model.zero_grad()
    loss(model, number).backward()
    optimizer.step()
    if number % 2:
        other = torch.optim.SGD(mine, lr=0.1)
        other.step()
        if number < 3:
            other.zero_grad()


def never_clearing(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    loss(model, number).backward()
    optimizer.step()
    if number == 3:
        model.zero_grad()


def backward_twice(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    loss(model, number).backward()
    loss(model, 50 + number).backward()
    optimizer.step()
