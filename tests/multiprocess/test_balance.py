"""Unequal shares of a batch: the result is that of one worker alone, whatever the shares are and however they move."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import poseidon
from nightly import amount
from poseidon.data import balancing
from ranks import run_ranks

SAMPLES, BATCH, EPOCHS = 101, 16, 4
PACES = (1.0, 2.0, 7.0)
CASES = amount(
    [("wrapper", "factors", 1), ("distribute", None, 1), ("wrapper", None, 2)],
    [(mode, route, sums) for mode in ("wrapper", "distribute") for route in ("factors", None) for sums in (1, 2)],
)


class ReadAhead:
    """A loader that has read some batches more than it has handed out, as one with helpers has."""

    def __init__(self, loader: DataLoader[Any], batches: int) -> None:
        self._loader = loader
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        rest = iter(self._loader)
        ready = deque(itertools.islice(rest, self._batches))
        for batch in rest:
            ready.append(batch)
            yield ready.popleft()
        yield from ready


def train(mode: str, route: str | None, sums: int) -> tuple[dict[str, torch.Tensor], list[list[int]], list[int]]:
    """Train; return the parameters, this worker's samples in each epoch, and the sizes of its shares."""
    torch.manual_seed(1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    inputs = torch.randn(SAMPLES, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    dataset = TensorDataset(torch.arange(SAMPLES), inputs, inputs.sum(1, keepdim=True).tanh())
    net: nn.Module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(net.parameters(), 0.01)
    model: Any = net
    if mode == "wrapper":
        model = poseidon.DistributedDataParallel(net, routes=route and {"*": route})
    elif mode == "distribute":
        model, optimizer = poseidon.distribute(net, optimizer, routes=route and {"*": route})
    sampler = poseidon.data.ElasticSampler(dataset, BATCH, seed=3, balance=mode != "alone")
    loader = ReadAhead(DataLoader(dataset, batch_sampler=sampler), 3 * rank)
    used: list[list[int]] = []
    shares: list[int] = []
    for _ in range(EPOCHS):
        used.append([])
        for number, (ids, x, y) in enumerate(sampler.over(loader)):
            is_last = (number + 1) % sums == 0 or number + 1 == len(sampler)
            with contextlib.nullcontext() if is_last or mode == "alone" else model.no_sync():
                (nn.functional.mse_loss(model(x), y) * sampler.weight / sums).backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
            used[-1] += ids.tolist()
            shares.append(len(ids))
    return {name: value.clone() for name, value in net.state_dict().items()}, used, shares


def train_at_pace(*case: Any) -> Any:
    """Train on a worker whose pace is told, so that shares do not depend on the machine."""
    balancing.PaceMeter.take = _told_pace  # type: ignore[method-assign]
    return train(*case)


def _told_pace(laps: balancing.PaceMeter) -> float:
    laps._paces.clear()
    return PACES[dist.get_rank()]


@pytest.mark.parametrize("case", CASES)
def test_balanced_workers_end_with_the_parameters_of_one_alone(case: tuple[str, str | None, int]) -> None:
    everybody = run_ranks(train_at_pace, len(PACES), *case)
    expected, _, _ = train("alone", None, case[2])
    for state, _, _ in everybody:
        for name, value in expected.items():
            assert (state[name] - value).abs().max() < 1e-9
            assert torch.equal(state[name], everybody[0][0][name])
    for epoch in range(EPOCHS):
        assert sorted(one for _, used, _ in everybody for one in used[epoch]) == list(range(SAMPLES))
    shares = list(zip(*(shares for _, _, shares in everybody), strict=True))
    assert {sum(each) for each in shares} == {BATCH, SAMPLES % BATCH}
    assert shares[0] == (6, 5, 5)
    assert shares[-2] == (10, 4, 2)
    assert len(set(shares)) > 4  # they moved step by step
