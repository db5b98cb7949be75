"""Factors that travel by NCCL's all-gather, with and without their zeros, in room that is too small at times."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import twins
from ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# NCCL refuses two ranks on one GPU, unless it takes them for two hosts.
HOSTS = [
    {
        "NCCL_HOSTID": f"host{rank}",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    for rank in range(2)
]


def _meet_again() -> None:
    """Replace the group by one whose collectives on devices are NCCL's."""
    store = dist.PrefixStore("with NCCL", dist.distributed_c10d._get_default_store())
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=size)


def _make() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(600, 800), nn.ReLU(), nn.Linear(800, 700), nn.ReLU(), nn.Linear(700, 9)]
    return nn.Sequential(*layers).cuda()


def _inputs(number: int) -> Tensor:
    """Sparse values at first; later values, and then rows, that do not fit the room that was made for them."""
    rows = 5 if number in (6, 7) else 3
    x = torch.randn(rows, 600, generator=twins.seed_of_rank(number))
    return (x if number in (4, 5) else x * (x > 1)).cuda()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    F.mse_loss(model(_inputs(number)), torch.ones(1, 9, device="cuda").expand(len(_inputs(number)), 9)).backward()
    optimizer.step()


def _rounded_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """The backward inside autocast, too, which must not round what is made of the factors."""
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        model(_inputs(number)).float().square().mean().backward()
    optimizer.step()


def _compare(kind: str) -> None:
    _meet_again()
    if kind == "float32":
        routes = twins.compare_twins(_make, _step, steps=10, rtol=2e-5, atol=1e-6, lr=0.01)
    else:
        # Torch's class sums bf16 products; what differs is their rounding.
        routes = twins.compare_twins(_make, _rounded_step, steps=10, rtol=0.05, atol=2e-3, lr=0.01)
    assert list(routes.values())[:2] == ["factors", "factors"]


@pytest.mark.parametrize("kind", ["float32", "autocast"])
def test_means_are_those_of_torch(kind):
    run_ranks(_compare, 2, kind, env=HOSTS)


def _measure() -> list[int]:
    _meet_again()
    wrapped = twins.wrap(_make())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    peaks = []
    for number in range(4):
        _step(wrapped, optimizer, number)
    for _ in range(12):
        torch.cuda.reset_peak_memory_stats()
        _step(wrapped, optimizer, 0)
        peaks.append(torch.cuda.max_memory_allocated())
    return peaks


def test_memory_does_not_grow():
    for peaks in run_ranks(_measure, 2, env=HOSTS):
        assert max(peaks) <= min(peaks) + 2**20
