"""A table that is a linear layer's weight too: its gradient travels as touched rows, and factors or a full gradient."""

from __future__ import annotations

import contextlib
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nightly
import poseidon
from poseidon.engine.backward import Backward
from poseidon.sums.fetching import Ask, FetchDesk
from ranks import run_ranks
from twins import slow_cluster

WORDS, WIDTH = 300, 12


class Speaker(nn.Module):
    """Predicts words with the table that it reads them from."""

    def __init__(self, head_first: bool = False, use: str = "") -> None:
        super().__init__()
        self.use = use
        if head_first:
            self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        if not head_first:
            self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.mix(self.words(tokens)))
        if self.use == "in parts":
            return torch.cat([self.head(part) for part in x.split(2)])
        if self.use == "in parts, only one differentiated":
            first, second = x.split((3, len(x) - 3))
            return torch.cat([self.head(first), self.head(second).detach()])
        if self.use == "checkpointed":
            return checkpoint(self.head, x, use_reentrant=False)
        if self.use == "re-entrant checkpoints":
            return torch.cat([checkpoint(self.head, part, use_reentrant=True) for part in x.split(3)])
        if self.use == "functional":
            return F.linear(x, self.head.weight)
        return self.head(x)


def _loss(model: nn.Module, number: int, way: str) -> Tensor:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(10 * number + rank)
    size = 0 if way == "uneven" and number == 3 and rank == 1 else 5
    tokens = torch.randint(0, WORDS, (size,), generator=generator)
    # What is looked up last comes first in backward: before the exchange begins.
    before = model.module.words(tokens) if way == "kept, early on one" and rank else None
    loss = F.cross_entropy(model(tokens).float(), tokens, reduction="sum") / 5
    if way == "penalty" and number % 2:
        loss = loss + 0.01 * model.module.words.weight.square().sum()
    if way == "kept, early on one":
        loss = loss + 0.01 * (model.module.words(tokens) if before is None else before).square().sum()
    return loss


def _train(kind: str, way: str, amp: torch.dtype | None, route: str = "tied") -> tuple[dict[str, Tensor], Any]:
    torch.manual_seed(0)
    inner = Speaker(head_first=way == "head first")
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9)
    model: Any
    routes = {_name(way): route, "*": "factors" if route == "tied" else "sharded"}
    if kind == "torch":
        model = nn.parallel.DistributedDataParallel(inner)
    elif kind == "wrapper":
        model = poseidon.DistributedDataParallel(inner, cluster=slow_cluster(), routes=routes)
    elif kind == "server":
        model, _ = poseidon.distribute(inner, optimizer, cluster=slow_cluster(), update="server")
    else:
        model, _ = poseidon.distribute(inner, optimizer, cluster=slow_cluster(), routes=routes)
    context = contextlib.nullcontext() if amp is None else torch.autocast("cpu", amp)
    for number in range(4):
        if way != "kept, early on one":
            optimizer.zero_grad(set_to_none=way != "zeros")
        if way == "accumulating":
            with model.no_sync(), context:
                _loss(model, 50 + number, way).backward()
        if way == "backward twice":
            with context:
                _loss(model, 50 + number, way).backward()
        with context:
            loss = _loss(model, number, way)
        loss.backward()
        optimizer.step()
    if kind != "torch":
        model.verify_replicas()
    return {name: parameter.detach().clone() for name, parameter in inner.named_parameters()}, model


def _name(way: str) -> str:
    return "head" if way == "head first" else "words"


WAYS = ["plain", "head first", "penalty", "accumulating", "backward twice", "zeros", "uneven", "kept, early on one"]


def _compare(route: str, ways: list[str]) -> None:
    for way in ways:
        for amp in (None, torch.bfloat16):
            theirs, _ = _train("torch", way, amp)
            ours, wrapped = _train("wrapper", way, amp, route)
            deferred, distributed = _train("distribute", way, amp, route)
            assert wrapped.plan.routes[_name(way)] == route
            if route == "split":
                _compare_server(ours, way, amp)
            for each, value in theirs.items():
                tolerance = 1e-6 if amp is None else 5e-3
                torch.testing.assert_close(ours[each], value, rtol=tolerance, atol=tolerance, msg=f"{each}, {way}")
                assert torch.equal(ours[each], deferred[each]), (each, way)
            wrapped.close()
            distributed.close()
            assert type(wrapped.module.head) is nn.Linear
            assert type(wrapped.module.words) is nn.Embedding


def _compare_server(ours: dict[str, Tensor], way: str, amp: torch.dtype | None) -> None:
    served, model = _train("server", way, amp)
    assert model.plan.routes == {**dict.fromkeys(model.plan.routes, "served"), _name(way): "split"}
    for each, value in ours.items():
        # What was accumulated before an exchange is averaged by another route in the wrapper.
        if way == "accumulating":
            torch.testing.assert_close(served[each], value, rtol=1e-6, atol=1e-6, msg=f"{each}, {way}")
        else:
            assert torch.equal(served[each], value), (each, way, amp)
    model.close()


@pytest.mark.parametrize(("workers", "route"), [(2, "tied"), (3, "tied"), (2, "split"), (3, "split")])
def test_both_parts_of_a_tied_tables_gradient_add_up(workers: int, route: str) -> None:
    # To save time, three workers try only what differs with their number: additions, and a worker without input.
    run_ranks(_compare, workers, route, WAYS if workers == 2 else nightly.amount(["plain", "penalty", "uneven"], WAYS))


def _gradient_by_hand(model: Speaker, tokens: Tensor, amp: torch.dtype | None) -> Tensor:
    """Return the mean gradient of the tied weight, from all workers' parts, added in the documented order."""
    alone = Speaker()
    alone.load_state_dict(model.state_dict())
    alone.head.weight = nn.Parameter(alone.head.weight.detach().clone())
    alone.words.sparse = True
    seen: dict[str, Tensor] = {}
    alone.head.register_forward_pre_hook(lambda _, inputs: seen.update(x=inputs[0].detach()))
    with contextlib.nullcontext() if amp is None else torch.autocast("cpu", amp):
        out = alone(tokens)
    out.register_hook(lambda g: seen.update(g=g))
    F.cross_entropy(out.float(), tokens, reduction="sum").backward()
    head = (seen["g"].t() @ seen["x"].to(seen["g"].dtype)).float()
    rows = alone.words.weight.grad
    assert rows is not None
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (head, rows.to_dense()))
    heads, touched = zip(*parts, strict=True)
    return (reduce(torch.add, heads) + reduce(torch.add, touched, torch.zeros(WORDS, WIDTH))) / len(parts)


def _check_by_hand(mode: str, amp: torch.dtype | None) -> None:
    torch.manual_seed(0)
    inner = Speaker()
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    routes, cluster = {"words": "split", "*": "sharded"}, slow_cluster()
    model: Any
    if mode == "wrapper":
        model = poseidon.DistributedDataParallel(inner, cluster=cluster, routes=routes)
    elif mode == "distribute":
        model, _ = poseidon.distribute(inner, optimizer, cluster=cluster, routes=routes)
    else:
        model, _ = poseidon.distribute(inner, optimizer, cluster=cluster, update="server")
    for number in range(5):
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        tokens = torch.randint(0, WORDS, (5 + dist.get_rank(),), generator=generator)
        expected = _gradient_by_hand(inner, tokens, amp)
        optimizer.zero_grad()
        with contextlib.nullcontext() if amp is None else torch.autocast("cpu", amp):
            out = model(tokens)
        F.cross_entropy(out.float(), tokens, reduction="sum").backward()
        found = inner.words.weight.grad
        assert found is not None
        assert found.dtype is torch.float32
        if number:  # the first backward averages everything in full
            assert torch.equal(found, expected), (mode, amp, number)
        optimizer.step()
    assert model.plan.routes["words"] == "split"
    model.close()


def _check_all_by_hand() -> None:
    for mode in ("wrapper", "distribute", "server"):
        for amp in (None, torch.bfloat16):
            _check_by_hand(mode, amp)


def test_the_gradient_of_a_split_table_is_added_in_the_documented_order_in_all_modes() -> None:
    run_ranks(_check_all_by_hand, 3)


USES = {
    "": 1,
    "in parts": 1,
    "in parts, only one differentiated": 1,  # the other's graph is gone
    "checkpointed": 1,
    "re-entrant checkpoints": 1,  # the second one's gradient travels as rows
    "functional": 0,
}
"""How often the head's gradient leaves before the gradient of any other layer is known."""


def _watch_leaving(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    gradient, head = Backward.gradient, Backward.head

    def note_gradient(self: Backward, parameter: int, is_dense: bool) -> None:
        seen.append("gradient")
        gradient(self, parameter, is_dense)

    def note_head(self: Backward, unit: int, part: Tensor, is_last: bool) -> None:
        seen.extend(["head"] * is_last)
        head(self, unit, part, is_last)

    monkeypatch.setattr(Backward, "gradient", note_gradient)
    monkeypatch.setattr(Backward, "head", note_head)
    return seen


def _leave_early(kind: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        seen = _watch_leaving(monkeypatch)
        for use, times in USES.items():
            results = []
            for each in ("torch", kind):
                torch.manual_seed(0)
                inner = Speaker(use=use)
                optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
                options: Any = {"static_graph": True} if "re-entrant" in use else {}
                model: Any
                if each == "torch":
                    model = nn.parallel.DistributedDataParallel(inner, **options)
                elif each == "server":
                    options.update(cluster=slow_cluster(), update="server")
                    model, _ = poseidon.distribute(inner, optimizer, **options)
                else:
                    options.update(cluster=slow_cluster(), routes={"words": "split", "*": "sharded"})
                    model, _ = poseidon.distribute(inner, optimizer, **options)
                for number in range(4):
                    del seen[:]
                    optimizer.zero_grad()
                    _loss(model, number, use).backward()
                    if number and each != "torch":
                        assert seen[: seen.index("gradient")] == ["head"] * times, (use, seen)
                    optimizer.step()
                results.append([p.detach().clone() for p in inner.parameters()])
                if each != "torch":
                    model.close()
            for mine, theirs in zip(*results, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6, msg=use)


@pytest.mark.parametrize("update", ["worker", "server"])
def test_the_gradient_of_the_head_leaves_first_however_it_is_used(update: str) -> None:
    run_ranks(_leave_early, 2, update)


def _look_up_rows() -> None:
    """Trains under autocast, where the head uses its weight rounded and look-ups use some rows of it exactly."""
    torch.manual_seed(0)
    inner = Speaker()
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-2)
    model, _ = poseidon.distribute(inner, optimizer, cluster=slow_cluster(), update="server")
    asked: list[Ask] = []
    fetch = FetchDesk.fetch

    def counting(self: FetchDesk, chunk: Any, what: Ask, *others: Any) -> Any:
        asked.append(what)
        return fetch(self, chunk, what, *others)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(FetchDesk, "fetch", counting)
        for number in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = _loss(model, number, "")
            loss.backward()
            optimizer.step()
            assert set(asked) == ({Ask.ROWS} if number else set())
    model.finish_step()
    with torch._C.DisableTorchFunctionSubclass():
        held = inner.words.weight.detach().clone()
    tokens = torch.arange(dist.get_rank(), WORDS, 7).view(-1, 1)
    looked_up = inner.words(tokens).detach()
    exact = model.state_dict()["module.words.weight"].clone()
    assert torch.equal(held, exact.bfloat16().float())
    assert not torch.equal(held, exact)
    assert torch.equal(looked_up, exact[tokens])
    model.verify_replicas()
    model.close()


def test_a_tables_weights_come_rounded_and_the_rows_that_are_looked_up_exactly() -> None:
    run_ranks(_look_up_rows, 3)


class _Wide(Speaker):
    """Large enough for a device to sum and compact it."""

    def __init__(self, words: int = 3000, width: int = 800) -> None:
        nn.Module.__init__(self)
        self.use = ""
        self.words = nn.Embedding(words, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight


def _train_on_device(mode: str, amp: bool) -> dict[str, Tensor]:
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    inner = _Wide().to(device)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-3)
    routes: Any = {"routes": {"words": "split", "*": "sharded"}} if mode != "server" else {}
    model: Any
    if mode == "wrapper":
        model = poseidon.DistributedDataParallel(inner, cluster=slow_cluster(), **routes)
    else:
        update = "server" if mode == "server" else "worker"
        model, _ = poseidon.distribute(inner, optimizer, cluster=slow_cluster(), update=update, **routes)
    for number in range(6):
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        tokens = torch.randint(0, 3000, (40,), generator=generator).to(device)
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=amp):
            loss = F.cross_entropy(model(tokens).float(), tokens)
        loss.backward()
        optimizer.step()
    assert model.plan.routes["words"] == "split"
    model.verify_replicas()
    found = {name: parameter.detach().clone() for name, parameter in inner.named_parameters()}
    model.close()
    return found


def _compare_on_device(amp: bool) -> None:
    wrapper, distribute, server = (_train_on_device(mode, amp) for mode in ("wrapper", "distribute", "server"))
    for name, value in wrapper.items():
        assert torch.equal(distribute[name], value), name
        assert torch.equal(server[name], value), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("amp", [False, True])
def test_same_bits_of_a_split_table_in_all_modes_on_a_device(amp: bool) -> None:
    run_ranks(_compare_on_device, 3, amp)
