"""Programs whose gradients would stay on each worker without a word: they are exchanged, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import poseidon
from poseidon.errors import ConfigError, MismatchError, UnsupportedError, WorkerLostError
from ranks import run_ranks

MODES = ("wrapper", "distribute", "server")
ROWS = 6


def _data(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, 8, generator=generator), torch.randint(0, 4, (ROWS,), generator=generator)


def _net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


class Hiding(nn.Module):
    """Returns a value as a tensor, and what a second loss is computed from inside an object."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body, self.policy, self.value = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> tuple[Any, Tensor]:
        seen = torch.tanh(self.body(x))
        return SimpleNamespace(logits=self.policy(seen)), self.value(seen)


class Keeping(nn.Module):
    """Returns probabilities, and keeps what the loss is computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _net()
        self.logits = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.logits = self.net(x)
        return self.logits.softmax(1)


Loss = Callable[[Any, nn.Module, Tensor, Tensor], None]
"""Runs the backward of one step of a model, of which the module is the user's own."""


def _hidden(model: Any, _module: nn.Module, x: Tensor, y: Tensor) -> None:
    hidden, value = model(x)
    (F.cross_entropy(hidden.logits, y) + 0 * value.sum()).backward()


def _hidden_last(model: Any, _module: nn.Module, x: Tensor, y: Tensor) -> None:
    hidden, value = model(x)
    value.square().mean().backward(retain_graph=True)
    F.cross_entropy(hidden.logits, y).backward()


def _kept(model: Any, module: Any, x: Tensor, y: Tensor) -> None:
    model(x)
    F.cross_entropy(module.logits, y).backward()


def _penalised_first(model: Any, module: nn.Module, x: Tensor, y: Tensor) -> None:
    out = model(x)
    (0.1 * sum(value.square().sum() for value in module.parameters())).backward()
    F.cross_entropy(out, y).backward()


def _penalised_in_part(model: Any, module: nn.Module, x: Tensor, y: Tensor) -> None:
    out = model(x)
    (0.1 * next(module.parameters()).square().sum()).backward()
    F.cross_entropy(out, y).backward()


def _attacked(model: Any, _module: nn.Module, x: Tensor, y: Tensor) -> None:
    out = model(x)
    if hasattr(model, "no_sync"):
        with model.no_sync():
            moved = x.clone().requires_grad_()
            torch.autograd.grad(F.cross_entropy(model(moved), y), moved)
    F.cross_entropy(out, y).backward()


def _halved(model: Any, module: nn.Module, x: Tensor, y: Tensor) -> None:
    prefix = "" if model is module else "module."
    weights = {f"{prefix}{name}": 0.5 * value for name, value in module.named_parameters()}
    F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y).backward()


CASES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "outputs inside an object": (Hiding, _hidden),
    "a second loss from inside an object": (Hiding, _hidden_last),
    "a loss of what the model keeps": (Keeping, _kept),
    "a penalty before the loss": (_net, _penalised_first),
    "a penalty on some weights before the loss": (_net, _penalised_in_part),
    "a forward under no_sync in between": (_net, _attacked),
    "other weights for a call": (_net, _halved),
}


def _train(case: str, mode: str, routes: str | None) -> None:
    make, backward = CASES[case]
    alone, ours = make(), make()
    plain = torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9)
    optimizer: Any = torch.optim.SGD(ours.parameters(), 0.1, momentum=0.9)
    options: dict[str, Any] = {} if routes is None or mode == "server" else {"routes": {"*": routes}}
    if mode == "wrapper":
        model: Any = poseidon.DistributedDataParallel(ours, **options)
    else:
        update = "server" if mode == "server" else "worker"
        model, optimizer = poseidon.distribute(ours, optimizer, update=update, **options)
    for step in range(5):
        parts = [_data(step, rank) for rank in range(dist.get_world_size())]
        plain.zero_grad()
        backward(alone, alone, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
        plain.step()
        optimizer.zero_grad()
        backward(model, ours, *parts[dist.get_rank()])
        optimizer.step()
    for mine, theirs in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-4, atol=1e-6)
    model.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", list(CASES))
def test_every_backward_of_the_model_is_exchanged(case: str, mode: str) -> None:
    if mode == "server" and case == "other weights for a call":
        pytest.skip("docs/server.md: torch.func reads weights past it")
    run_ranks(_train, 2, case, mode, None)


def test_factors_are_not_those_of_other_weights() -> None:
    run_ranks(_train, 2, "other weights for a call", "wrapper", "factors")


def _pruned() -> None:
    alone, ours = _net(), _net()
    model = poseidon.DistributedDataParallel(ours, routes={"*": "factors"})
    for step in range(5):
        if step == 2:
            for net in (alone, ours):
                prune.l1_unstructured(net[0], "weight", 0.5)
        parts = [_data(step, rank) for rank in range(2)]
        for net, called, (x, y) in (
            (alone, alone, tuple(map(torch.cat, zip(*parts, strict=True)))),
            (ours, model, parts[dist.get_rank()]),
        ):
            net.zero_grad()
            F.cross_entropy(called(x), y).backward()
        for mine, theirs in zip(ours.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    model.close()


def test_what_was_pruned_after_wrapping_gets_no_gradient_by_its_factors() -> None:
    run_ranks(_pruned, 2)


def _converted(how: str) -> str:
    net = _net()
    model = poseidon.DistributedDataParallel(net)
    if how == "double":
        model.double()
    else:
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    x = _data(0, dist.get_rank())[0]
    with pytest.raises(UnsupportedError) as refused:
        model(x.double() if how == "double" else x).sum().backward()
    return str(refused.value)


@pytest.mark.parametrize(
    ("how", "says"),
    [("double", "torch.float32 on cpu when .* are torch.float64 on cpu now"), ("assign", "parameter 0.weight and 3")],
)
def test_parameters_that_are_others_after_wrapping_are_refused(how: str, says: str) -> None:
    for said in run_ranks(_converted, 2, how):
        assert re.search(says, said), said


def _with_a_stranger(update: str) -> None:
    net, margin = _net(), nn.Linear(4, 10)
    optimizer = torch.optim.SGD([*net.parameters(), *margin.parameters()], 0.1)
    with pytest.raises(ConfigError, match=r"trains 2 parameter\(s\) that the model does not have .* \(10, 4\)"):
        poseidon.distribute(net, optimizer, update=update)


@pytest.mark.parametrize("update", ["worker", "server"])
def test_an_optimizer_with_parameters_of_others_is_refused(update: str) -> None:
    run_ranks(_with_a_stranger, 2, update)


def _added_later(update: str) -> None:
    net = _net()
    optimizer = torch.optim.SGD(net[0].parameters(), 0.1)
    model, optimizer = poseidon.distribute(net, optimizer, update=update)  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match=r"2 parameter\(s\) \(the first is of shape \(10, 4\)\)"):
        optimizer.add_param_group({"params": nn.Linear(4, 10).parameters()})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": net[2].parameters(), "lr": 0.05})
    before = net[2].weight.detach().clone()
    x, y = _data(0, dist.get_rank())
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert not torch.equal(net[2].weight, before)
    model.close()


@pytest.mark.parametrize("update", ["worker", "server"])
def test_a_group_with_parameters_of_others_is_refused(update: str) -> None:
    run_ranks(_added_later, 2, update)


def _called_past(update: str, how: str) -> None:
    net = _net()
    model, optimizer = poseidon.distribute(net, torch.optim.SGD(net.parameters(), 0.1), update=update)
    x, y = _data(0, dist.get_rank())
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        # A penalty in a backward of its own is the same on all workers.
        (0.1 * net[0].weight.square().sum()).backward()
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()  # with nothing to step on, as a loop may that skips a batch
    if how == "the model that was given":
        F.cross_entropy(net(x), y).backward()
    else:
        with model.no_sync():
            F.cross_entropy(model(x), y).backward()
    with pytest.raises(UnsupportedError, match=r"step\(\) would use this worker's own gradients"):
        optimizer.step()
    model.close()


@pytest.mark.parametrize("how", ["the model that was given", "under no_sync to the end"])
@pytest.mark.parametrize("update", ["worker", "server"])
def test_no_step_is_taken_on_gradients_that_nobody_exchanged(update: str, how: str) -> None:
    run_ranks(_called_past, 2, update, how)


def _train_apart(model: Any, optimizer: Any, how: str) -> None:
    for step in range(6):
        x, y = _data(step, dist.get_rank())
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        is_odd = step == 3 and dist.get_rank() == 1
        if is_odd and how == "another learning rate":
            optimizer.param_groups[0]["lr"] = 0.05
        for _ in range({"a skipped step": 0, "a step too many": 2}.get(how, 1) if is_odd else 1):
            optimizer.step()


def _steps_apart(update: str, how: str) -> str:
    net = _net()
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


def _adds_own(how: str) -> str:
    """Let a backward without an exchange follow the one before the step: of a penalty, or of other samples."""
    trained = []
    for update in ("worker", "server"):
        net = _net()
        model, optimizer = poseidon.distribute(net, torch.optim.Adam(net.parameters(), 0.1), update=update)
        try:
            for step in range(6):
                x, y = _data(step, dist.get_rank())
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                if how == "penalty":
                    net[0].weight.square().sum().backward()
                elif step == 3:
                    with model.no_sync():
                        F.cross_entropy(model(x + 1), y).backward()
                optimizer.step()
            trained.append([value.clone() for value in net.parameters()])
        except MismatchError as error:
            trained.append(str(error))
        model.close()
    if how == "penalty":
        assert all(map(torch.equal, *trained))
        return ""
    assert "rank 0 and rank 1" in trained[1] or "rank 1 and rank 0" in trained[1]
    return trained[1]


@pytest.mark.parametrize("how", ["penalty", "other samples"])
def test_owners_step_on_what_was_added_alike_on_all_workers_or_nobody_does(how: str) -> None:
    for said in run_ranks(_adds_own, 2, how, env={"POSEIDON_CHECK_REPLICAS": "0"}):
        assert how == "penalty" or "on gradients to which a backward without an exchange had added others" in said


def _put_gradients(update: str) -> None:
    net = _net()
    model, optimizer = poseidon.distribute(net, torch.optim.SGD(net.parameters(), 0.1), update=update)
    x, y = _data(0, dist.get_rank())
    for number in range(4):
        optimizer.zero_grad()
        # An attack on the input only passes through, before and after.
        moved = x.clone().requires_grad_()
        torch.autograd.grad(F.cross_entropy(model(moved), y), moved)
        F.cross_entropy(model(x), y).backward()
        if number % 2:
            torch.autograd.grad(F.cross_entropy(model(moved), y), moved)
        optimizer.step()
    optimizer.zero_grad()
    gradients = torch.autograd.grad(F.cross_entropy(model(x), y), [*net.parameters()])
    optimizer.step()  # on nothing
    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
        parameter.grad = gradient
    with pytest.raises(UnsupportedError, match=r"from torch.autograd.grad\(\) that are put into .grad"):
        optimizer.step()
    model.close()


@pytest.mark.parametrize("update", ["worker", "server"])
def test_gradients_that_were_taken_and_put_back_are_refused(update: str) -> None:
    run_ranks(_put_gradients, 2, update)


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
    net = _net()
    optimizer: Any = Counted(net.parameters(), 0.1)
    optimizer.steps = 0
    model, optimizer = poseidon.distribute(net, optimizer, update=update)
    with pytest.raises((UnsupportedError, WorkerLostError)) as refused:
        _train_apart(model, optimizer, "")
    return str(refused.value)


@pytest.mark.parametrize("update", ["worker", "server"])
def test_an_optimizer_that_counts_itself_is_refused_where_it_is_called_more_often(update: str) -> None:
    assert any("changes its own attribute 'steps' in step()" in said for said in run_ranks(_count, 2, update))


def _adds_a_penalty(update: str, routes: str) -> list[list[Tensor]]:
    """Let a penalty, whose graph was made before, have its backward after the loss's, and opaque outputs have two."""
    found = []
    for mode in ("wrapper", update):
        torch.manual_seed(5)
        net = nn.Sequential(nn.Embedding(8, 8), nn.Flatten(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        model: Any
        if mode == "wrapper":
            model = poseidon.DistributedDataParallel(net, routes={"*": routes})
        else:
            options: dict[str, Any] = {"update": "server"} if mode == "server" else {"routes": {"*": routes}}
            model, optimizer = poseidon.distribute(net, optimizer, **options)
        for step in range(6):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            x, y = torch.randint(0, 8, (6, 2), generator=generator), torch.randint(0, 4, (6,), generator=generator)
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss = F.cross_entropy(model(x), y)
            penalty = 0.1 * sum(value.square().sum() for value in list(net.parameters())[:3])
            loss.backward()
            penalty.backward()
            optimizer.step()
        found.append([value.detach().clone() for value in net.parameters()])
        model.close()
    return found


@pytest.mark.parametrize("routes", ["sharded", "factors", "allreduce", "rows"])
def test_a_penalty_after_the_loss_counts_while_gradients_are_under_way(routes: str) -> None:
    for exact, ours in run_ranks(_adds_a_penalty, 2, "worker", routes):
        for one, other in zip(exact, ours, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_penalty_after_the_loss_counts_with_owners() -> None:
    for exact, ours in run_ranks(_adds_a_penalty, 2, "server", "sharded"):
        for one, other in zip(exact, ours, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def _freeze_later(mode: str, routes: str, is_bias: bool) -> bool:
    """Freeze all biases, or all weights, after some steps; return whether any of them was trained since."""
    net = _net()
    optimizer: Any = torch.optim.AdamW(net.parameters(), 0.1, weight_decay=0.1)
    options: dict[str, Any] = {"routes": {"*": routes}, "find_unused_parameters": True}
    model: Any
    if mode == "wrapper":
        model = poseidon.DistributedDataParallel(net, **options)
    else:
        model, optimizer = poseidon.distribute(net, optimizer, **options)
    frozen: dict[str, Tensor] = {}
    for step in range(8):
        if step == 4:
            for name, value in net.named_parameters():
                value.requires_grad_(name.endswith("bias") != is_bias)
                if not value.requires_grad:
                    frozen[name] = value.detach().clone()
        x, y = _data(step, dist.get_rank())
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        assert all(net.get_parameter(name).grad is None for name in frozen)
        optimizer.step()
    has_trained = any(not torch.equal(net.get_parameter(name), value) for name, value in frozen.items())
    model.close()
    return has_trained


@pytest.mark.parametrize("is_bias", [True, False], ids=["biases", "weights"])
@pytest.mark.parametrize("routes", ["factors", "sharded"])
@pytest.mark.parametrize("mode", ["wrapper", "distribute"])
def test_what_is_frozen_later_is_not_trained(mode: str, routes: str, is_bias: bool) -> None:
    assert run_ranks(_freeze_later, 2, mode, routes, is_bias) == [False, False]


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
    net = _net()
    Noting.is_elementwise = True  # type: ignore[attr-defined]
    model, optimizer = poseidon.distribute(net, Noting(net.parameters(), 0.1), update=update)
    for step in range(4):
        x, y = _data(step, dist.get_rank())
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
    net = _net()
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
    net = _net()
    _, optimizer = poseidon.distribute(net, torch.optim.SGD(net.parameters(), 0.1), max_grad_norm=1.0)
    optimizer.step()
    optimizer.step(None)
    with pytest.raises(UnsupportedError, match=r"step\(closure\) evaluates the model inside the step"):
        optimizer.step(lambda: 0.0)


def _evaluated_between(update: str) -> None:
    """Evaluate in inference mode between backward and clipping."""
    net = _net()
    model, optimizer = poseidon.distribute(net, torch.optim.SGD(net.parameters(), 0.1), update=update)
    for step in range(6):
        x, y = _data(step, dist.get_rank())
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.inference_mode():
            model(x)
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
    model.close()


@pytest.mark.parametrize("update", ["worker", "server"])
def test_an_evaluation_in_inference_mode_leaves_gradients_of_use(update: str) -> None:
    run_ranks(_evaluated_between, 2, update)


def _skips_a_sparse_table(mode: str) -> None:
    """Use a sparse table in the first of two backwards of a step only."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"table": nn.Embedding(9, 4, sparse=True), "layer": nn.Linear(4, 2)})

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = net

        def forward(self, words: Tensor | None) -> Tensor:
            inputs = torch.ones(2, 4) if words is None else net["table"](words)
            scores: Tensor = net["layer"](inputs)
            return scores

    whole = Net()
    optimizer: Any = torch.optim.SGD(whole.parameters(), 0.5)
    model: Any
    if mode == "wrapper":
        model = poseidon.DistributedDataParallel(whole, find_unused_parameters=True)
    else:
        model, optimizer = poseidon.distribute(whole, optimizer, find_unused_parameters=True)
    for _ in range(5):
        before = net["table"].weight.detach().clone()
        optimizer.zero_grad()
        model(torch.tensor([1, 2 + dist.get_rank()])).square().sum().backward()
        model(None).square().sum().backward()
        optimizer.step()
        moved = (net["table"].weight.detach() != before).any(1).nonzero().flatten().tolist()
        assert moved == [1, 2, 3]
    model.close()


@pytest.mark.parametrize("mode", ["wrapper", "distribute"])
def test_a_sparse_gradient_stays_if_a_later_backward_does_not_use_its_table(mode: str) -> None:
    run_ranks(_skips_a_sparse_table, 2, mode)


class Centred(nn.Module):
    """Gives its buffer other memory in every forward."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)
        self.register_buffer("center", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.center.data = 0.9 * self.center.data + 0.1 * x.mean(0).detach()
        out: Tensor = self.fc(x - self.center)
        return out


def _buffers() -> Tensor:
    model: Any = poseidon.DistributedDataParallel(Centred())
    for step in range(4):
        model(_data(step, dist.get_rank())[0]).sum().backward()
    model.train()
    model(_data(9, 0)[0])  # the same samples for all, on the buffers of worker 0
    center: Tensor = model.module.center.clone()
    model.close()
    return center


def test_buffers_that_got_other_memory_are_still_worker_0s() -> None:
    first, second = run_ranks(_buffers, 2)
    assert torch.equal(first, second)


class Waves(nn.Module):
    """A layer with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.w = nn.Parameter(torch.randn(8, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).abs()


def _complex() -> None:
    net = Waves()
    model = poseidon.DistributedDataParallel(net)
    parts = [_data(0, rank)[0] for rank in range(2)]
    model(parts[dist.get_rank()]).mean().backward()
    alone = Waves()
    alone(torch.cat(parts)).mean().backward()
    torch.testing.assert_close(net.w.grad, alone.w.grad)
    model.close()


def test_complex_parameters_between_machines() -> None:
    run_ranks(_complex, 2, env=[{"POSEIDON_MACHINE": "0"}, {"POSEIDON_MACHINE": "1"}])


class Forked(nn.Module):
    """Two outputs, of which each may have a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = torch.tanh(self.trunk(x))
        return self.left(inner), self.right(inner)


def _one_output_again(mode: str) -> Tensor:
    torch.manual_seed(5)
    net = Forked()
    optimizer: Any = torch.optim.SGD(net.parameters(), 0.1)
    model: Any
    if mode == "wrapper":
        model = poseidon.DistributedDataParallel(net)
    else:
        model, optimizer = poseidon.distribute(net, optimizer, update=mode)
    for step in range(5):
        x, _ = _data(step, dist.get_rank())
        optimizer.zero_grad()
        left, right = model(x)
        (left + right).square().sum().backward(retain_graph=True)
        left.sum().backward()  # which reaches less
        optimizer.step()
    found = torch.cat([value.detach().flatten().clone() for value in net.parameters()])
    model.close()
    return found


def test_a_second_backward_of_one_output_may_reach_less() -> None:
    exact, *others = [run_ranks(_one_output_again, 2, mode)[0] for mode in ("wrapper", "worker", "server")]
    for other in others:
        torch.testing.assert_close(exact, other, rtol=1e-5, atol=1e-6)
