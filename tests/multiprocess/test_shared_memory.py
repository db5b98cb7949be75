"""Workers of one machine sum gradients in memory that they share: exactly, whatever the model, and without remains."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import poseidon
from poseidon.errors import WireError, WorkerLostError
from poseidon.routes.allreduce import AllreduceExchanger
from poseidon.wire.shared import SharedBlock
from ranks import run_ranks

SIZES = (1, 3, 64, 1000, 40_007)
LARGE = (700_001, 5, 2, 2_200_013)
"""For a thread, in several rounds, and one bucket with fewer values than workers."""
HALVES = (torch.float16, torch.bfloat16)


class Weighted(nn.Module):
    """Its gradients are the weights that forward is given; a parameter without one is unused."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.values = nn.ParameterList([torch.ones(size, dtype=dtype) for size in sizes])

    def forward(self, weights: Sequence[Tensor | None]) -> Tensor:
        pairs = zip(self.values, weights, strict=True)
        return torch.stack([(p * w).sum().double() for p, w in pairs if w is not None]).sum()


def weights_of(step: int, rank: int, sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def mean(parts: Sequence[Tensor], workers: int) -> Tensor:
    """The sum in rank order, in float32 where the dtype is shorter; then divided, and rounded once."""
    wide = [part.float() if part.dtype in HALVES else part for part in parts]
    total = wide[0].clone()
    for part in wide[1:]:
        total = total + part
    return (total / workers).to(parts[0].dtype)


def sums_in_memory(model: poseidon.DistributedDataParallel) -> bool:
    assert model._engine is not None
    found = [e for e in model._engine._schedules._exchangers.values() if isinstance(e, AllreduceExchanger)]
    return any(exchanger._local is not None or exchanger._levels is not None for exchanger in found)


def _check_means(sizes: Sequence[int], dtype: torch.dtype, in_place: bool) -> bool:
    workers, rank = dist.get_world_size(), dist.get_rank()
    model = poseidon.DistributedDataParallel(
        Weighted(sizes, dtype), bucket_cap_mb=0.1, gradient_as_bucket_view=in_place, trials=False
    )
    for step in range(5):
        model.zero_grad()
        model(weights_of(step, rank, sizes, dtype)).backward()
        expected = zip(*(weights_of(step, other, sizes, dtype) for other in range(workers)), strict=True)
        for parameter, parts in zip(model.module.values, expected, strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, mean(parts, workers))
    used = sums_in_memory(model)
    model.close()
    return used


@pytest.mark.parametrize(
    ("workers", "sizes", "dtype", "in_place"),
    [
        (2, SIZES, torch.float32, True),
        (3, SIZES, torch.float32, False),
        (4, SIZES, torch.float64, True),
        (3, SIZES, torch.float16, False),
        (4, SIZES, torch.bfloat16, True),
        (2, SIZES, torch.bfloat16, False),
        (2, LARGE, torch.float32, False),
        (3, LARGE, torch.float64, True),
        (3, LARGE, torch.bfloat16, False),
    ],
)
def test_means_are_sums_in_rank_order(workers: int, sizes: Sequence[int], dtype: torch.dtype, in_place: bool) -> None:
    assert run_ranks(_check_means, workers, sizes, dtype, in_place) == [True] * workers


def _odd_steps() -> None:
    """no_sync, parameters that one worker or all leave out, and two models whose steps alternate."""
    workers, rank = dist.get_world_size(), dist.get_rank()
    model, other = (
        poseidon.DistributedDataParallel(Weighted(SIZES, torch.float32), find_unused_parameters=True, trials=False)
        for _ in range(2)
    )
    for step in range(6):
        is_apart = step in (1, 2, 4)
        given: list[list[Tensor | None]] = [list(weights_of(step, r, SIZES, torch.float32)) for r in range(workers)]
        for r in range(workers):
            given[r][3] = None
            if r == step % workers:
                given[r][1] = None
        model.zero_grad()
        if is_apart:
            with model.no_sync():
                model(given[rank]).backward()
        model(given[rank]).backward()
        other.zero_grad()
        other(given[rank]).backward()
        for name, parameter in enumerate(model.module.values):
            parts = [given[r][name] for r in range(workers)]
            if name == 3:
                assert parameter.grad is None
                continue
            full = [torch.zeros(SIZES[name]) if part is None else part for part in parts]
            lone = other.module.values[name].grad
            assert lone is not None
            assert torch.equal(lone, mean(full, workers))
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, mean([part + part if is_apart else part for part in full], workers))
    assert sums_in_memory(model)
    assert sums_in_memory(other)
    model.close()
    other.close()


def test_no_sync_unused_parameters_and_two_models_at_once() -> None:
    run_ranks(_odd_steps, 3)


def _two_groups() -> None:
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = poseidon.DistributedDataParallel(
        Weighted(SIZES, torch.float32), process_group=groups[rank // 2], trials=False
    )
    for step in range(3):
        model.zero_grad()
        model(weights_of(step, rank, SIZES, torch.float32)).backward()
        first = rank // 2 * 2
        expected = zip(*(weights_of(step, r, SIZES, torch.float32) for r in (first, first + 1)), strict=True)
        for parameter, parts in zip(model.module.values, expected, strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, mean(parts, 2))
    assert sums_in_memory(model)
    dist.barrier()


def test_two_groups_of_workers_sum_apart() -> None:
    run_ranks(_two_groups, 4)


def _die(sizes: Sequence[int]) -> str:
    before = {*Path("/dev/shm").iterdir()}
    rank = dist.get_rank()
    model = poseidon.DistributedDataParallel(Weighted(sizes, torch.float32), timeout_s=30.0, trials=False)
    weights = weights_of(0, rank, sizes, torch.float32)
    for _ in range(3):
        model(weights).backward()
    assert sums_in_memory(model)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(WorkerLostError) as caught:
        model(weights).backward()
    assert time.monotonic() - began < 15
    assert {*Path("/dev/shm").iterdir()} - before == set()
    with contextlib.suppress(Exception):
        model.close()
    return str(caught.value)


@pytest.mark.parametrize("sizes", [SIZES, LARGE])
def test_a_killed_worker_is_named_at_once_and_nothing_remains(sizes: Sequence[int]) -> None:
    first, _, last = run_ranks(_die, 3, sizes, lost=[1])
    for message in (first, last):
        assert "from rank 1" in message


def _fall_back(breaks: bool) -> list[str]:
    if breaks and dist.get_rank() == 1:

        def refuse(_: object) -> SharedBlock:
            raise WireError("the memory of process 1 cannot be opened (for a test)")

        SharedBlock.open = refuse  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert not _check_means(SIZES, torch.float32, in_place=True)
    return [str(one.message) for one in told if "shared memory" in str(one.message)]


def test_workers_that_cannot_share_memory_use_sockets_and_say_so_once() -> None:
    told = run_ranks(_fall_back, 2, True)
    assert told[0] == []
    assert len(told[1]) == 1
    assert "for a test" in told[1][0]
    assert "POSEIDON_SHARED_MEMORY=0" in told[1][0]


def test_a_setting_turns_it_off_without_a_word() -> None:
    env = [{"POSEIDON_SHARED_MEMORY": "1"}, {"POSEIDON_SHARED_MEMORY": "0"}]
    assert run_ranks(_fall_back, 2, False, env=env) == [[], []]
