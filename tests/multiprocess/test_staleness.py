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


def _loaded(staleness: Any) -> None:
    """Load parameters after ``distribute``, before the first step and in mid-run, on workers of different speed."""
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(6, 4)
    start = torch.optim.SGD(model.parameters(), 0.05)
    model, optimizer = poseidon.distribute(model, start, consistency="ssp", staleness=staleness)
    for begin in (0.0, 3.0):
        model.module.load_state_dict({"weight": torch.full((4, 6), begin), "bias": torch.full((4,), begin)})
        for number in range(5):
            optimizer.zero_grad()
            (0.0 * model(torch.ones(2, 6))).sum().backward()
            optimizer.step()
            for parameter in model.module.parameters():
                # Twice rounded: what the table held, and what was loaded in its place.
                torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, begin), rtol=0, atol=1e-5)
            if number == dist.get_rank():
                model.module.weight.grad = None  # nobody's gradients matter here
    model.close()


@pytest.mark.parametrize("staleness", [0, 4, "auto"])
def test_workers_go_on_together_from_what_is_loaded(staleness: Any) -> None:
    run_ranks(_loaded, 3, staleness)


def _load_without_bound() -> None:
    model, optimizer = _relaxed(0, "asp")
    with pytest.raises(UnsupportedError, match=r'consistency="asp" with poseidon.Checkpoint.*use ssp'):
        poseidon.Checkpoint(None, model=model)
    model.load_state_dict(model.state_dict())
    with pytest.raises(UnsupportedError, match=r'load_state_dict with consistency="asp".*load before distribute'):
        _step(model, optimizer, 0)
    model.close()


def _evaluate_others(staleness: int) -> list[Tensor]:
    """Let one worker put other weights in place for an evaluation, and its own back; nobody's updates are lost."""
    found = []
    for swaps in (False, True):
        torch.set_default_dtype(torch.float64)
        model, optimizer = _relaxed(staleness)
        for number in range(6):
            if swaps and number % 2 and dist.get_rank() == 0:
                own = {name: value.clone() for name, value in model.state_dict().items()}
                model.load_state_dict({name: torch.zeros_like(value) for name, value in own.items()})
                model.load_state_dict(own)
            optimizer.zero_grad()
            model(torch.ones(2, 12)).sum().backward()  # gradients that do not depend on what was read
            for parameter in model.parameters():
                parameter.grad.fill_(1.0 + dist.get_rank())
            optimizer.step()
        assert model._relaxed._table.now == 6
        dist.barrier()
        found.append(torch.cat([value.flatten() for value in model.shared_state_dict().values()]))
        model.close()
    return found


@pytest.mark.parametrize("staleness", [0, 3])
def test_weights_that_one_worker_evaluates_cost_no_update(staleness: int) -> None:
    for without, with_swaps in run_ranks(_evaluate_others, 2, staleness):
        torch.testing.assert_close(without, with_swaps, rtol=0, atol=1e-9)


def test_without_a_bound_nothing_can_be_loaded() -> None:
    run_ranks(_load_without_bound, 2)


def _skipped(is_fused: bool) -> int:
    """Let a scaler skip steps of one worker; then meet the others, who must not wait for clocks that never come."""
    net = _net()
    plain = torch.optim.SGD(net.parameters(), 0.1, fused=is_fused)
    model, optimizer = poseidon.distribute(net, plain, consistency="ssp", staleness=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for number in range(8):
        optimizer.zero_grad()
        scaler.scale(_loss(model, *_samples(twins.seed_of_rank(number), 8))).backward()
        if dist.get_rank() == 1 and number % 2:
            net[0].weight.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        assert all(value.isfinite().all() for value in net.parameters())
    dist.barrier()
    clock = model._relaxed._table.now
    model.close()
    assert "_step_supports_amp_scaling" not in optimizer.__dict__ or is_fused
    return clock


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_step_that_a_scaler_skips_counts(is_fused: bool) -> None:
    assert run_ranks(_skipped, 2, is_fused) == [8, 8]


def _clipped() -> list[list[Tensor]]:
    """Clip gradients that a scaler leaves scaled, because the optimizer is fused, and others."""
    found = []
    for is_fused in (False, True):
        net = _net()
        plain = torch.optim.SGD(net.parameters(), 0.1, fused=is_fused)
        model, optimizer = poseidon.distribute(net, plain, consistency="ssp", max_grad_norm=0.3)
        scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
        for number in range(4):
            optimizer.zero_grad()
            scaler.scale(_loss(model, *_samples(twins.seed_of_rank(number), 8))).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append([value.detach().clone() for value in net.parameters()])
        model.close()
    return found


def test_scaled_gradients_are_clipped_by_their_own_norm() -> None:
    for plain, fused in run_ranks(_clipped, 2):
        for one, other in zip(plain, fused, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


class _Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(12, 20).requires_grad_(False)
        self.register_buffer("scale", torch.rand(20))
        self.head = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.tanh(self.frozen(x)) * self.scale)
        return scores


def _unlike() -> dict[str, Tensor]:
    torch.manual_seed(dist.get_rank())
    net = _Fixed()
    plain = torch.optim.SGD(net.head.parameters(), 0.1)
    model, optimizer = poseidon.distribute(net, plain, consistency="ssp", staleness=2)
    _step(model, optimizer, 0)
    with pytest.raises(UnsupportedError, match=r"verify_replicas\(\) with consistency.*also after close\(\)"):
        model.verify_replicas()
    model.close()
    return {name: value for name, value in net.state_dict().items() if not name.startswith("head")}


def test_what_no_table_holds_is_worker_0s() -> None:
    first, second = run_ranks(_unlike, 2)
    assert all(torch.equal(first[name], second[name]) for name in first)


def _resumed(folder: str) -> list[Tensor]:
    """Save with workers apart, and go on: the model has all updates, and each worker its own optimizer."""
    states = []
    for is_second in (False, True):
        model, optimizer = _relaxed(3)
        with poseidon.Checkpoint(folder, every=4, model=model, optimizer=optimizer) as checkpoint:
            begun = checkpoint.resume()
            assert begun == 4 * is_second
            if is_second:
                momenta = [optimizer.state[p]["momentum_buffer"].clone() for p in model.module.parameters()]
                assert all(map(torch.equal, momenta, states))
            else:
                for number in range(4):
                    _step(model, optimizer, number)
                    checkpoint.step(number + 1)
                states = [optimizer.state[p]["momentum_buffer"].clone() for p in model.module.parameters()]
                dist.barrier()
                everything = list(model.shared_state_dict().values())
        found = [value.detach().clone() for value in model.module.parameters()]
        model.close()
    for saved, shared in zip(found, everything, strict=True):
        torch.testing.assert_close(saved, shared, rtol=0, atol=1e-6)
    return found


def test_a_checkpoint_has_all_updates_and_every_workers_optimizer(tmp_path: Any) -> None:
    first, second = run_ranks(_resumed, 2, str(tmp_path))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def _own_statistics(folder: str) -> tuple[Tensor, Tensor]:
    """Return a worker's own statistics as they were saved, and as a second job begins with them."""
    found = []
    for _ in range(2):
        net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        model, optimizer = poseidon.distribute(net, _sgd(net), consistency="ssp", staleness=1)
        with poseidon.Checkpoint(folder, every=2, model=model, optimizer=optimizer) as checkpoint:
            for step in range(checkpoint.resume(), 2):
                model(torch.randn(8, 4) + dist.get_rank()).square().mean().backward()
                optimizer.step()
                checkpoint.step(step + 1)
        found.append(net[1].running_mean.clone())
        model.close()
        dist.barrier()
    return found[0], found[1]


def test_a_resumed_worker_has_its_own_statistics_again(tmp_path: Any) -> None:
    workers = run_ranks(_own_statistics, 2, str(tmp_path))
    assert all(torch.equal(saved, resumed) for saved, resumed in workers)
    assert not torch.equal(workers[0][0], workers[1][0])
