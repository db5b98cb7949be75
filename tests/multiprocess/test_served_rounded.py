"""``update="server"`` where the model only uses weights rounded, as under autocast: the bits of ``distribute``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import poseidon
import twins
from compact_twin import HostCompactor
from poseidon.planning.cluster import Cluster, Link
from poseidon.routes import served
from poseidon.sums import compact
from poseidon.sums.device import DeviceArithmetic
from poseidon.sums.fetching import FetchDesk
from ranks import run_ranks

Loop = Callable[[nn.Module, torch.optim.Optimizer, int], Any]


class _Mixed(nn.Module):
    """Uses some weights only under autocast, others exactly, and of an embedding with a tied head some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 48)
        self.norm = nn.LayerNorm(48)
        self.attention = nn.MultiheadAttention(48, 3, batch_first=True)
        self.up = nn.Linear(48, 190)
        self.down = nn.Linear(190, 48)
        self.scale = nn.Parameter(torch.ones(48))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(self.norm(x), x, x, need_weights=False)[0]
        x = x + self.down(nn.functional.gelu(self.up(x))) * self.scale
        return nn.functional.linear(x, self.embedding.weight)


ROUNDED = {
    *("attention.in_proj_weight", "attention.in_proj_bias", "attention.out_proj.weight", "attention.out_proj.bias"),
    *("up.weight", "up.bias", "down.weight", "down.bias", "embedding.weight"),
}


def _autocast_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    tokens = torch.randint(0, 50, (2, 9), generator=twins.seed_of_rank(number))
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _looking(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    _autocast_step(model, optimizer, number)
    inner = model.module
    if number == 1:
        model.eval()
        with torch.no_grad():
            model(torch.zeros(1, 3, dtype=torch.long))  # without autocast
        model.train()
    if number == 3 and dist.get_rank() == 0:
        assert inner.up.weight.abs().sum() > 0
    if number == 5:
        with torch.no_grad():
            inner.up.weight.mul_(1.001)
            inner.down.weight.data = inner.down.weight.data * 1.001
        inner.up.bias.data.clamp_(-0.01, 0.01)
    if number == 7:
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(torch.zeros(1, 3, dtype=torch.long))
        model.train()


def _holding(model: nn.Module) -> set[str]:
    """Return the names of the parameters whose memory holds rounded values."""
    with torch._C.DisableTorchFunctionSubclass():
        return {
            name
            for name, p in model.named_parameters()
            if not (p.detach().view(torch.int32) & 0xFFFF).any() and bool((p.detach() != 1).any())
        }


def _train_mixed(update: str, loop: Loop, steps: int = 9) -> list[Tensor]:
    torch.manual_seed(5)
    model = _Mixed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wrapped, optimizer = twins.distribute(model, optimizer, update)
    for number in range(steps):
        loop(wrapped, optimizer, number)
    wrapped.finish_step()
    if update == "server":
        assert _holding(model) == ROUNDED
    found = [value.clone() for value in model.state_dict().values()]
    wrapped.verify_replicas()
    assert not _holding(model) & ROUNDED
    for _, entry in sorted(optimizer.state_dict()["state"].items()):
        found += [value.clone() for value in entry.values()]
    wrapped.close()
    return found


def _rounded() -> None:
    twins.quiet()
    for loop in (_autocast_step, _looking):
        plain, ours = (_train_mixed(update, loop) for update in ("worker", "server"))
        assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_weights_used_under_autocast_only_are_rounded_and_exact_when_looked_at() -> None:
    run_ranks(_rounded, 2)


class _PartlyMapped(nn.Module):
    """Uses layers under autocast, some for each sample by itself: autocast leaves their biases as they are then."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mapped, self.plain = nn.Embedding(50, 48), nn.Linear(48, 64), nn.Linear(64, 48)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.func.vmap(self.mapped)(torch.func.vmap(self.table)(tokens))
        return nn.functional.linear(self.plain(torch.tanh(x)), self.table.weight)


def _partly_rounding() -> None:
    """Use weights where autocast does not round them: in a transform, and in functions that fill a tensor."""
    found = []
    for update in ("worker", "server"):
        torch.manual_seed(5)
        model = _PartlyMapped()
        wrapped, optimizer = twins.distribute(model, torch.optim.AdamW(model.parameters(), lr=1e-2), update)
        seen = []
        for number in range(6):
            tokens = torch.randint(0, 50, (8,), generator=twins.seed_of_rank(number))
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = wrapped(tokens).float().square().mean()
            loss.backward()
            optimizer.step()
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                seen += [loss.detach(), torch.mm(model.plain.weight, torch.eye(64), out=torch.empty(48, 64))]
        wrapped.close()
        found.append([*seen, *(value.detach().clone() for value in model.parameters())])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_weights_are_exact_where_autocast_does_not_round_them() -> None:
    run_ranks(_partly_rounding, 2)


def _often() -> None:
    """A weight that is looked at step after step is sent exactly after a while."""
    torch.manual_seed(5)
    model = _Mixed()
    wrapped, optimizer = twins.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "server")
    fetches = []
    fetch = FetchDesk.fetch

    def counting(self: Any, *what: Any) -> Any:
        fetches.append(what)
        return fetch(self, *what)

    FetchDesk.fetch = counting  # type: ignore[method-assign]
    for number in range(8):
        _autocast_step(wrapped, optimizer, number)
        before = len(fetches)
        assert model.up.weight.sum() != 0
        assert (len(fetches) > before) == (number < 2)
    FetchDesk.fetch = fetch  # type: ignore[method-assign]
    wrapped.close()


def test_a_weight_that_is_often_looked_at_is_sent_exactly() -> None:
    run_ranks(_often, 2)


def _count_bytes() -> None:
    sent = {}
    for update in ("worker", "server"):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(200, 300), nn.GELU(), nn.Linear(300, 200))
        wrapped, optimizer = twins.distribute(model, torch.optim.AdamW(model.parameters()), update)
        for number in range(6):
            if number == 3:
                wrapped.finish_step()
                (exchanger,) = wrapped._engine.planned.exchangers.values()
                before = exchanger._transport.stats.sent_bytes
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = wrapped(torch.randn(8, 200, generator=twins.seed_of_rank(number))).float().square().mean()
            loss.backward()
            optimizer.step()
        wrapped.finish_step()
        sent[update] = exchanger._transport.stats.sent_bytes - before
        dist.barrier()  # a worker that closes fetches all that is kept here
        wrapped.close()
    # Parts take half of 4 bytes a value in both; weights do too, and sums do not.
    assert sent["server"] < 0.7 * sent["worker"], sent


def test_rounded_weights_take_fewer_bytes_than_sums() -> None:
    run_ranks(_count_bytes, 2, env=[{"POSEIDON_MACHINE": str(rank)} for rank in range(2)])


# The same, where weights also travel as changes: as on a device, with a stand-in for it.


def _autocast_backward(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    tokens = torch.randint(0, 50, (2, 9), generator=twins.seed_of_rank(number))
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()


def _halve_and_step(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Let rank 0 be done before the others begin."""
    if dist.get_rank() > 0:
        dist.barrier()
    weight = model.module.up.weight
    with torch.no_grad():
        weight.mul_(0.5)
    found = [weight.detach().clone()]
    optimizer.step()
    if dist.get_rank() == 0:
        dist.barrier()
    return found


def _halving_between(model: Any, optimizer: torch.optim.Optimizer, number: int) -> list[Tensor]:
    _autocast_backward(model, optimizer, number)
    if number not in (5, 6, 7):  # earlier ones are measured, and workers wait for each other then
        optimizer.step()
        return []
    return _halve_and_step(model, optimizer)


def _halving_between_two_steps(model: Any, optimizer: torch.optim.Optimizer, number: int) -> list[Tensor]:
    _autocast_step(model, optimizer, number)
    return _halve_and_step(model, optimizer) if number in (5, 6) else []


def _adding_weights_to_gradients(model: Any, optimizer: torch.optim.Optimizer, number: int) -> list[Tensor]:
    _autocast_backward(model, optimizer, number)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad.add_(parameter, alpha=0.1)
    optimizer.step()
    return []


def _looking_alone_and_skipping(model: Any, optimizer: torch.optim.Optimizer, number: int) -> list[Tensor]:
    """One worker's looks end the rounding, just when no step() comes; and then it looks at what was not stepped."""
    _autocast_backward(model, optimizer, number)
    if number != 4:
        optimizer.step()
    if dist.get_rank() > 0 or number not in (2, 3, 4):
        return []
    found = [model.module.up.weight.detach().clone()]
    if number == 4:
        found += [entry["exp_avg"].clone() for entry in optimizer.state_dict()["state"].values()]
    return found


def _going_back(model: Any, optimizer: torch.optim.Optimizer, number: int) -> list[Tensor]:
    """Load a state that is several steps old."""
    _autocast_step(model, optimizer, number)
    if number == 2:
        model.kept = copy.deepcopy([model.module.state_dict(), optimizer.state_dict()])
    if number == 5:
        model.module.load_state_dict(model.kept[0])
        optimizer.load_state_dict(model.kept[1])
    return []


def _compare_odd_loops(is_on_device: bool) -> None:
    twins.quiet()
    if is_on_device:
        served.agree_on_device = lambda *_: DeviceArithmetic(HostCompactor())
        compact.SMALLEST_COMPACTED, compact.FEWEST_COMPACTED = 2000, 100
    for loop in (
        _halving_between,
        _halving_between_two_steps,
        _adding_weights_to_gradients,
        _looking_alone_and_skipping,
        _going_back,
    ):
        results = []
        for update in ("worker", "server"):
            torch.manual_seed(5)
            model = _Mixed()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            wrapped, optimizer = twins.distribute(model, optimizer, update)
            found = [one for number in range(8) for one in loop(wrapped, optimizer, number)]
            if update == "server":
                slots = wrapped._policy.exchanger._slots.values()
                assert any(wrapped._policy.exchanger._is_on_device(s, torch.float32) for s in slots) == is_on_device
            found += [value.clone() for value in model.state_dict().values()]
            for _, entry in sorted(optimizer.state_dict()["state"].items()):
                found += [value.clone() for value in entry.values()]
            wrapped.verify_replicas()
            wrapped.close()
            results.append(found)
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b), (loop.__name__, (a - b).abs().max())


@pytest.mark.parametrize("is_on_device", [False, True])
def test_same_bits_in_odd_loops(is_on_device: bool) -> None:
    run_ranks(_compare_odd_loops, 2, is_on_device)


# On a CUDA device, which sums and steps large buckets itself.


def _on_device(is_rounded: bool, max_grad_norm: float | None) -> None:
    device = torch.device("cuda", 0)
    cluster = Cluster(machines=3, between=Link(1e9, 1e-4), flops=1e12)
    # The norm is added up in another order: one last bit of a weight, and its rounded form may be another number, from
    # which a second step departs.
    steps = 1 if is_rounded and max_grad_norm is not None else 6
    results = []
    for update in ("worker", "server"):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(1500, 1800), nn.LayerNorm(1800), nn.GELU(), nn.Linear(1800, 1501)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=is_rounded)
        routes: Any = {} if update == "server" else {"routes": {"*": "sharded"}}
        wrapped, optimizer = poseidon.distribute(
            model, optimizer, cluster=cluster, update=update, max_grad_norm=max_grad_norm, **routes
        )
        for number in range(steps):
            x = torch.randn(8, 1500, generator=twins.seed_of_rank(number)).to(device)
            with torch.autocast("cuda", torch.bfloat16, enabled=is_rounded):
                loss = wrapped(x).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            if number == 3:
                assert model[0].bias.grad is not None
            optimizer.step()
            if number == 2:
                wrapped.verify_replicas()
        if update == "server":
            policy: Any = wrapped._policy
            assert policy.exchanger._device is not None
            assert bool(policy._rounding.candidates) == is_rounded
        found = [p.detach().clone() for p in model.parameters()]
        for _, entry in sorted(optimizer.state_dict()["state"].items()):
            found += [value.clone() for value in entry.values()]
        results.append(found)
        wrapped.close()
    for a, b in zip(*results, strict=True):
        if max_grad_norm is None:
            assert torch.equal(a, b), (a - b).abs().max()
        else:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
@pytest.mark.parametrize("is_rounded", [False, True])
def test_same_bits_on_a_device(is_rounded: bool, max_grad_norm: float | None) -> None:
    run_ranks(_on_device, 3, is_rounded, max_grad_norm)
