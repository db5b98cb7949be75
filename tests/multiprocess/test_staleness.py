"""``poseidon.distribute`` with bounded staleness: what a worker may miss, and what it never misses."""

import os
import random
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import poseidon
import twins
from poseidon.engine.bounding import ChosenBound
from poseidon.errors import ConfigError, UnsupportedError
from ranks import run_ranks


def _net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))


def _samples(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 12, generator=generator, dtype=torch.get_default_dtype())
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def _held_out_loss(model: nn.Module) -> float:
    """The loss on samples that no worker trains on: enough of them that its noise decides nothing."""
    return _loss(model, *_samples(torch.Generator().manual_seed(1), 512)).item()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> Tensor:
    optimizer.zero_grad()
    loss = _loss(model, *_samples(twins.seed_of_rank(number), 8))
    loss.backward()
    optimizer.step()
    return loss.detach()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _changed_by_hand(model: nn.Module, number: int) -> None:
    """Load other parameters before the first step, and shrink them before a later one."""
    if number == 0:
        model.load_state_dict({name: value + 0.1 for name, value in model.state_dict().items()})
    if number == 4:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.8)


def _no_staleness() -> None:
    torch.set_default_dtype(torch.float64)
    exact = twins.wrap(_net())
    optimizer = _sgd(exact)
    for number in range(8):
        _changed_by_hand(exact, number)
        _step(exact, optimizer, number)
    model, optimizer = _relaxed(0)
    for number in range(8):
        _changed_by_hand(model, number)
        _step(model, optimizer, number)
    assert set(model.staleness_seen) == {0}
    # The changes of all workers are added up here, and their gradients there: other roundings, nothing else.
    for ours, theirs in zip(model.module.parameters(), exact.module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    model.close()
    assert type(optimizer) is torch.optim.SGD


def _relaxed(staleness: Any, consistency: str = "ssp", **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = _net()
    return poseidon.distribute(model, _sgd(model), consistency=consistency, staleness=staleness, **options)


def test_without_staleness_it_is_the_exact_wrapper() -> None:
    run_ranks(_no_staleness, 2)


def _bounded(staleness: int) -> tuple[int, float, float]:
    model, optimizer = _relaxed(staleness)
    before = _held_out_loss(model)
    for number in range(60):
        _step(model, optimizer, number)
    after = _held_out_loss(model)
    seen = max(model.staleness_seen)
    model.close()
    return seen, before, after


@pytest.mark.parametrize("staleness", [0, 3])
def test_no_read_is_staler_than_allowed_and_training_works(staleness: int) -> None:
    for seen, before, after in run_ranks(_bounded, 3, staleness):
        assert seen <= staleness
        assert after < 0.75 * before


def _chosen() -> tuple[list[int], int, int]:
    stalls = random.Random(dist.get_rank())
    measured = ChosenBound.measured

    def pretend(self: ChosenBound, own_s: float, waited_s: float) -> None:
        del own_s, waited_s
        measured(self, 0.4 if stalls.random() < 0.25 else 0.1, 0.001)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChosenBound, "measured", pretend)
        model, optimizer = _relaxed("auto", managed=True)
        bounds = []
        for number in range(50):
            _step(model, optimizer, number)
            bounds.append(model.staleness)
        seen = max(model.staleness_seen)
        chosen = model.staleness_prospects[0].bound
        model.close()
    return bounds, chosen, seen


def test_a_chosen_staleness_is_the_same_on_all_workers_and_kept() -> None:
    results = run_ranks(_chosen, 3)
    bounds, chosen, _ = results[0]
    assert bounds[:19] == [0] * 19
    assert bounds[-1] == chosen > 0
    for theirs, _, seen in results:
        assert theirs == bounds
        assert seen <= chosen


def _lonely(consistency: str, staleness: Any) -> tuple[list[int], float, float]:
    model, optimizer = _relaxed(staleness, consistency, timeout_s=20)
    before = _held_out_loss(model)
    _step(model, optimizer, 0)
    dist.barrier()  # so that nobody dies before all have begun
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    for number in range(1, 30):
        _step(model, optimizer, number)
    after = _held_out_loss(model)
    model.close()
    return sorted(model.losses), before, after


@pytest.mark.parametrize(("consistency", "staleness"), [("ssp", 2), ("ssp", "auto"), ("asp", 0)])
def test_others_go_on_when_a_worker_dies(consistency: str, staleness: Any) -> None:
    results = run_ranks(_lonely, 3, consistency, staleness, lost=[2])
    for losses, before, after in results[:2]:
        assert losses == [2]
        assert after < 0.85 * before


def _refusals() -> None:
    model = _net()
    with pytest.raises(ConfigError, match="unknown consistency 'sometimes'; known: asp, bsp, local, ssp"):
        poseidon.distribute(model, _sgd(model), consistency="sometimes")
    with pytest.raises(ConfigError, match="only ssp takes one"):
        poseidon.distribute(model, _sgd(model), consistency="asp", staleness=2)
    with pytest.raises(ConfigError, match="staleness='often' with consistency='ssp'"):
        poseidon.distribute(model, _sgd(model), consistency="ssp", staleness="often")  # type: ignore[arg-type]
    half = _net().bfloat16()
    with pytest.raises(UnsupportedError, match="float32"):
        poseidon.distribute(half, _sgd(half), consistency="asp")


def test_what_makes_no_sense_is_refused() -> None:
    _refusals()


def test_alone_it_trains_as_it_is() -> None:
    model, optimizer = _relaxed(4)
    before = model.module[0].weight.detach().clone()
    loss = nn.functional.mse_loss(model(torch.ones(2, 12)), torch.zeros(2, 3))
    loss.backward()
    optimizer.step()
    assert not torch.equal(model.module[0].weight, before)
    model.close()
