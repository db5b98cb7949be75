"""What goes wrong is said once, clearly, and in time."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from poseidon.errors import MismatchError, PoseidonError, UnsupportedError, WorkerLostError
from poseidon.team import life
from ranks import run_ranks
from twins import wrap


def _message(action: Callable[[], object], kind: type[PoseidonError]) -> str:
    with pytest.raises(kind) as caught:
        action()
    return str(caught.value)


def _step(model: nn.Module, rows: int = 3, width: int = 8) -> None:
    model(torch.randn(rows, width)).square().sum().backward()


def _different_models(kind: str) -> str:
    odd = dist.get_rank() == 1
    if kind == "shape":
        model: nn.Module = nn.Linear(8, 9 if odd else 8)
    elif kind == "dtype":
        model = nn.Linear(8, 8, dtype=torch.float64 if odd else torch.float32)
    elif kind == "order":
        layers = {"left": nn.Linear(8, 8), "right": nn.Linear(8, 4)}
        model = nn.ModuleDict(dict(reversed(layers.items())) if odd else layers)
    elif kind == "frozen":
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(not odd))
    else:
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3 if odd else 2)])
    return _message(lambda: wrap(model), MismatchError)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("shape", "weight has shape [8, 8] on rank 0 and [9, 8] on rank 1"),
        ("dtype", "weight has dtype torch.float32 on rank 0 and torch.float64 on rank 1"),
        ("order", "rank 0 has left.weight where rank 1 has right.weight; the parameters are registered in different"),
        ("frozen", "1.weight has requires_grad True on rank 0 and False on rank 1"),
        ("count", "rank 0 has 4 tensors, rank 1 6; the first only rank 1 has is 2.weight"),
    ],
)
def test_different_models_are_named(kind: str, expected: str) -> None:
    for message in run_ranks(_different_models, 2, kind):
        assert expected in message


def _unused() -> str:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    model = wrap(Half())
    _step(model)
    return _message(lambda: _step(model), UnsupportedError)


def test_unused_parameters_are_named() -> None:
    for message in run_ranks(_unused, 2):
        assert "idle.weight" in message
        assert "find_unused_parameters=True" in message


def _twice() -> str:
    from torch.utils.checkpoint import checkpoint

    layer = nn.Linear(8, 8)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.requires_grad_()
            return checkpoint(self.layer, checkpoint(self.layer, x, use_reentrant=True), use_reentrant=True)

    return _message(lambda: _step(wrap(Twice())), UnsupportedError)


def test_gradient_finished_twice() -> None:
    for message in run_ranks(_twice, 2):
        assert "finished twice" in message
        assert "use_reentrant=False" in message


def _after_a_broken_backward() -> str:
    model = wrap(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))

    def explode(_: torch.Tensor) -> None:
        raise KeyError("broken")

    x = torch.randn(3, 8, requires_grad=True)
    hidden = model.module[0].register_forward_hook(lambda _, __, out: out.register_hook(explode) and None)
    with pytest.raises(KeyError):
        model(x).sum().backward()
    hidden.remove()
    return _message(lambda: model(x), UnsupportedError)


def test_broken_backward_is_not_ignored() -> None:
    assert "interrupted by an error" in run_ranks(_after_a_broken_backward, 2)[0]


def _no_sync_on_one_rank() -> str:
    model = wrap(nn.Linear(8, 8), timeout_s=8)
    _step(model)
    if dist.get_rank() == 1:
        with model.no_sync():
            _step(model)
    return _message(lambda: _step(model), PoseidonError)


def test_no_sync_on_one_rank_only() -> None:
    messages = run_ranks(_no_sync_on_one_rank, 2)
    assert any("use no_sync() on all workers or on none" in message for message in messages)


def _replica_changed_on_one_rank() -> str:
    model = wrap(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    _step(model)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.module[1].bias[3] += 1e-7
    return _message(model.verify_replicas, MismatchError)


def test_replicas_that_differ_are_named() -> None:
    for message in run_ranks(_replica_changed_on_one_rank, 2):
        assert "1.bias on rank 1" in message


def _different_arithmetic() -> tuple[str, dict[str, str]]:
    from poseidon.engine import assemble

    if dist.get_rank() == 1:
        assemble.arithmetic_digest = lambda _: 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = wrap(nn.Linear(64, 64))
    _step(model, width=64)
    assert model.plan is not None
    return str(caught[0].message), model.plan.routes


def test_workers_that_round_differently_use_allreduce() -> None:
    for message, routes in run_ranks(_different_arithmetic, 2):
        assert "rank 1" in message
        assert "round matrix products differently" in message
        assert routes == {"(root)": "allreduce"}


# Death and hanging. Rank 1 is the culprit; the others must say so before their patience (timeout_s) is much exceeded.

PATIENCE_S = 4.0


def _model() -> nn.Module:
    # A unit for each route: factors, allreduce and rows.
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(200, 32)
            self.wide = nn.Linear(32, 64)
            self.norm = nn.LayerNorm(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.wide(self.table(x)))

    return Three()


def _lose_rank_1(how: str, where: str) -> tuple[str, float]:
    culprit = dist.get_rank() == 1
    # A worker that does nothing outside of exchanges is given more time than fits into a test.
    life.IDLE_TIMES = 1

    def vanish() -> None:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        signal.sigwait({signal.SIGUSR2})  # hangs until the test ends

    if culprit and where == "wrapping":
        vanish()
    started = time.monotonic()
    try:
        model = wrap(_model(), timeout_s=PATIENCE_S)
        for step in range(4):
            if step == 2 and culprit and where == "forward":
                vanish()
            out = model(torch.randint(0, 200, (3,)))
            if step == 2 and culprit and where == "backward":
                model.module.norm.register_full_backward_hook(lambda *_: vanish())
                out = model(torch.randint(0, 200, (3,)))
            started = time.monotonic()
            out.square().sum().backward()
    except WorkerLostError as error:
        return str(error), time.monotonic() - started
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize("where", ["wrapping", "forward", "backward"])
@pytest.mark.parametrize("how", ["killed", "hanging"])
def test_lost_worker_is_named_in_time(how: str, where: str) -> None:
    results = run_ranks(_lose_rank_1, 3, how, where, lost=[1], timeout_s=40)
    for message, seconds in (results[0], results[2]):
        assert "rank 1" in message
        if how == "killed" or where == "wrapping":
            assert "dead or cut off" in message or "never reported" in message
        else:
            doing = {"forward": "step 1, finished backward", "backward": "step 2, in backward"}[where]
            assert f") is alive, at {doing} (waited" in message
            verdict = message.split(": ", 1)[1]
            assert verdict.removeprefix("nobody is dead, but ").startswith("rank 1 ("), message
        assert seconds < PATIENCE_S + 10


def _evaluate_for_long(where: str) -> str:
    model = wrap(_model(), timeout_s=2.0)
    for step in range(3):
        out = model(torch.randint(0, 200, (3,)))
        if step == 1 and dist.get_rank() == 1 and where == "forward":
            time.sleep(5.0)
        out.square().sum().backward()
        if step == 1 and dist.get_rank() == 1 and where == "after":
            time.sleep(5.0)
    model.verify_replicas()
    return "done"


@pytest.mark.parametrize("where", ["forward", "after"])
def test_a_worker_that_is_busy_for_longer_than_the_limit_ends_nothing(where: str) -> None:
    assert run_ranks(_evaluate_for_long, 2, where, timeout_s=40) == ["done", "done"]


def _wait_for_different_things() -> str:
    model = wrap(_model(), timeout_s=2.0)
    _train(model)
    if dist.get_rank() == 1:
        # Its own collective, of which the other knows nothing.
        with pytest.raises(RuntimeError):
            dist.monitored_barrier(timeout=timedelta(seconds=20))
        return ""
    return _message(lambda: _train(model), WorkerLostError)


def _train(model: nn.Module) -> None:
    model(torch.randint(0, 200, (3,))).square().sum().backward()


def test_workers_that_wait_for_different_things_are_named_with_them() -> None:
    message = run_ranks(_wait_for_different_things, 2, lost=[1], timeout_s=40)[0]
    assert "nobody is dead, but rank 1" in message
    assert "is alive, at step 0, finished backward, waiting for monitored_barrier() of torch.distributed" in message
