"""Gradients that come beside, or after, those that are exchanged, and parameters that get none."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import poseidon
from poseidon.errors import MismatchError, UnsupportedError
from ranks import run_ranks
from small_net import batch_of, small_net
from twins import slow_cluster


def _distributed(net: nn.Module, optimizer: Any, mode: str) -> tuple[Any, Any]:
    """Return a model and its optimizer by the wrapper, or by ``distribute`` with an update by ``mode``."""
    if mode == "wrapper":
        return poseidon.DistributedDataParallel(net), optimizer
    return poseidon.distribute(net, optimizer, update="worker" if mode == "distribute" else mode)


def _adds_own(how: str) -> str:
    """Let a backward without an exchange follow the one before the step: of a penalty, or of other samples."""
    trained = []
    for update in ("worker", "server"):
        net = small_net()
        model, optimizer = poseidon.distribute(net, torch.optim.Adam(net.parameters(), 0.1), update=update)
        try:
            for step in range(6):
                x, y = batch_of(step, dist.get_rank())
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
    net = small_net()
    model, optimizer = poseidon.distribute(net, torch.optim.SGD(net.parameters(), 0.1), update=update)
    x, y = batch_of(0, dist.get_rank())
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
    net = small_net()
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
        x, y = batch_of(step, dist.get_rank())
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


def _evaluated_between(update: str) -> None:
    """Evaluate in inference mode between backward and clipping."""
    net = small_net()
    model, optimizer = poseidon.distribute(net, torch.optim.SGD(net.parameters(), 0.1), update=update)
    for step in range(6):
        x, y = batch_of(step, dist.get_rank())
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
    model, optimizer = _distributed(net, optimizer, mode)
    for step in range(5):
        x, _ = batch_of(step, dist.get_rank())
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


def _one_worker_alone() -> None:
    """Let one worker look at gradients of its own, and clear them; and accumulate a different number of times."""
    net = nn.Sequential(nn.Embedding(8, 8), nn.Flatten(), nn.Linear(16, 4))
    model = poseidon.DistributedDataParallel(net, routes={"0": "rows", "2": "factors"})
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(5):
        words = torch.randint(0, 8, (6, 2), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        if dist.get_rank() == 0 and step % 2:
            net(words).max().backward()
        optimizer.zero_grad()
        model(words).square().mean().backward()
        optimizer.step()
    model.verify_replicas()
    model.close()


def test_gradients_that_one_worker_looked_at_and_cleared_do_not_matter() -> None:
    run_ranks(_one_worker_alone, 2)


def _penalty_between() -> list[Tensor]:
    """Let a penalty have its backward between a forward with a sparse look-up and that of its loss."""
    found = []
    for routes in ("sharded", "rows"):
        torch.manual_seed(5)
        net = nn.Sequential(nn.Embedding(8, 8), nn.Flatten(), nn.Linear(16, 4))
        model = poseidon.DistributedDataParallel(net, routes={"0": routes})
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(5):
            words = torch.randint(0, 8, (6, 2), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            optimizer.zero_grad()
            scores = model(words)
            (0.1 * net[2].weight.square().sum()).backward()
            scores.square().mean().backward()
            optimizer.step()
        found.append(torch.cat([value.detach().flatten() for value in net.parameters()]))
        model.close()
    return found


def test_a_penalty_between_a_look_up_and_its_loss() -> None:
    for exact, ours in run_ranks(_penalty_between, 2):
        torch.testing.assert_close(exact, ours, rtol=1e-5, atol=1e-6)


def _joined_in_two() -> list[list[Tensor]]:
    """Let two backwards of a step meet in join(), where one worker has fewer batches; and the same alone."""
    found = []
    for mode in ("alone", "factors", "sharded"):
        net = small_net()
        model: Any = net if mode == "alone" else poseidon.DistributedDataParallel(net, routes={"*": mode})
        context = contextlib.nullcontext() if mode == "alone" else model.join(divide_by_initial_world_size=False)
        with context:
            for step in range(1 + (dist.get_rank() == 0 or mode == "alone")):
                net.zero_grad()
                for part in range(2):
                    parts = []
                    for rank in range(2 if mode == "alone" and step == 0 else 1):
                        who = rank if mode == "alone" else dist.get_rank()
                        x, y = batch_of(10 * step + part, who)
                        parts.append(F.cross_entropy(model(x), y))
                    (sum(parts) / len(parts)).backward()
                with torch.no_grad():
                    for value in net.parameters():
                        value -= 0.5 * value.grad
        found.append([value.detach().clone() for value in net.parameters()])
        if mode != "alone":
            model.close()
    return found


def test_two_backwards_of_a_step_in_join_count_once() -> None:
    for alone, factors, sharded in run_ranks(_joined_in_two, 2):
        for one, *others in zip(alone, factors, sharded, strict=True):
            for other in others:
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def _second_derivatives(mode: str) -> None:
    net = small_net()
    optimizer: Any = torch.optim.SGD(net.parameters(), 0.1)
    model, optimizer = _distributed(net, optimizer, mode)
    for step in range(4):
        x, y = batch_of(step, dist.get_rank())
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward(create_graph=True)
        optimizer.step()
    model.verify_replicas()
    optimizer.zero_grad()
    model.close()


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("mode", ["wrapper", "distribute"])
def test_a_backward_that_makes_a_graph(mode: str) -> None:
    run_ranks(_second_derivatives, 2, mode)


def _evaluated_first(mode: str) -> None:
    """Evaluate in inference mode before the first step of a model with buffers."""
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    optimizer: Any = torch.optim.SGD(net.parameters(), 0.1)
    model, optimizer = _distributed(net, optimizer, mode)
    for step in range(4):
        x, y = batch_of(step, dist.get_rank())
        with torch.inference_mode():
            model(x)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.close()


@pytest.mark.parametrize("mode", ["wrapper", "worker", "server"])
def test_an_evaluation_in_inference_mode_may_come_first(mode: str) -> None:
    run_ranks(_evaluated_first, 2, mode)


class _Hidden:
    """Outputs in which nobody finds tensors."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class _TablesOnly(nn.Module):
    """A model of tables, whose gradient is the first that a backward brings."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.items = nn.Embedding(40, 4)
        self.users = nn.Embedding(30, 4)
        self.how = how

    def forward(self, numbers: Tensor) -> Any:
        users = self.users(numbers[:, 0])
        if self.how.startswith("beside"):
            return users
        if self.how == "hidden":
            return _Hidden(users * self.items(numbers[:, 1]))
        return torch.utils.checkpoint.checkpoint(
            lambda _: users.detach() * self.items(numbers[:, 1]), torch.zeros(1, requires_grad=True), use_reentrant=True
        )

    def loss(self, model: nn.Module, numbers: Tensor) -> Tensor:
        # What is looked up last comes first in backward.
        before = self.items(numbers[:, 1]) if self.how == "beside, first on one worker" and dist.get_rank() else None
        out = model(numbers)
        if self.how.startswith("beside"):
            out = out * (self.items(numbers[:, 1]) if before is None else before)
        total: Tensor = (out.value if self.how == "hidden" else out).square().sum()
        return total


def _first_comes_a_table(how: str, clears: bool) -> None:
    torch.manual_seed(0)
    net = _TablesOnly(how)
    if how == "checkpoint":
        net.users.requires_grad_(False)
    plain = copy.deepcopy(net)
    model = poseidon.DistributedDataParallel(net, routes={"*": "rows"}, cluster=slow_cluster())
    expected: dict[str, Tensor] = {}
    for step in range(4):
        for rank in range(dist.get_world_size()):
            chance = torch.Generator().manual_seed(10 * step + rank)
            numbers = torch.randint(0, 30, (6, 2), generator=chance)
            plain.zero_grad()
            plain.loss(plain, numbers).backward()
            for name, value in plain.named_parameters():
                if value.grad is not None:
                    expected[name] = expected.get(name, 0) + value.grad / dist.get_world_size()
            if rank == dist.get_rank():
                net.loss(model, numbers).backward()
        for name, value in net.named_parameters():
            if value.requires_grad:
                torch.testing.assert_close(value.grad, expected[name], msg=lambda text, name=name: f"{name}: {text}")
        if clears:
            net.zero_grad()
            expected.clear()
    model.close()


@pytest.mark.parametrize("clears", [True, False], ids=["cleared", "kept"])
@pytest.mark.parametrize("how", ["beside", "beside, first on one worker", "hidden", "checkpoint"])
def test_a_table_whose_rows_travel_may_bring_the_first_gradient_of_a_backward(how: str, clears: bool) -> None:
    run_ranks(_first_comes_a_table, 2, how, clears)


class _Looks(nn.Module):
    """Looks rows up, or does without."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, rows: Tensor, looks: bool) -> Tensor:
        return self.last(self.table(rows).mean(1) if looks else torch.ones(len(rows), 8))


def _penalized(mode: str, who: tuple[int, ...], clears: bool) -> float:
    """Return by how much a table's gradient differs from the mean, where a penalty comes before the model's outputs."""

    def loss_of(model: nn.Module, table: Tensor, rank: int, step: int) -> Tensor:
        rows = torch.arange(6).view(2, 3) + rank
        loss = model(rows, step != 1 or rank in who).square().mean()
        return loss + (rank + 1) * table.square().sum()

    torch.manual_seed(5)
    net = _Looks()
    plain = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    options = {"cluster": slow_cluster(), "routes": {"table": "rows", "last": "allreduce"}}
    if mode == "wrapper":
        model = poseidon.DistributedDataParallel(net, **options)
    else:
        model, optimizer = poseidon.distribute(net, optimizer, **options)
    worst = 0.0
    for step in range(3):
        if clears:
            optimizer.zero_grad()
            plain.zero_grad()
        loss_of(model, net.table.weight, dist.get_rank(), step).backward()
        for rank in range(2):
            (loss_of(plain, plain.table.weight, rank, step) / 2).backward()
        worst = max(worst, float((net.table.weight.grad - plain.table.weight.grad).abs().max()))
        optimizer.step()
    model.close()
    return worst


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("who", [(0,), (1,), ()])
@pytest.mark.parametrize("mode", ["wrapper", "distribute"])
def test_a_penalty_on_a_table_that_not_every_worker_looks_at_is_averaged(
    mode: str, who: tuple[int, ...], clears: bool
) -> None:
    assert max(run_ranks(_penalized, 2, mode, who, clears)) < 2e-6
