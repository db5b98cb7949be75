"""``update="server"`` gives the bits that ``distribute`` gives, whatever is read in between."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import loops
import poseidon
import twins
from loops import loss as _loss
from loops import plain as _plain_loop
from poseidon import zoo
from poseidon.errors import ConfigError, MismatchError, UnsupportedError, WorkerLostError
from ranks import run_ranks

Loop = Callable[[nn.Module, torch.optim.Optimizer, int], Any]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "maximize": lambda m: torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9, dampening=0.1, maximize=True),
    "sgd_fused": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2, fused=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-3, amsgrad=True, weight_decay=0.1),
    "adam_foreach": lambda m: torch.optim.Adam(m.parameters(), lr=1e-3, foreach=True),
    "adam_tensor": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(1e-3)),
    "adamw_fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True),
    "adamax": lambda m: torch.optim.Adamax(m.parameters()),
    "nadam": lambda m: torch.optim.NAdam(m.parameters()),
    "radam": lambda m: torch.optim.RAdam(m.parameters(), lr=1e-2),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, momentum=0.5, centered=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), initial_accumulator_value=0.1),
    "adagrad_fused": lambda m: torch.optim.Adagrad(m.parameters(), fused=True),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters(), lr=1.0),
    "rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=1e-3),
    "asgd": lambda m: torch.optim.ASGD(m.parameters(), lr=1e-2, t0=2, weight_decay=0.1),
    "groups": lambda m: torch.optim.SGD(
        [
            {"params": [p for p in m.parameters() if p.ndim > 1], "weight_decay": 1e-2},
            {"params": [p for p in m.parameters() if p.ndim == 1], "lr": 0.2},
        ],
        lr=0.05,
        momentum=0.9,
    ),
    "some": lambda m: torch.optim.SGD([*m.parameters()][2:], lr=0.05, momentum=0.9),
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


def _train(update: str, make: MakeOptimizer, loop: Loop, steps: int = 5, **options: Any) -> list[Tensor]:
    torch.manual_seed(3)
    model = _net()
    optimizer = make(model)
    wrapped, optimizer = twins.distribute(model, optimizer, update, **options)
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


def _compare_optimizers(names: list[str]) -> None:
    for name in names:
        _compare(OPTIMIZERS[name], _plain_loop)


@pytest.mark.parametrize("third", range(3))
def test_same_bits_with_every_optimizer(third: int) -> None:
    run_ranks(_compare_optimizers, 2, [*OPTIMIZERS][third::3])


def test_same_bits_with_three_workers() -> None:
    run_ranks(_compare_optimizers, 3, ["groups", "adamw_fused"], env=_apart(3))


# What a training loop may do.


def _clearing_late(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    loss = _loss(model, number)
    optimizer.zero_grad(set_to_none=number % 2 == 0)
    loss.backward()
    optimizer.step()


def _clearing_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    _loss(model, number).backward()
    optimizer.step()


def _editing_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad(set_to_none=number % 2 == 0)
    _loss(model, number).backward()
    first, *_, last = model.parameters()
    assert last.grad is not None
    last.grad.mul_(0.5)
    if number == 2:
        first.grad = None
    if number == 3:
        first.grad = torch.ones_like(first)
    optimizer.step()
    if dist.get_rank() == 0:  # one worker alone must be able to look, and to save
        assert last.grad is not None
        assert first.sum() != 0
        copy.deepcopy(model.module)  # type: ignore[arg-type]
        optimizer.state_dict()


def _reading_after_the_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    _plain_loop(model, optimizer, number)
    norm = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
    for group in optimizer.param_groups:
        group["lr"] = 0.05 / (1 + float(norm))


def _editing_weights(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    _plain_loop(model, optimizer, number)
    first, second, *_, last = model.parameters()
    with torch.no_grad():
        last.clamp_(-0.05, 0.05)
        first.data.mul_(0.9)
    second.data = second.data + 0.25  # other memory
    if number == 2:
        model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})


def _editing_between(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    _loss(model, number).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.99)
    optimizer.step()


def _editing_state(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    _plain_loop(model, optimizer, number)
    last = [*model.parameters()][-1]
    if number == 1:
        optimizer.state[last]["momentum_buffer"].zero_()
    if number == 2:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if number == 3:
        optimizer.state.clear()


def _adding_a_group(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    if number == 0:
        optimizer.param_groups[0]["params"] = [*model.parameters()][2:]
    if number == 2:
        optimizer.add_param_group({"params": [*model.parameters()][:2], "lr": 0.01})
    _plain_loop(model, optimizer, number)


def _penalising(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Add gradients by a backward that exchanges nothing: before the step, or after it."""
    if number < 3:
        optimizer.zero_grad()
    _loss(model, number).backward()
    penalty = sum(p.square().sum() for p in model.parameters() if p.ndim > 1)
    assert isinstance(penalty, Tensor)
    if number % 2:
        (0.1 * penalty).backward()
        optimizer.step()
    else:
        optimizer.step()
        penalty = sum(p.square().sum() for p in model.parameters() if p.ndim > 1)
        assert isinstance(penalty, Tensor)
        (0.1 * penalty).backward()


def _skipping(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    _loss(model, number).backward()
    if number != 2:
        optimizer.step()


def _scaling(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    scaler = _SCALERS.setdefault(model, torch.amp.GradScaler("cpu", init_scale=1024.0))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = _loss(model, number)
    scaler.scale(loss * (float("inf") if number == 2 else 1.0)).backward()
    if number == 3:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    # A fused step leaves its gradients unscaled.
    norm = float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    if number != 2:
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + norm)


_SCALERS: weakref.WeakKeyDictionary[nn.Module, torch.amp.GradScaler] = weakref.WeakKeyDictionary()

LOOPS: dict[str, Loop] = {
    "accumulating": loops.accumulating,
    "clipping": loops.clipping,
    "clearing_late": _clearing_late,
    "clearing_by_hand": _clearing_by_hand,
    "evaluating": loops.evaluating,
    "editing_gradients": _editing_gradients,
    "reading_after_the_step": _reading_after_the_step,
    "editing_weights": _editing_weights,
    "editing_between": _editing_between,
    "editing_state": _editing_state,
    "stepping_twice": loops.stepping_twice,
    "sharing": loops.sharing,
    "never_clearing": loops.never_clearing,
    "adding_a_group": _adding_a_group,
    "penalising": _penalising,
    "backward_twice": loops.backward_twice,
    "skipping": _skipping,
    "scaling": _scaling,
}


def _compare_loop(name: str) -> None:
    _compare(OPTIMIZERS["nesterov"], LOOPS[name], steps=6)
    if name == "scaling":
        _compare(OPTIMIZERS["adamw_fused"], LOOPS[name], steps=6)


@pytest.mark.parametrize("name", LOOPS)
def test_same_bits_in_every_loop(name: str) -> None:
    run_ranks(_compare_loop, 2, name)


def _with_scheduler() -> None:
    twins.quiet()
    results = []
    for update in ("worker", "server"):
        torch.manual_seed(3)
        model = _net()
        optimizer = OPTIMIZERS["adam_tensor"](model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        wrapped, optimizer = twins.distribute(model, optimizer, update)
        for number in range(5):
            _plain_loop(wrapped, optimizer, number)
            scheduler.step()
        results.append([p.detach().clone() for p in model.parameters()])
        wrapped.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_learning_rate_of_the_moment_of_step_counts() -> None:
    run_ranks(_with_scheduler, 2)


class _Branches(nn.Module):
    """Uses some of its layers only in some steps, and one weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(40, 40)
        self.second = nn.Linear(40, 40)
        self.never = nn.Linear(40, 40)
        self.last = nn.Linear(40, 40)
        self.last.weight = self.first.weight
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        # Only one worker in some steps, and nobody in others.
        if self.number % 3 == 0 or (self.number % 3 == 1 and dist.get_rank() == 0):
            x = self.second(x)
        return self.last(x)


def _branching(update: str, **options: Any) -> list[Tensor]:
    torch.manual_seed(3)
    model = _Branches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    wrapped, optimizer = twins.distribute(model, optimizer, update, **options)
    for number in range(7):
        model.number = 0 if options.get("static_graph") else number
        optimizer.zero_grad(set_to_none=number != 4)
        wrapped(torch.randn(3, 40, generator=twins.seed_of_rank(number))).square().mean().backward()
        optimizer.step()
    found = [p.detach().clone() for p in model.parameters()]
    states = optimizer.state_dict()["state"]
    wrapped.close()
    return [*found, *(states[number]["exp_avg"] for number in sorted(states))]


def _unused() -> None:
    twins.quiet()
    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        plain, ours = (_branching(update, **options) for update in ("worker", "server"))
        assert len(plain) == len(ours)
        assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    with pytest.raises(UnsupportedError, match=r"never\.weight"):
        _branching("server")


def test_unused_and_shared_parameters() -> None:
    run_ranks(_unused, 2)


def _clip_inside() -> None:
    twins.quiet()
    plain = _train("worker", OPTIMIZERS["nesterov"], _plain_loop, max_grad_norm=0.1)
    for loop in (_plain_loop, _editing_nothing):
        ours = _train("server", OPTIMIZERS["nesterov"], loop, max_grad_norm=0.1)
        for a, b in zip(plain, ours, strict=True):
            # The norm is added in float64 here, and tensor by tensor in float32 there.
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    free = _train("server", OPTIMIZERS["nesterov"], _plain_loop)
    clipped = _train("server", OPTIMIZERS["nesterov"], _plain_loop, max_grad_norm=1e9)
    assert all(torch.equal(a, b) for a, b in zip(free, clipped, strict=True))


def _editing_nothing(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    _loss(model, number).backward()
    first, *_ = model.parameters()
    assert first.grad is not None
    optimizer.step()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert number == 0 or abs(float(norm) - 0.1) < 1e-5


def test_max_grad_norm_clips_all_gradients_together() -> None:
    run_ranks(_clip_inside, 2)


def _clip_in_double() -> None:
    twins.quiet()
    trained = []
    for update in ("worker", "server"):
        torch.manual_seed(4)
        net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).double()
        model, optimizer = poseidon.distribute(
            net, torch.optim.SGD(net.parameters(), 0.1), update=update, max_grad_norm=0.1
        )
        for step in range(5):
            inputs = torch.full((4, 6), 0.3 * step + dist.get_rank(), dtype=torch.float64)
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
        trained.append([value.detach().clone() for value in net.parameters()])
        model.close()
    for plain, ours in zip(*trained, strict=True):
        torch.testing.assert_close(plain, ours, rtol=1e-13, atol=1e-14)


def test_max_grad_norm_clips_in_the_precision_of_the_gradients() -> None:
    run_ranks(_clip_in_double, 2)


# Models of all kinds.


def _compare_models(makes: dict[str, Any]) -> None:
    twins.quiet()
    for name, (make, draw) in makes.items():
        results = []
        for update in ("worker", "server"):
            torch.manual_seed(5)
            model = make()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            wrapped, optimizer = twins.distribute(model, optimizer, update)
            trained = torch.compile(wrapped, backend="eager") if name == "compiled wrapper" else wrapped
            for number in range(4):
                optimizer.zero_grad()
                trained(draw(number)).float().square().mean().backward()
                optimizer.step()
            results.append([p.detach().clone() for p in model.parameters()])
            wrapped.verify_replicas()
            wrapped.close()
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), name


def _values(dtype: torch.dtype, *shape: int) -> Callable[[int], Tensor]:
    return lambda number: torch.randn(3, *shape, generator=twins.seed_of_rank(number)).to(dtype)


def _compiled_layers() -> nn.Module:
    model = nn.Sequential(nn.Linear(90, 90), nn.Linear(90, 90))
    model[0] = torch.compile(model[0], backend="eager")
    return model


def _models() -> None:
    kinds = {
        str(dtype): (lambda dtype=dtype: nn.Linear(90, 120).to(dtype), _values(dtype, 90))
        for dtype in (torch.bfloat16, torch.float16, torch.float64)
    }
    _compare_models(
        {
            **kinds,
            "channels last": (
                lambda: nn.Conv2d(40, 30, 3).to(memory_format=torch.channels_last),
                _values(torch.float32, 40, 5, 5),
            ),
            "compiled layers": (_compiled_layers, _values(torch.float32, 90)),
            "compiled wrapper": (lambda: nn.Linear(90, 120), _values(torch.float32, 90)),
            "a scalar": (_Scaled, _values(torch.float32, 90)),
            "one value with a stride": (_one_with_a_stride, _values(torch.float32, 90)),
        }
    )


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(90, 90)
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.factor


def _one_with_a_stride() -> nn.Module:
    model = _Scaled()
    model.factor = nn.Parameter(torch.arange(1.0, 9.0)[::8])
    assert model.factor.stride() == (8,)
    return model


def test_other_dtypes_layouts_and_compiled_parts() -> None:
    run_ranks(_models, 2)


def _networks(names: list[str]) -> None:
    twins.quiet()
    for name in names:
        results = []
        options: dict[str, Any] = {}
        for update in ("server", "worker"):
            torch.manual_seed(5)
            network = zoo.build(name, tiny=True, dropout=0.0)
            inputs, targets = network.batch(2, seed=dist.get_rank() + 1)
            made = torch.optim.AdamW(network.model.parameters())
            wrapped, optimizer = twins.distribute(network.model, made, update, **options)
            for _ in range(4):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = network.loss(wrapped(*inputs), targets)
                loss.backward()
                optimizer.step()
            results.append([p.detach().clone() for p in network.model.parameters()])
            chosen = {unit: "sharded" if route == "served" else route for unit, route in wrapped.plan.routes.items()}
            options = {"routes": chosen}
            wrapped.close()
        assert ("split" in chosen.values()) is (name == "gpt2")
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), name


def test_same_bits_for_networks_under_autocast() -> None:
    run_ranks(_networks, 3, ["gpt2", "resnet50", "dlrm"], env=_apart(3))


def _straying() -> None:
    torch.manual_seed(3)
    model = _net()
    wrapped, optimizer = twins.distribute(model, OPTIMIZERS["adam"](model), "server")
    for number in range(3):
        _plain_loop(wrapped, optimizer, number)

    def stray() -> None:
        for number in range(24):
            if dist.get_rank() == 1:
                model[4].weight.data.add_(1e-3)
            _plain_loop(wrapped, optimizer, number)

    with pytest.raises(MismatchError, match="replicas differ"):
        stray()


def test_a_worker_that_changes_its_own_weights_is_noticed() -> None:
    run_ranks(_straying, 2, env={"POSEIDON_CHECK_REPLICAS": "1"})


# Saving and giving back.


def _train_on(path: str, workers: int, steps: range, saves: bool) -> list[Tensor]:
    """Train a while on some of the ranks, from the checkpoint that is there, and perhaps leave one."""
    group = dist.new_group(range(workers))
    if dist.get_rank() >= workers:
        return []
    torch.manual_seed(3)
    model = _net()
    optimizer = OPTIMIZERS["adam"](model)
    wrapped, optimizer = twins.distribute(model, optimizer, "server", process_group=group)
    if steps.start:
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for number in steps:
        optimizer.zero_grad()
        # The same batch everywhere: the number of workers must not matter.
        x = torch.randn(6, 3, 6, 6, generator=torch.Generator().manual_seed(number))
        wrapped(x).square().mean().backward()
        optimizer.step()
    if saves and dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    wrapped.close()
    return [p.detach().clone() for p in model.parameters()]


def _checkpoints(path: str) -> None:
    whole = _train_on(path, 4, range(6), saves=False)
    _train_on(path, 4, range(3), saves=True)
    dist.barrier()
    if dist.get_rank() == 0:
        model = _net()
        optimizer = OPTIMIZERS["adam"](model)
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        for number in range(3, 6):
            optimizer.zero_grad()
            x = torch.randn(6, 3, 6, 6, generator=torch.Generator().manual_seed(number))
            model(x).square().mean().backward()
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(whole, model.parameters(), strict=True))
    resumed = _train_on(path, 2, range(3, 6), saves=False)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=dist.get_rank() < 2))


def test_checkpoints_load_into_any_number_of_workers_and_plain_torch(tmp_path: Path) -> None:
    run_ranks(_checkpoints, 4, str(tmp_path / "checkpoint.pt"))


def _give_back() -> None:
    twins.quiet()
    torch.manual_seed(3)
    model = _net()
    optimizer = OPTIMIZERS["adam"](model)
    wrapped, optimizer = twins.distribute(model, optimizer, "server")
    for number in range(3):
        _plain_loop(wrapped, optimizer, number)
    assert set(wrapped.plan.routes.values()) == {"served"}
    assert "served" in str(wrapped.plan)
    share = sum(
        value.numel()
        for entry in wrapped._policy.exchanger.shard.state.values()  # type: ignore[attr-defined]
        for value in entry.values()
    )
    assert not optimizer.__dict__["state"], "the whole state is nowhere"
    twin = pickle.loads(pickle.dumps(optimizer))
    assert type(twin) is torch.optim.Adam
    state = optimizer.state_dict()["state"]
    whole = sum(value.numel() for entry in state.values() for value in entry.values())
    assert share <= whole * (1 / dist.get_world_size() + 0.05)
    wrapped.close()
    assert type(optimizer) is torch.optim.Adam
    after = optimizer.state_dict()["state"]
    for number, entry in state.items():
        for key, value in entry.items():
            assert torch.equal(value, after[number][key])
            assert torch.equal(value, twin.state_dict()["state"][number][key])
            assert value.shape == after[number][key].shape
    assert all(p.grad is not None for p in model.parameters())
    # From here on each worker trains alone.
    model(torch.ones(2, 3, 6, 6)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("workers", [2, 4])
def test_owners_share_the_state_and_give_it_back(workers: int) -> None:
    run_ranks(_give_back, workers)


class _WithNothing(nn.Module):
    """Has a parameter without values, as models with an optional part do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        used = dist.get_rank() == 1 or not self.training  # where one worker uses it, all have its gradient
        out: Tensor = self.last(self.first(x)) + (self.nothing.sum() if used else 0.0)
        return out


def _nothing() -> None:
    twins.quiet()
    found = []
    for update in ("worker", "server"):
        torch.manual_seed(3)
        model = _WithNothing()
        wrapped, optimizer = twins.distribute(
            model, torch.optim.AdamW(model.parameters()), update, find_unused_parameters=True
        )
        for number in range(4):
            optimizer.zero_grad()
            wrapped(torch.ones(2, 4) * (number + dist.get_rank())).square().sum().backward()
            optimizer.step()
            if number == 2:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        state = optimizer.state_dict()["state"]
        assert list(state) == list(range(5))
        assert state[0]["exp_avg"].shape == (0, 3)
        assert model.nothing.grad is not None
        found.append([float(entry["step"]) for entry in state.values()])
        wrapped.close()
    assert found == [[4.0] * 5, [4.0] * 5]


def test_a_parameter_without_values_has_its_state() -> None:
    run_ranks(_nothing, 2)


# Workers that go.


def _die_in_the_middle() -> str:
    torch.manual_seed(3)
    model = _net()
    wrapped, optimizer = twins.distribute(model, OPTIMIZERS["adam"](model), "server", timeout_s=20)

    def train() -> None:
        for number in range(10):
            if number == 4 and dist.get_rank() == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            _plain_loop(wrapped, optimizer, number)

    with pytest.raises(WorkerLostError) as caught:
        train()
    with pytest.raises(UnsupportedError, match="restart from a checkpoint"):
        optimizer.step()
    wrapped.close()
    return str(caught.value)


def test_a_death_is_named() -> None:
    for message in run_ranks(_die_in_the_middle, 3, lost=[2])[:2]:
        assert "rank 2" in message


_LATE = """
import pathlib, sys, torch, poseidon
from torch import nn
world = poseidon.init()
torch.manual_seed(0)
model = nn.Linear(300, 300)
wrapped, optimizer = poseidon.distribute(model, torch.optim.Adam(model.parameters()), update="server")
for _ in range(3):
    optimizer.zero_grad()
    wrapped(torch.ones(2, 300)).square().mean().backward()
    optimizer.step()
last_word = pathlib.Path(sys.argv[1])
if world.rank == 1:
    last_word.touch()
else:
    # The other one has nothing left to do and ends; what it owns is still needed here.
    while not last_word.exists():
        pass
    print("saved", len(optimizer.state_dict()["state"]), round(float(model.weight.detach().abs().sum()), 3) > 0)
"""


def test_a_worker_that_has_ended_first_still_answers(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(_LATE)
    command = [sys.executable, "-m", "poseidon.cli", "run", "--nproc", "2", str(script), str(tmp_path / "last")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=80, check=False)
    assert done.returncode == 0, done.stderr
    assert "saved 2 True" in done.stdout


# Refusals.


class _Elementwise(torch.optim.SGD):
    is_elementwise = True


class _Unknown(torch.optim.SGD):
    pass


def _refusals() -> None:
    model = _net()
    parameters = [*model.parameters()]
    with pytest.raises(ConfigError, match="unknown update 'sever'"):
        poseidon.distribute(model, torch.optim.SGD(parameters, lr=0.1), update="sever")
    with pytest.raises(ConfigError, match="consistency='ssp'"):
        poseidon.distribute(model, torch.optim.SGD(parameters, lr=0.1), update="server", consistency="ssp")
    with pytest.raises(ConfigError, match="routes"):
        poseidon.distribute(model, torch.optim.SGD(parameters, lr=0.1), update="server", routes={"*": "sharded"})
    for optimizer in (_Unknown(parameters, lr=0.1), torch.optim.Adafactor(parameters)):
        with pytest.raises(UnsupportedError, match=type(optimizer).__name__):
            poseidon.distribute(model, optimizer, update="server")
    sparse = nn.Embedding(4, 4, sparse=True)
    with pytest.raises(UnsupportedError, match="sparse=True"):
        poseidon.distribute(sparse, torch.optim.SGD(sparse.parameters(), lr=0.1), update="server")
    strided = nn.Linear(6, 6, bias=False)
    strided.weight.data = torch.zeros(6, 12)[:, ::2]
    with pytest.raises(UnsupportedError, match=r"weight, of shape \(6, 6\), has strides \(12, 2\)"):
        poseidon.distribute(strided, torch.optim.SGD(strided.parameters(), lr=0.1), update="server")
    wrapped, _ = poseidon.distribute(model, _Elementwise(parameters, lr=0.1), update="server")
    with pytest.raises(UnsupportedError, match="join"), wrapped.join():
        _loss(wrapped, 0)


def test_what_owners_cannot_step_is_refused() -> None:
    run_ranks(_refusals, 2)


def test_alone_it_is_the_plain_loop() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    wrapped, optimizer = poseidon.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), update="server")
    before = model.weight.detach().clone()
    wrapped(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before - 0.1)


def _reorder() -> None:
    torch.manual_seed(3)
    model = _net()
    wrapped, optimizer = twins.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "server")
    _plain_loop(wrapped, optimizer, 0)
    _plain_loop(wrapped, optimizer, 1)
    model.to(memory_format=torch.channels_last)
    with pytest.raises(UnsupportedError, match="order in memory"):
        _plain_loop(wrapped, optimizer, 2)


def test_another_order_in_memory_is_refused() -> None:
    run_ranks(_reorder, 2)
