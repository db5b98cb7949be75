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
from poseidon.errors import ConfigError, UnsupportedError
from ranks import run_ranks
from small_net import batch_of, small_net

MODES = ("wrapper", "distribute", "server")


class Hiding(nn.Module):
    """Returns a value as a tensor, and what a second loss is computed from inside an object."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body, self.policy, self.value = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> tuple[Any, Tensor]:
        seen = torch.tanh(self.body(x))
        return SimpleNamespace(logits=self.policy(seen)), self.value(seen)


class Scaling(nn.Module):
    """Leaves a temperature, and the weight of the last layer, to the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4, bias=False)
        self.heat = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))


class Keeping(nn.Module):
    """Returns probabilities, and keeps what the loss is computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()
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


def _kept_again(model: Any, module: Any, x: Tensor, y: Tensor) -> None:
    """Go on after a backward that an error ended in its middle, as one without memory for it does."""

    def fail(_: Tensor) -> None:
        raise MemoryError

    model(x)
    handle = module.net[0].bias.register_hook(fail)
    with pytest.raises(MemoryError):
        F.cross_entropy(module.logits, y).backward()
    handle.remove()
    model.zero_grad()
    _kept(model, module, x, y)


def _scaled(model: Any, module: Any, x: Tensor, y: Tensor) -> None:
    seen = model(x)
    (F.cross_entropy(module.head(seen) * module.heat.exp(), y) + module.heat.square()).backward()


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
    "a loss of what the model keeps, after an error": (Keeping, _kept_again),
    "parameters that the loss uses beside the outputs": (Scaling, _scaled),
    "a penalty before the loss": (small_net, _penalised_first),
    "a penalty on some weights before the loss": (small_net, _penalised_in_part),
    "a forward under no_sync in between": (small_net, _attacked),
    "other weights for a call": (small_net, _halved),
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
        parts = [batch_of(step, rank) for rank in range(dist.get_world_size())]
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
    alone, ours = small_net(), small_net()
    model = poseidon.DistributedDataParallel(ours, routes={"*": "factors"})
    for step in range(5):
        if step == 2:
            for net in (alone, ours):
                prune.l1_unstructured(net[0], "weight", 0.5)
        parts = [batch_of(step, rank) for rank in range(2)]
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
    net = small_net()
    model = poseidon.DistributedDataParallel(net)
    if how == "double":
        model.double()
    else:
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    x = batch_of(0, dist.get_rank())[0]
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


def _called_past(update: str, how: str) -> None:
    net = small_net()
    model, optimizer = poseidon.distribute(net, torch.optim.SGD(net.parameters(), 0.1), update=update)
    x, y = batch_of(0, dist.get_rank())
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
        model(batch_of(step, dist.get_rank())[0]).sum().backward()
    model.train()
    model(batch_of(9, 0)[0])  # the same samples for all, on the buffers of worker 0
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
    parts = [batch_of(0, rank)[0] for rank in range(2)]
    model(parts[dist.get_rank()]).mean().backward()
    alone = Waves()
    alone(torch.cat(parts)).mean().backward()
    torch.testing.assert_close(net.w.grad, alone.w.grad)
    model.close()


def _complex_beside_others() -> None:
    net = nn.Sequential(Waves(), nn.Linear(8, 4))
    with pytest.raises(ConfigError, match=r"'0' cannot take 'sharded': 0 is dense; it can take allreduce"):
        poseidon.DistributedDataParallel(net, routes={"0": "sharded"})
    model = poseidon.DistributedDataParallel(net, routes={"*": "sharded"})
    model(batch_of(0, dist.get_rank())[0]).mean().backward()
    assert model.plan is not None
    assert model.plan.routes == {"0": "allreduce", "1": "sharded"}
    model.close()


def test_complex_parameters_do_not_travel_through_the_server() -> None:
    run_ranks(_complex_beside_others, 2)


def test_complex_parameters_between_machines() -> None:
    run_ranks(_complex, 2, env=[{"POSEIDON_MACHINE": "0"}, {"POSEIDON_MACHINE": "1"}])
