"""``poseidon.distribute`` gives the bits that the plain wrapper gives, whatever is read in between."""

import copy
import os
import signal
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import loops
import nightly
import poseidon
import twins
from loops import loss as _loss
from loops import plain as _plain_loop
from poseidon import zoo
from poseidon.engine.pending import Pending
from poseidon.errors import UnsupportedError, WorkerLostError
from ranks import run_ranks

Loop = Callable[[nn.Module, torch.optim.Optimizer, int], Any]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class _AllTogether(torch.optim.SGD):
    """Looks at all gradients at once and counts its steps, as optimizers with a norm or schedule of their own do."""

    def step(self, closure: Any = None) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        parameters = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, 0.5 / self.steps)
        return super().step(closure)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-3),
    "adamw_single": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, foreach=False),
    "adamw_fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, momentum=0.5, centered=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=1e-3),
    "groups": lambda m: torch.optim.SGD(
        [
            {"params": [p for p in m.parameters() if p.ndim > 1], "weight_decay": 1e-2},
            {"params": [p for p in m.parameters() if p.ndim == 1], "lr": 0.2},
        ],
        lr=0.05,
        momentum=0.9,
    ),
    "of all gradients": lambda m: _AllTogether(m.parameters(), lr=0.05, momentum=0.9),
}


def _net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 40),
        nn.ReLU(),
        nn.Linear(40, 30),
        nn.Tanh(),
        nn.Linear(30, 5),
    )


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    # Worker 0's buffers reach the others at the end of a step here, and at the beginning of the next one there.
    found = [*(model.state_dict() if dist.get_rank() == 0 else dict(model.named_parameters())).values()]
    for _, entry in sorted(optimizer.state_dict()["state"].items()):
        found += [value for value in entry.values() if isinstance(value, Tensor)]
    return [tensor.detach().clone() for tensor in found]


def _train(kind: str, make: MakeOptimizer, loop: Loop, steps: int, **options: Any) -> list[Tensor]:
    torch.manual_seed(3)
    model = _net()
    optimizer = make(model)
    if kind == "distribute":
        wrapped, optimizer = poseidon.distribute(model, optimizer, cluster=twins.slow_cluster(), **options)
    else:
        wrapped = twins.wrap(model, **options)
    for number in range(steps):
        loop(wrapped, optimizer, number)
    found = _state(wrapped, optimizer)
    wrapped.verify_replicas()
    wrapped.close()
    assert all(type(p) is nn.Parameter for p in model.parameters())
    return found


def _compare(make: MakeOptimizer, loop: Loop, steps: int = 6, **options: Any) -> None:
    twins.quiet()
    plain = _train("plain", make, loop, steps, **options)
    ours = _train("distribute", make, loop, steps, **options)
    assert len(plain) == len(ours)
    for a, b in zip(plain, ours, strict=True):
        assert torch.equal(a, b), (a - b).abs().max()


def _compare_optimizer(name: str) -> None:
    _compare(OPTIMIZERS[name], _plain_loop)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_bits_with_every_optimizer(name: str) -> None:
    run_ranks(_compare_optimizer, 2, name)


def _reading(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad(set_to_none=number % 2 == 0)
    _loss(model, number).backward()
    last = list(model.parameters())[-1]
    assert last.grad is not None
    last.grad.mul_(0.5)
    optimizer.step()
    if dist.get_rank() == 0:  # one worker alone must be able to save
        copy.deepcopy(model.module)  # type: ignore[arg-type]
        optimizer.state_dict()


def _scaling(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    scaler = _SCALERS.setdefault(model, torch.amp.GradScaler("cpu", init_scale=1024.0))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = _loss(model, number)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


_SCALERS: weakref.WeakKeyDictionary[nn.Module, torch.amp.GradScaler] = weakref.WeakKeyDictionary()

LOOPS: dict[str, Loop] = {
    "accumulating": loops.accumulating,
    "clipping": loops.clipping,
    "evaluating": loops.evaluating,
    "reading": _reading,
    "stepping_twice": loops.stepping_twice,
    "sharing": loops.sharing,
    "never_clearing": loops.never_clearing,
    "backward_twice": loops.backward_twice,
    "scaling": _scaling,
}


def _compare_loop(name: str, routes: dict[str, str]) -> None:
    _compare(OPTIMIZERS["momentum"], LOOPS[name], routes=routes)


@pytest.mark.parametrize("routes", [{}, {"*": "sharded"}], ids=["planned", "sharded"])
@pytest.mark.parametrize("name", LOOPS)
def test_same_bits_in_every_loop(name: str, routes: dict[str, str]) -> None:
    run_ranks(_compare_loop, 2, name, routes)


def _with_scheduler(is_early: bool) -> None:
    twins.quiet()
    results = []
    for kind in ("plain", "distribute"):
        torch.manual_seed(3)
        model = _net()
        optimizer = OPTIMIZERS["momentum"](model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if is_early else None
        if kind == "distribute":
            wrapped, optimizer = poseidon.distribute(model, optimizer, cluster=twins.slow_cluster())
        else:
            wrapped = twins.wrap(model)
        scheduler = scheduler or torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for number in range(6):
            _plain_loop(wrapped, optimizer, number)
            scheduler.step()
        results.append(_state(wrapped, optimizer))
        wrapped.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("is_early", [True, False])
def test_learning_rate_of_the_moment_of_step_counts(is_early: bool) -> None:
    run_ranks(_with_scheduler, 2, is_early)


def _clip_inside() -> None:
    twins.quiet()
    plain = _train("plain", OPTIMIZERS["momentum"], loops.clipping, 6)
    ours = _train("distribute", OPTIMIZERS["momentum"], _plain_loop, 6, max_grad_norm=0.1)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_max_grad_norm_clips_as_torch_does() -> None:
    run_ranks(_clip_inside, 2)


def _count_hooks() -> None:
    model = _net()
    optimizer = OPTIMIZERS["sgd"](model)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    wrapped, optimizer = poseidon.distribute(model, optimizer, cluster=twins.slow_cluster())
    for number in range(4):
        _plain_loop(wrapped, optimizer, number)
    assert calls == ["before", "after"] * 4
    wrapped.close()


def test_step_hooks_run_once_per_step() -> None:
    run_ranks(_count_hooks, 2)


def _waits_for_what_it_reads() -> None:
    model = _net()
    wrapped, optimizer = poseidon.distribute(model, OPTIMIZERS["sgd"](model), cluster=twins.slow_cluster())
    for number in range(3):
        _plain_loop(wrapped, optimizer, number)
    first, last = model[0].weight, model[4].weight  # a bucket and factors
    assert type(first) is not nn.Parameter
    assert type(last) is not nn.Parameter
    assert first.shape == (8, 3, 3, 3)
    assert type(first) is not nn.Parameter, "a shape is no value"
    first.sum()
    assert type(first) is nn.Parameter
    assert type(last) is not nn.Parameter
    wrapped.finish_step()
    assert type(last) is nn.Parameter
    wrapped.close()
    assert type(optimizer) is torch.optim.SGD


def test_a_read_waits_for_just_what_it_reads() -> None:
    run_ranks(_waits_for_what_it_reads, 2)


def _refusals() -> None:
    model = _net()
    with pytest.raises(UnsupportedError, match="LBFGS"):
        poseidon.distribute(model, torch.optim.LBFGS(model.parameters()))
    wrapped, optimizer = poseidon.distribute(model, OPTIMIZERS["sgd"](model))
    with pytest.raises(UnsupportedError, match="closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(UnsupportedError, match=r"model\.module"):
        copy.deepcopy(wrapped)
    wrapped.close()


class _OwnPace(torch.optim.SGD):
    """Changes an option of its own as it goes, as optimizers that find their learning rate do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = group["lr"] * 0.9
        return super().step(closure)


def _own_pace() -> None:
    model = _net()
    wrapped, optimizer = poseidon.distribute(model, _OwnPace(model.parameters(), lr=0.1))
    with pytest.raises(UnsupportedError, match="'lr'"):
        _plain_loop(wrapped, optimizer, 0)


def test_what_cannot_be_deferred_is_refused() -> None:
    run_ranks(_refusals, 2)
    run_ranks(_own_pace, 2)


def _unfreezing() -> None:
    modes: list[dict[str, Any]] = [
        {},
        {"update": "server"},
        {"consistency": "ssp"},
        {"consistency": "local", "sync_every": 2},
    ]
    for options in (None, *modes):
        model = _net()
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if options is None:
            wrapped = twins.wrap(model)
        else:
            wrapped, optimizer = poseidon.distribute(model, optimizer, **options)
        _plain_loop(wrapped, optimizer, 0)
        model[0].requires_grad_(True)
        with pytest.raises(UnsupportedError, match=r"parameter 0\.weight and 1 more (requires|is trained)"):
            _plain_loop(wrapped, optimizer, 1)
        wrapped.close()


def _replacing() -> None:
    for options in ({"consistency": "ssp"}, {"consistency": "local", "sync_every": 2}):
        model = _net()
        wrapped, optimizer = poseidon.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
        _plain_loop(wrapped, optimizer, 0)
        model[0].weight = nn.Parameter(torch.ones_like(model[0].weight))
        with pytest.raises(UnsupportedError, match=r"parameter 0\.weight is trained .* replaced by another object"):
            _plain_loop(wrapped, optimizer, 1)
        wrapped.close()


def test_parameters_that_begin_to_require_gradients_are_refused_in_every_mode() -> None:
    run_ranks(_unfreezing, 2)


def test_parameters_that_are_replaced_are_refused_where_no_gradient_tells() -> None:
    run_ranks(_replacing, 2)


def _compiled(part: str) -> None:
    twins.quiet()
    results = []
    for kind in ("plain", "distribute"):
        torch.manual_seed(3)
        model = _net()
        waiting: list[bool] = []
        if part == "layers":
            model[4] = torch.compile(model[4], backend="eager")
            model[0].register_forward_hook(
                lambda *_, model=model, waiting=waiting: waiting.append(isinstance(model[4].weight, Pending))
            )
        elif part == "in place":
            model[4].compile(backend="eager")
        optimizer = OPTIMIZERS["momentum"](model)
        if kind == "distribute":
            wrapped, optimizer = poseidon.distribute(model, optimizer, cluster=twins.slow_cluster())
        else:
            wrapped = twins.wrap(model)
        trained = torch.compile(wrapped, backend="eager") if part == "wrapper" else wrapped
        for number in range(5):
            _plain_loop(trained, optimizer, number)
        results.append([p.detach().clone() for p in model.parameters()])
        wrapped.close()
        # A compiled layer lands its own parameters: those of the first need not wait for them.
        assert any(waiting) == (kind == "distribute" and part == "layers")
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def _compiled_step(mode: str) -> None:
    twins.quiet()
    results = []
    for compiles in (False, True):
        torch.manual_seed(3)
        model = _net()
        optimizer = OPTIMIZERS["momentum"](model)
        if mode == "wrapper":
            wrapped = twins.wrap(model, cluster=twins.slow_cluster())
        else:
            options: dict[str, Any] = {"update": "server"} if mode == "server" else {"cluster": twins.slow_cluster()}
            wrapped, optimizer = poseidon.distribute(model, optimizer, **options)
        # Also what runs in its backward, and in step().
        loop = torch.compile(_plain_loop, backend="eager") if compiles else _plain_loop
        for number in range(5):
            loop(wrapped, optimizer, number)
        results.append([p.detach().clone() for p in model.parameters()])
        wrapped.verify_replicas()
        wrapped.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("mode", ["wrapper", "distribute", "server"])
def test_a_whole_step_may_be_compiled(mode: str) -> None:
    run_ranks(_compiled_step, 2, mode)


@pytest.mark.parametrize("part", ["wrapper", "layers", "in place"])
def test_compiled_models_see_finished_parameters(part: str) -> None:
    run_ranks(_compiled, 2, part)


def _die_in_the_middle() -> str:
    torch.manual_seed(3)
    model = _net()
    options: dict[str, Any] = {"cluster": twins.slow_cluster(), "routes": {"*": "sharded"}, "timeout_s": 20}
    wrapped, optimizer = poseidon.distribute(model, OPTIMIZERS["sgd"](model), **options)

    def train() -> None:
        for number in range(10):
            if number == 4 and dist.get_rank() == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            _plain_loop(wrapped, optimizer, number)

    with pytest.raises(WorkerLostError) as caught:
        train()
    with pytest.raises(UnsupportedError, match="restart from a checkpoint"):
        optimizer.step()
    return str(caught.value)


def test_a_death_behind_the_server_is_named() -> None:
    for message in run_ranks(_die_in_the_middle, 3, lost=[2])[:2]:
        assert "rank 2" in message


def test_alone_it_is_the_plain_loop() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    wrapped, optimizer = poseidon.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.weight.detach().clone()
    wrapped(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before - 0.1)


def _compare_network(name: str, routes: dict[str, str]) -> None:
    twins.quiet()
    options: dict[str, Any] = {"cluster": twins.slow_cluster(), "routes": routes}
    results = []
    for kind in ("plain", "distribute"):
        torch.manual_seed(5)
        network = zoo.build(name, tiny=True, dropout=0.0)
        inputs, targets = network.batch(2, seed=dist.get_rank() + 1)
        optimizer = torch.optim.SGD(network.model.parameters(), lr=0.01, momentum=0.9)
        if kind == "distribute":
            wrapped, optimizer = poseidon.distribute(network.model, optimizer, **options)
        else:
            wrapped = twins.wrap(network.model, **options)
        for _ in range(5):
            optimizer.zero_grad()
            network.loss(wrapped(*inputs), targets).backward()
            optimizer.step()
        results.append([p.detach().clone() for p in network.model.parameters()])
        wrapped.verify_replicas()
        assert wrapped.plan is not None
        assert ("sharded" in wrapped.plan.routes.values()) == (dist.get_world_size() > 2)
        wrapped.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", nightly.amount(["alexnet", "resnet50", "inception-v3", "gpt2", "dlrm"], zoo.names()))
def test_same_bits_for_every_network(name: str) -> None:
    # Two workers on two machines take allreduce where nothing shorter exists, three the parameter server.
    run_ranks(_compare_network, 2, name, {})


@pytest.mark.parametrize("name", nightly.amount(["googlenet", "dlrm"], ["resnet50", "googlenet", "gpt2", "dlrm"]))
def test_same_bits_through_the_server(name: str) -> None:
    run_ranks(_compare_network, 3, name, {})
