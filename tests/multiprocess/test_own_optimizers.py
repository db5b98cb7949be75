"""Optimizers whose steps ``distribute`` takes: what they may have of their own, and what they may share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import poseidon
from poseidon.errors import ConfigError, MismatchError, UnsupportedError, WorkerLostError
from ranks import run_ranks
from small_net import batch_of, small_net


def _with_a_stranger(update: str) -> None:
    net, margin = small_net(), nn.Linear(4, 10)
    optimizer = torch.optim.SGD([*net.parameters(), *margin.parameters()], 0.1)
    with pytest.raises(ConfigError, match=r"trains 2 parameter\(s\) that the model does not have .* \(10, 4\)"):
        poseidon.distribute(net, optimizer, update=update)


@pytest.mark.parametrize("update", ["worker", "server"])
def test_an_optimizer_with_parameters_of_others_is_refused(update: str) -> None:
    run_ranks(_with_a_stranger, 2, update)


def _added_later(update: str) -> None:
    net = small_net()
    optimizer = torch.optim.SGD(net[0].parameters(), 0.1)
    model, optimizer = poseidon.distribute(net, optimizer, update=update)  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match=r"2 parameter\(s\) \(the first is of shape \(10, 4\)\)"):
        optimizer.add_param_group({"params": nn.Linear(4, 10).parameters()})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": net[2].parameters(), "lr": 0.05})
    before = net[2].weight.detach().clone()
    x, y = batch_of(0, dist.get_rank())
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert not torch.equal(net[2].weight, before)
    model.close()


@pytest.mark.parametrize("update", ["worker", "server"])
def test_a_group_with_parameters_of_others_is_refused(update: str) -> None:
    run_ranks(_added_later, 2, update)


def _train_apart(model: Any, optimizer: Any, how: str) -> None:
    for step in range(6):
        x, y = batch_of(step, dist.get_rank())
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        is_odd = step == 3 and dist.get_rank() == 1
        if is_odd and how == "another learning rate":
            optimizer.param_groups[0]["lr"] = 0.05
        for _ in range({"a skipped step": 0, "a step too many": 2}.get(how, 1) if is_odd else 1):
            optimizer.step()


def _steps_apart(update: str, how: str) -> str:
    net = small_net()
    model, optimizer = poseidon.distribute(net, torch.optim.Adam(net.parameters(), 0.1), update=update)
    optimizer.param_groups[0]["seconds"] = float(dist.get_rank())  # a note of the user's, which may differ
    with pytest.raises(MismatchError) as refused:
        _train_apart(model, optimizer, how)
    model.close()
    return str(refused.value)


@pytest.mark.parametrize(
    ("update", "how"),
    [
        ("worker", "a skipped step"),
        ("worker", "another learning rate"),
        ("worker", "a step too many"),
        ("server", "a skipped step"),
        ("server", "another learning rate"),
    ],
)
def test_workers_that_step_apart_are_named_at_once(update: str, how: str) -> None:
    for rank, said in enumerate(run_ranks(_steps_apart, 2, update, how, env={"POSEIDON_CHECK_REPLICAS": "0"})):
        assert f"the optimizers of rank {rank} and rank {1 - rank} took different steps before backward 4" in said


def _share_memory(how: str) -> None:
    trunk = nn.Linear(8, 8)
    actor, critic = nn.Sequential(trunk, nn.Linear(8, 4)), nn.Sequential(trunk, nn.Linear(8, 1))
    if how == "two parameters":
        actor = nn.Sequential(trunk, nn.Linear(8, 8))
        actor[1].weight.data = actor[0].weight.data
        with pytest.raises(UnsupportedError, match=r"0.weight and 1.weight are two parameters in one memory"):
            poseidon.distribute(actor, torch.optim.SGD(actor.parameters(), 0.1), update="server")
        return
    first, _ = poseidon.distribute(actor, torch.optim.SGD(actor.parameters(), 0.1), update="server")
    with pytest.raises(UnsupportedError, match=r"0.weight belongs to another model that distribute"):
        poseidon.distribute(critic, torch.optim.SGD(critic.parameters(), 0.1), update="server")
    first.close()
    second, _ = poseidon.distribute(critic, torch.optim.SGD(critic.parameters(), 0.1), update="server")
    second.close()


@pytest.mark.parametrize("how", ["two models", "two parameters"])
def test_owners_do_not_step_one_memory_twice(how: str) -> None:
    run_ranks(_share_memory, 2, how)


class Counted(torch.optim.SGD):
    """Counts its steps itself, which owners would call several times."""

    is_elementwise = True
    steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        super().step()


def _count(update: str) -> str:
    net = small_net()
    optimizer: Any = Counted(net.parameters(), 0.1)
    optimizer.steps = 0
    model, optimizer = poseidon.distribute(net, optimizer, update=update)
    with pytest.raises((UnsupportedError, WorkerLostError)) as refused:
        _train_apart(model, optimizer, "")
    return str(refused.value)


@pytest.mark.parametrize("update", ["worker", "server"])
def test_an_optimizer_that_counts_itself_is_refused_where_it_is_called_more_often(update: str) -> None:
    assert any("changes its own attribute 'steps' in step()" in said for said in run_ranks(_count, 2, update))


class Kept(torch.optim.SGD):
    """Keeps something for each parameter, from some step on."""

    is_elementwise = True
    what: Any = None
    begins = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (one for group in self.param_groups for one in group["params"] if one.grad is not None):
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            state["seen"] = (parameter.grad > 0).to(torch.uint8)
            if state["step"] > self.begins:
                state["kept"] = Kept.what(parameter)
        super().step()


KEPT: dict[str, tuple[Any, int, str]] = {
    "two in one": (
        lambda p: torch.zeros(2, *p.shape),
        0,
        "'kept' in its state, a tensor of torch.float32, of shape (2, ",
    ),
    "two, later": (
        lambda p: torch.zeros(2, *p.shape),
        2,
        "'kept' in its state, a tensor of torch.float32, of shape (2, ",
    ),
    "a list": (lambda _: [1, 2, 3], 0, "'kept' in its state, a list"),
    "complex": (lambda p: torch.zeros_like(p, dtype=torch.complex64), 0, "a tensor of torch.complex64"),
}


def _keep(name: str) -> str:
    Kept.what, Kept.begins, _ = KEPT[name]
    net = small_net()
    model, optimizer = poseidon.distribute(net, Kept(net.parameters(), 0.1), update="server")
    with pytest.raises((UnsupportedError, WorkerLostError)) as refused:
        _train_apart(model, optimizer, "")
    return str(refused.value)


@pytest.mark.parametrize("name", KEPT)
def test_a_state_that_owners_cannot_share_is_refused(name: str) -> None:
    assert any(KEPT[name][2] in said for said in run_ranks(_keep, 2, name))


def _keep_what_fits() -> None:
    Kept.what = lambda _: torch.ones(())
    net = small_net()
    model, optimizer = poseidon.distribute(net, Kept(net.parameters(), 0.1), update="server")
    _train_apart(model, optimizer, "")
    state = optimizer.state_dict()["state"]
    assert [one["seen"].shape for one in state.values()] == [one.shape for one in net.parameters()]
    assert {one["step"] for one in state.values()} == {6}
    assert all(one["kept"].numel() == 1 for one in state.values())
    model.close()


def test_a_state_of_single_values_and_other_types_is_shared() -> None:
    run_ranks(_keep_what_fits, 2)


def _share_a_trunk(update: str) -> None:
    trunk = nn.Linear(8, 8)
    actor, critic = nn.Sequential(trunk, nn.Linear(8, 4)), nn.Sequential(trunk, nn.Linear(8, 1))
    first, _ = poseidon.distribute(actor, torch.optim.SGD(actor.parameters(), 0.1), update=update)
    rest = torch.optim.SGD(critic[1].parameters(), 0.1)
    with pytest.raises(
        UnsupportedError, match=r"0\.weight belongs to another model that distribute\(\) was called with"
    ):
        poseidon.distribute(critic, rest, update=update)
    first.close()
    second, _ = poseidon.distribute(critic, rest, update=update)
    second.close()


@pytest.mark.parametrize("update", ["worker", "server"])
def test_two_models_that_share_parameters_are_refused(update: str) -> None:
    run_ranks(_share_a_trunk, 2, update)


class Noting(torch.optim.SGD):
    """Does something in zero_grad()."""

    cleared = 0

    def zero_grad(self) -> None:  # type: ignore[override]
        Noting.cleared += 1
        super().zero_grad()


def _own_zero_grad(update: str) -> None:
    net = small_net()
    Noting.is_elementwise = True  # type: ignore[attr-defined]
    model, optimizer = poseidon.distribute(net, Noting(net.parameters(), 0.1), update=update)
    for step in range(4):
        x, y = batch_of(step, dist.get_rank())
        optimizer.zero_grad()
        assert all(value.grad is None for value in net.parameters())
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.close()
    assert Noting.cleared == 4


@pytest.mark.parametrize("update", ["worker", "server"])
def test_an_optimizers_own_zero_grad_is_called(update: str) -> None:
    run_ranks(_own_zero_grad, 2, update)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, when it compiles first
def test_a_step_that_was_replaced_before_is_refused() -> None:
    net = small_net()
    optimizer: Any = torch.optim.SGD(net.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, _ = poseidon.distribute(net, optimizer)  # a scheduler's wrapper is known
    model.close()
    assert scheduler.get_last_lr() == [0.1]
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    optimizer.step = torch.compile(optimizer.step)
    poseidon.distribute(net, optimizer)[0].close()
    plain = optimizer.step = torch.optim.SGD(net.parameters(), 0.1).step

    def clamped() -> None:
        plain()

    optimizer.step = clamped
    with pytest.raises(ConfigError, match=r"step\(\) of this SGD was replaced by .*clamped, which would not be called"):
        poseidon.distribute(net, optimizer)


def test_one_worker_refuses_a_closure_where_it_clips() -> None:
    net = small_net()
    _, optimizer = poseidon.distribute(net, torch.optim.SGD(net.parameters(), 0.1), max_grad_norm=1.0)
    optimizer.step()
    optimizer.step(None)
    with pytest.raises(UnsupportedError, match=r"step\(closure\) evaluates the model inside the step"):
        optimizer.step(lambda: 0.0)
