"""A table that is a linear layer's weight too: its gradient travels as touched rows, and factors or a full gradient."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import poseidon
from ranks import run_ranks
from twins import slow_cluster

WORDS, WIDTH = 300, 12


class Speaker(nn.Module):
    """Predicts words with the table that it reads them from."""

    def __init__(self, head_first: bool = False) -> None:
        super().__init__()
        if head_first:
            self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        if not head_first:
            self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.words(tokens))))


def _loss(model: nn.Module, number: int, way: str) -> Tensor:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(10 * number + rank)
    size = 0 if way == "uneven" and number == 3 and rank == 1 else 5
    tokens = torch.randint(0, WORDS, (size,), generator=generator)
    loss = F.cross_entropy(model(tokens).float(), tokens, reduction="sum") / 5
    if way == "penalty" and number % 2:
        loss = loss + 0.01 * model.module.words.weight.square().sum()
    return loss


def _train(kind: str, way: str, amp: torch.dtype | None, route: str = "tied") -> tuple[dict[str, Tensor], Any]:
    torch.manual_seed(0)
    inner = Speaker(head_first=way == "head first")
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9)
    model: Any
    if kind == "torch":
        model = nn.parallel.DistributedDataParallel(inner)
    elif kind == "wrapper":
        model = poseidon.DistributedDataParallel(inner, cluster=slow_cluster(), routes={_name(way): route})
    else:
        model, _ = poseidon.distribute(inner, optimizer, cluster=slow_cluster(), routes={_name(way): route})
    context = contextlib.nullcontext() if amp is None else torch.autocast("cpu", amp)
    for number in range(6):
        optimizer.zero_grad(set_to_none=way != "zeros")
        if way == "accumulating":
            with model.no_sync(), context:
                _loss(model, 50 + number, way).backward()
        if way == "backward twice":
            with context:
                _loss(model, 50 + number, way).backward()
        with context:
            loss = _loss(model, number, way)
        loss.backward()
        optimizer.step()
    if kind != "torch":
        model.verify_replicas()
    return {name: parameter.detach().clone() for name, parameter in inner.named_parameters()}, model


def _name(way: str) -> str:
    return "head" if way == "head first" else "words"


WAYS = ["plain", "head first", "penalty", "accumulating", "backward twice", "zeros", "uneven"]


def _compare(route: str) -> None:
    for way in WAYS:
        for amp in (None, torch.bfloat16):
            theirs, _ = _train("torch", way, amp)
            ours, wrapped = _train("wrapper", way, amp, route)
            deferred, distributed = _train("distribute", way, amp, route)
            assert wrapped.plan.routes[_name(way)] == route
            for each, value in theirs.items():
                tolerance = 1e-6 if amp is None else 5e-3
                torch.testing.assert_close(ours[each], value, rtol=tolerance, atol=tolerance, msg=f"{each}, {way}")
                assert torch.equal(ours[each], deferred[each]), (each, way)
            wrapped.close()
            distributed.close()
            assert type(wrapped.module.head) is nn.Linear
            assert type(wrapped.module.words) is nn.Embedding


@pytest.mark.parametrize(("workers", "route"), [(2, "tied"), (3, "tied"), (2, "split"), (3, "split")])
def test_both_parts_of_a_tied_tables_gradient_add_up(workers: int, route: str) -> None:
    run_ranks(_compare, workers, route)
