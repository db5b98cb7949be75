"""Lossy routes in training: what is sent and kept adds up, replicas agree, and a resumed job ends with the same bits.

One model has layers of all ways: a job with each would take four times as long to start.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import poseidon
from poseidon.planning.lossy import LOSSY
from ranks import run_ranks

WAYS = {
    "*.0": "bf16",
    "*.1": "int8",
    "*.2": "topk",
    "*.3": "lowrank",
    "table": "lowrank",
    "conv": "int8",
    "norm": "exact",
    "*": "topk",
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS: dict[str, Any] = {"lossy": WAYS, "block_size": 64, "density": 0.05, "rank": 2}


class Branching(nn.Module):
    """A table, a convolution in channels-last order, weights used twice, and layers that some steps leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 24)
        self.conv = nn.Conv2d(2, 12, 3).to(memory_format=torch.channels_last)
        self.square = nn.ModuleList(nn.Linear(48, 48) for _ in LOSSY)
        self.spare = nn.ModuleList(nn.Linear(48, 48) for _ in LOSSY)
        self.norm = nn.LayerNorm(48)
        self.head = nn.Linear(48, 5)

    def forward(self, words: Tensor, picture: Tensor, uses_spare: bool = True) -> Tensor:
        x = torch.cat([self.table(words).mean(1), self.conv(picture).flatten(2).mean(2), picture.flatten(1)[:, :12]], 1)
        for square, spare in zip(self.square, self.spare, strict=True):
            x = square(torch.tanh(square(x)))
            if uses_spare:
                x = x + torch.tanh(spare(x))
        scores: Tensor = self.head(self.norm(x))
        return scores


def batches(rank: int, steps: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        words = torch.randint(0, 50, (6, 4), generator=generator)
        picture = torch.randn(6, 2, 5, 5, generator=generator)
        target = torch.randint(0, 5, (6,), generator=generator)
        yield words.to(DEVICE), picture.to(DEVICE), target.to(DEVICE)


def make(mode: str, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Branching().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if mode == "distribute":
        wrapped, _ = poseidon.distribute(model, optimizer, **OPTIONS, **options)
        return wrapped, optimizer
    return poseidon.DistributedDataParallel(model, **OPTIONS, **options), optimizer


def _balance() -> tuple[list[Tensor], list[Tensor], dict[str, Tensor], int]:
    """Return the sums over all steps of this worker's gradients and of the means, what it kept, and skipped means."""
    wrapped, optimizer = make("wrapper", find_unused_parameters=True, trials=False)
    model, rank, size = wrapped.module, dist.get_rank(), dist.get_world_size()
    parameters = list(model.parameters())
    brought = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    received = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    skipped = 0
    for step, (words, picture, target) in enumerate(batches(rank, 13)):
        # In some steps nobody uses the spare layer, in some one worker does not.
        uses_spare = step % 3 != 1 and not (step % 3 == 2 and rank == 0)
        is_last = step % 4 != 3
        loss = nn.functional.cross_entropy(model(words, picture, uses_spare), target)
        for total, gradient in zip(brought, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
            if gradient is not None:
                total += gradient
        with contextlib.nullcontext() if is_last else wrapped.no_sync():
            nn.functional.cross_entropy(wrapped(words, picture, uses_spare), target).backward()
        if not is_last:
            continue
        for total, parameter in zip(received, parameters, strict=True):
            if parameter.grad is None:
                skipped += 1
            else:
                total += size * parameter.grad.double()
        optimizer.step()
        optimizer.zero_grad()
    wrapped.verify_replicas()
    assert wrapped.plan is not None
    assert [wrapped.plan.routes[f"spare.{number}"] for number in range(4)] == list(LOSSY)
    rests = {name: rest.cpu().clone() for name, rest in wrapped.lossy_state_dict()["rests"].items()}
    assert set(rests) == {name for name, _ in model.named_parameters() if not name.startswith("norm")}
    wrapped.close()
    return [one.cpu() for one in brought], [one.cpu() for one in received], rests, skipped


def test_all_that_was_sent_and_all_that_is_kept_is_the_sum_of_all_gradients() -> None:
    workers = run_ranks(_balance, 3)
    names = [name for name, _ in Branching().named_parameters()]
    assert workers[0][3] > 0, "no step left a parameter out"
    for number, name in enumerate(names):
        brought = sum(worker[0][number] for worker in workers)
        kept = sum(worker[2][name].double() if name in worker[2] else 0 * brought for worker in workers)
        # Sums of 13 steps on three workers, each rounded in float32 a few times.
        assert torch.allclose(workers[0][1][number] + kept, brought, rtol=0, atol=2e-5), name
        assert torch.equal(workers[0][1][number], workers[2][1][number])
        assert not name.endswith("weight") or name.startswith(("norm", "head")) or float(kept.abs().max()) > 1e-5, name


def _balance_of_a_table() -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of a large table's gradients and means, and what was kept: several workers own its factors."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(20000, 8), nn.Linear(8, 3)).to(DEVICE)
    table = net[0].weight
    wrapped = poseidon.DistributedDataParallel(net, lossy={"0": "lowrank", "*": "exact"}, rank=2, trials=False)
    brought, received = (torch.zeros_like(table, dtype=torch.float64) for _ in range(2))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        words = torch.randint(0, 20000, (300,), generator=generator).to(DEVICE)
        (alone,) = torch.autograd.grad(net(words).square().sum(), [table])
        brought += alone
        net.zero_grad()
        wrapped(words).square().sum().backward()
        received += dist.get_world_size() * table.grad.double()
    wrapped.verify_replicas()
    kept = wrapped.lossy_state_dict()["rests"]["0.weight"].double().cpu()
    wrapped.close()
    return brought.cpu(), received.cpu(), kept


def test_nothing_is_lost_where_several_workers_own_the_factors_of_a_matrix() -> None:
    workers = run_ranks(_balance_of_a_table, 3)
    brought, kept = (sum(worker[place] for worker in workers) for place in (0, 2))
    torch.testing.assert_close(workers[0][1] + kept, brought, rtol=0, atol=1e-5)
    # What is rounded off is far more than that.
    assert float(brought.abs().max()) > 1.0


def _train(
    mode: str, steps: int, folder: str = "", forgets: bool = False, warmup_steps: int = 0
) -> tuple[int, dict[str, Tensor]]:
    options: dict[str, Any] = {"max_grad_norm": 0.5} if mode == "distribute" else {}
    wrapped, optimizer = make(mode, warmup_steps=warmup_steps, **options)
    begun = 0
    saver: Any = contextlib.nullcontext()
    if folder:
        saver = poseidon.Checkpoint(folder, every=6, model=wrapped, optimizer=optimizer)
    with saver:
        begun = saver.resume() if folder else 0
        if forgets:
            wrapped.load_lossy_shares([])
        for step, (words, picture, target) in enumerate(batches(dist.get_rank(), steps)):
            if step < begun:
                continue
            optimizer.zero_grad()
            with torch.autocast(DEVICE, torch.bfloat16, enabled=step % 2 == 0):
                loss = nn.functional.cross_entropy(wrapped(words, picture), target)
            loss.backward()
            optimizer.step()
            if folder:
                saver.step(step + 1)
    wrapped.verify_replicas()
    state = {name: value.cpu().clone() for name, value in wrapped.module.state_dict().items()}
    wrapped.close()
    return begun, state


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("mode", ["wrapper", "distribute"])
def test_a_job_that_is_resumed_ends_with_the_same_bits(mode: str, tmp_path: Path) -> None:
    whole = run_ranks(_train, 2, mode, 10)
    run_ranks(_train, 2, mode, 7, str(tmp_path))
    again = run_ranks(_train, 2, mode, 10, str(tmp_path))
    assert [begun for begun, _ in again] == [6, 6]
    assert same(again[1][1], whole[0][1])
    if mode == "wrapper":
        without = run_ranks(_train, 2, mode, 10, str(tmp_path), True)
        assert not same(without[0][1], whole[0][1]), "what was kept makes no difference"


def _count_exact(mode: str, folder: str, steps: int) -> list[bool]:
    """Return of each step, after five exact ones in all, whether anything was lost in it."""
    wrapped, optimizer = make(mode, warmup_steps=5)
    parameters, size = list(wrapped.module.parameters()), dist.get_world_size()
    lost: list[bool] = []
    with poseidon.Checkpoint(folder, every=3, model=wrapped, optimizer=optimizer) as saver:
        begun = saver.resume()
        for step, (words, picture, target) in enumerate(batches(dist.get_rank(), steps)):
            if step < begun:
                continue
            loss = nn.functional.cross_entropy(wrapped.module(words, picture), target)
            means = torch.autograd.grad(loss, parameters)
            for mean in means:
                dist.all_reduce(mean.div_(size))
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(words, picture), target).backward()
            pairs = zip(parameters, means, strict=True)
            lost.append(not all(torch.allclose(p.grad, mean, atol=1e-6) for p, mean in pairs if p.grad is not None))
            optimizer.step()
            saver.step(step + 1)
    wrapped.verify_replicas()
    assert wrapped.plan is not None
    assert set(LOSSY) <= set(wrapped.plan.routes.values()) or steps < 5
    wrapped.close()
    return lost


@pytest.mark.parametrize("mode", ["wrapper", "distribute"])
def test_the_first_steps_lose_nothing_if_asked_also_in_a_job_that_is_resumed(mode: str, tmp_path: Path) -> None:
    quiet_env = {"PYTHONWARNINGS": "ignore"}
    assert run_ranks(_count_exact, 2, mode, str(tmp_path), 4) == [[False] * 4] * 2
    # It was saved after three steps. Of three workers, one finds no state of its own.
    assert run_ranks(_count_exact, 3, mode, str(tmp_path), 8, env=quiet_env) == [[False] * 2 + [True] * 3] * 3
    # Saved after six: nothing is exact any more, from the first step on.
    assert run_ranks(_count_exact, 4, mode, str(tmp_path), 8, env=quiet_env) == [[True] * 2] * 4


def test_what_was_kept_after_exact_steps_is_found_again(tmp_path: Path) -> None:
    arguments = (False, 4)
    whole = run_ranks(_train, 2, "wrapper", 10, "", *arguments)
    run_ranks(_train, 2, "wrapper", 7, str(tmp_path), *arguments)
    again = run_ranks(_train, 2, "wrapper", 10, str(tmp_path), *arguments)
    assert [begun for begun, _ in again] == [6, 6]
    assert same(again[1][1], whole[0][1])


def _kept(folder: str) -> tuple[Tensor, list[str]]:
    wrapped, optimizer = make("wrapper")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with poseidon.Checkpoint(folder, model=wrapped, optimizer=optimizer) as saver:
            assert saver.resume() == 6
    kept = wrapped.lossy_state_dict()["rests"]["square.1.weight"].cpu().double().clone()
    wrapped.close()
    return kept, [str(one.message) for one in told]


def test_on_another_number_of_workers_the_sum_of_what_was_kept_stays(tmp_path: Path) -> None:
    run_ranks(_train, 3, "wrapper", 6, str(tmp_path))
    stored = torch.load(tmp_path / "step-000000006.pt", weights_only=True)
    assert list(stored["parts"]["model"]) == list(Branching().state_dict())
    before = sum(one["model, lossy"]["rests"]["square.1.weight"].double() for one in stored["workers"])
    for size in (2, 4):
        found = run_ranks(_kept, size, str(tmp_path))
        assert torch.allclose(sum(kept for kept, _ in found), before, rtol=0, atol=1e-7)
        assert any(f"what 3 workers kept is dealt to {size}; its sum stays" in text for text in found[0][1])


def _overflow(mode: str) -> tuple[list[bool], bool, bool]:
    wrapped, optimizer = make(mode)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    rank, changed = dist.get_rank(), []
    for step, (words, picture, target) in enumerate(batches(rank, 6)):
        before = [p.detach().clone() for p in wrapped.module.parameters()]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(wrapped(words, picture), target)
        if step == 3 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        after = [p.detach().clone() for p in wrapped.module.parameters()]
        changed.append(not all(map(torch.equal, before, after)))
    wrapped.verify_replicas()
    state = wrapped.lossy_state_dict()
    is_finite = all(bool(value.isfinite().all()) for part in ("rests", "bases") for value in state[part].values())
    is_sound = all(bool(p.isfinite().all()) for p in wrapped.module.parameters())
    wrapped.close()
    return changed, is_finite, is_sound


@pytest.mark.parametrize("mode", ["wrapper", "distribute"])
def test_a_step_that_overflows_on_one_worker_is_skipped_on_all_and_nothing_of_it_is_kept(mode: str) -> None:
    for changed, is_finite, is_sound in run_ranks(_overflow, 2, mode):
        assert changed == [True, True, True, False, True, True]
        assert is_finite
        assert is_sound


def test_distribute_and_wrapper_give_the_same_bits_and_everything_can_be_encrypted() -> None:
    both = [run_ranks(_plain, 2, mode) for mode in ("wrapper", "distribute")]
    assert same(both[0][0], both[1][0])
    assert same(both[0][0], both[1][1])
    encrypted = run_ranks(_plain, 2, "distribute", env={"POSEIDON_WIRE_ENCRYPT": "1"})
    for name, value in both[0][0].items():
        torch.testing.assert_close(encrypted[0][name], value)


def _plain(mode: str) -> dict[str, Tensor]:
    wrapped, optimizer = make(mode, trials=False)
    for words, picture, target in batches(dist.get_rank(), 8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(words, picture), target).backward()
        optimizer.step()
    wrapped.verify_replicas()
    state = {name: value.cpu().clone() for name, value in wrapped.module.state_dict().items()}
    wrapped.close()
    return state


def _count(routes: Any, options: dict[str, Any]) -> tuple[int, int, int]:
    """Return the bytes of payload and the messages that this worker sends in three steps, and the values exchanged."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 700), nn.ReLU(), nn.Linear(700, 512))
    wrapped = poseidon.DistributedDataParallel(model, routes=routes, trials=False, **options)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def train(steps: int) -> None:
        for _ in range(steps):
            model.zero_grad()
            wrapped(torch.randn(4, 512, generator=generator)).square().mean().backward()

    train(2)
    (name,) = set(wrapped.plan.routes.values())  # type: ignore[union-attr]
    assert wrapped._engine is not None
    stats = wrapped._engine._schedules._exchangers[name]._transport.stats  # type: ignore[attr-defined]
    before = stats.sent_bytes, stats.sent_messages
    train(3)
    wrapped.verify_replicas()
    counted = stats.sent_bytes - before[0], stats.sent_messages - before[1]
    wrapped.close()
    return *counted, sum(p.numel() for p in model.parameters())


def test_bytes_on_the_wire() -> None:
    header = 64  # more than a message's header has
    exact = run_ranks(_count, 2, {"*": "sharded"}, {})
    exact_bytes = sum(sent for sent, _, _ in exact)
    values = exact[0][2] * 3
    assert exact_bytes == 2 * 4 * values
    shares = {}
    for way in LOSSY:
        counted = run_ranks(_count, 2, None, {"lossy": way})
        shares[way] = sum(sent + header * messages for sent, messages, _ in counted) / exact_bytes
    assert shares["bf16"] < 0.501
    assert shares["int8"] <= 0.25
    assert shares["topk"] < 0.016
    assert shares["lowrank"] < 0.016


class TwoHeads(nn.Module):
    """Every step uses one of two heads, whose gradients travel in one bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 10)
        self.heads = nn.ModuleList(nn.Linear(10, 3) for _ in range(2))

    def forward(self, x: Tensor, which: int) -> Tensor:
        scores: Tensor = self.heads[which](torch.tanh(self.trunk(x)))
        return scores


def _overflow_beside_unused(lossy: str) -> bool:
    """Overflow while one head is unused: nothing that is not finite may be kept for it."""
    torch.manual_seed(0)
    net = TwoHeads().to(DEVICE)
    options: dict[str, Any] = {"density": 0.4} if lossy == "topk" else {}
    model, optimizer = poseidon.distribute(
        net, torch.optim.SGD(net.parameters(), 0.1), lossy=lossy, find_unused_parameters=True, trials=False, **options
    )
    moved = False
    for step in range(9):
        optimizer.zero_grad()
        scale = float("inf") if step == 4 else 1.0
        before = net.trunk.weight.detach().clone()
        (scale * model(torch.ones(4, 6, device=DEVICE), step % 2).square().mean()).backward()
        if all(p.grad is None or p.grad.isfinite().all() for p in net.parameters()):
            optimizer.step()
            moved |= step > 4 and not torch.equal(before, net.trunk.weight)
    assert all(rest.isfinite().all() for rest in model.lossy_state_dict()["rests"].values())
    model.close()
    return moved


@pytest.mark.parametrize("lossy", LOSSY)
def test_an_overflow_leaves_nothing_behind_for_what_nobody_used(lossy: str) -> None:
    assert run_ranks(_overflow_beside_unused, 2, lossy) == [True, True]


def _begin_with_zeros() -> float:
    """Train a layer whose first gradient is zero, since the head begins with zeros, and some of its inputs always."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 48), nn.Tanh(), nn.Linear(48, 3)).to(DEVICE)
    nn.init.zeros_(net[2].weight)
    before = net[0].weight.detach().clone()
    model, optimizer = poseidon.distribute(
        net, torch.optim.SGD(net.parameters(), 0.5), lossy={"0": "lowrank", "*": "exact"}, rank=2, trials=False
    )
    inputs = torch.randn(16, 40, generator=torch.Generator().manual_seed(dist.get_rank())).to(DEVICE)
    inputs[:, :8] = 0.0
    for _ in range(6):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), (inputs[:, 9] > 0).long()).backward()
        optimizer.step()
    moved = float((net[0].weight.detach() - before).abs().max())
    model.close()
    return moved


def test_lowrank_goes_on_after_a_gradient_of_zeros() -> None:
    assert min(run_ranks(_begin_with_zeros, 2)) > 1e-3
