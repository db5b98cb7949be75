"""A mixture of experts: each expert's gradient travels by the tokens that it got, which differ by worker and step."""

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

EXPERTS, WIDTH, HIDDEN, TOKENS = 4, 16, 32, 12

TOKENS_OF = [
    ((4, 4, 4, 0), (4, 6, 2, 0)),
    ((0, 12, 0, 0), (4, 4, 4, 0)),
    ((6, 6, 0, 0), (6, 6, 0, 0)),
    ((3, 3, 3, 3), (0, 0, 6, 6)),
    ((1, 1, 1, 9), (9, 1, 1, 1)),
    ((0, 0, 12, 0), (12, 0, 0, 0)),
    ((5, 5, 1, 1), (2, 2, 4, 4)),
    ((0, 12, 0, 0), (0, 12, 0, 0)),
]
"""By step, worker and expert. The last expert gets none in the step that decides the plan."""


class Mixture(nn.Module):
    """Sends each token to one expert, weighted by a learned gate."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.skips = skips
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(EXPERTS)
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero()[:, 0]
            if self.skips and not mine.numel():
                continue
            values = expert(x[mine]) * weights[mine, number].unsqueeze(-1)
            out = out.index_add(0, mine, values.to(out.dtype))
        return self.head(x + out)


def _train(kind: str, skips: bool, amp: torch.dtype | None, options: dict[str, Any]) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    inner = Mixture(skips)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9)
    model: Any
    if kind == "torch":
        model = nn.parallel.DistributedDataParallel(inner, find_unused_parameters=skips)
    elif kind == "wrapper":
        model = poseidon.DistributedDataParallel(inner, find_unused_parameters=skips, **options)
    else:
        model, _ = poseidon.distribute(inner, optimizer, find_unused_parameters=skips, **options)
    for number, counts in enumerate(TOKENS_OF):
        rank = dist.get_rank()
        x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))
        chosen = torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor(counts[rank]))
        optimizer.zero_grad()
        with contextlib.nullcontext() if amp is None else torch.autocast("cpu", amp):
            loss = F.cross_entropy(model(x, chosen).float(), torch.arange(TOKENS) % 3)
        loss.backward()
        optimizer.step()
    if kind != "torch":
        model.verify_replicas()
    return [parameter.detach().clone() for parameter in inner.parameters()], model


def _check(skips: bool, amp: torch.dtype | None, gathers: bool) -> None:
    options = {"cluster": slow_cluster(), "gather_factors": gathers}
    theirs, _ = _train("torch", skips, amp, {})
    ours, wrapped = _train("wrapper", skips, amp, options)
    deferred, distributed = _train("distribute", skips, amp, options)
    for a, b, c in zip(theirs, ours, deferred, strict=True):
        rtol, atol = (1e-5, 1e-6) if amp is None else (0.02, 0.01)
        torch.testing.assert_close(b, a, rtol=rtol, atol=atol)
        assert torch.equal(b, c)
    plan = wrapped.plan
    entries = {entry.unit: entry for entry in plan.entries}
    assert [entries[f"experts.{number}.0"].rows for number in range(EXPERTS)] == [4, 5, 3, None]
    value_bytes = 4 if amp is None else 2
    assert entries["experts.0.0"].costs["factors"].wire_bytes == 4 * (WIDTH + HIDDEN) * value_bytes
    assert plan.routes["experts.0.0"] == plan.routes["experts.1.2"] == "factors"
    assert plan.routes["experts.3.0"] == "allreduce"
    if gathers:
        rooms = wrapped._engine._schedules._exchangers["factors"]._rooms
        assert all(room.misfits <= 3 for room in rooms.values() if room is not None)
    wrapped.close()
    distributed.close()


@pytest.mark.parametrize("gathers", [False, True], ids=["messages", "gather"])
def test_experts_travel_by_their_own_tokens(gathers: bool) -> None:
    run_ranks(_check_all, 2, gathers)


def _check_all(gathers: bool) -> None:
    for skips in (True, False):
        for amp in (None, torch.bfloat16):
            _check(skips, amp, gathers)
