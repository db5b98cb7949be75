"""Gradients that land in the middle of a forward under autocast, or of an evaluation in inference mode."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import poseidon
from ranks import run_ranks

ROUTES = ["allreduce", "sharded", "factors"]


def _train(distributes: bool, route: str, dtype: torch.dtype | None, inside: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    inner, routes = model, {"*": route}
    if distributes:
        model, _ = poseidon.distribute(model, optimizer, routes=routes)
    else:
        model = poseidon.DistributedDataParallel(model, routes=routes)
    generator = torch.Generator().manual_seed(dist.get_rank())
    amp = contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)
    for step in range(6):
        optimizer.zero_grad()
        with amp:
            loss = model(torch.randn(4, 6, generator=generator)).float().square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        optimizer.step()
        if step == 3:
            with torch.inference_mode():
                model.eval()
                model(torch.ones(1, 6))
                model.train()
    model.verify_replicas()
    assert all(parameter.grad is None or parameter.grad.dtype is torch.float32 for parameter in inner.parameters())
    values = [parameter.detach().clone() for parameter in inner.parameters()]
    model.close()
    return values


@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("route", ROUTES)
def test_deferred_updates_have_the_bits_of_the_plain_wrapper(
    route: str, dtype: torch.dtype | None, inside: bool
) -> None:
    plain = run_ranks(_train, 2, False, route, dtype, inside)
    deferred = run_ranks(_train, 2, True, route, dtype, inside)
    for one, other in zip(plain[0], deferred[1], strict=True):
        assert torch.equal(one, other)
