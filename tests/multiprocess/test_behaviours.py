"""What people do with DistributedDataParallel, done with torch's class and with Poseidon's, side by side."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

import poseidon
from nightly import amount
from ranks import run_ranks
from twins import compare_twins, quiet, seed_of_rank, wrap, wrap_torch


class Mlp(nn.Module):
    """Wide enough that every linear layer but the last pays as factors."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.first = nn.Linear(20, width)
        self.second = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(F.relu(self.second(F.relu(self.first(x))))))


def batch(number: int, size: int = 6) -> tuple[Tensor, Tensor]:
    generator = seed_of_rank(number)
    return torch.randn(size, 20, generator=generator), torch.randint(0, 5, (size,), generator=generator)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    x, y = batch(number)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


# Each function below runs on every rank. It returns the routes that were used, for the test to look at.


def plain() -> dict[str, str]:
    return compare_twins(Mlp, plain_step)


def gathered_factors() -> dict[str, str]:
    return compare_twins(Mlp, plain_step, torch_options={}, gather_factors=True)


def gathered_factors_with_growing_batches() -> dict[str, str]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x, y = batch(number, size=3 + 2 * (number % 3) + dist.get_rank())
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return compare_twins(Mlp, step, torch_options={}, gather_factors=True)


def sparse_inputs() -> dict[str, str]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x, y = batch(number)
        optimizer.zero_grad()
        F.cross_entropy(model(x.relu().to_sparse()), y).backward()
        optimizer.step()

    return compare_twins(Mlp, step)


class Ragged(nn.Module):
    """Layers on sequences of different lengths, without padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 12)
        self.first, self.second = nn.Linear(12, 16), nn.Linear(16, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.relu(self.first(self.embedding(tokens)))
        return self.second(torch.stack([part.mean(0) for part in hidden.unbind()]))


def nested_inputs() -> dict[str, str]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        generator = seed_of_rank(number)
        rows = [torch.randint(0, 30, (1 + length,), generator=generator) for length in range(4)]
        optimizer.zero_grad()
        tokens = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        F.cross_entropy(model(tokens), torch.arange(4)).backward()
        optimizer.step()

    return compare_twins(Ragged, step)


def uneven_batches() -> dict[str, str]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x, y = batch(number, size=2 + (number + dist.get_rank()) % 4)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return compare_twins(Mlp, step)


def empty_batch_on_one_rank() -> dict[str, str]:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 40))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x, _ = batch(number, size=0 if number % 3 == 2 and dist.get_rank() == 1 else 4)
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    return compare_twins(make, step, lr=1e-3)


def accumulation_with_no_sync() -> dict[str, str]:
    def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        with model.no_sync():
            for micro in range(2):
                x, y = batch(10 * number + micro)
                F.cross_entropy(model(x), y).backward()
        x, y = batch(10 * number + 9)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return compare_twins(Mlp, step)


def gradients_inside_no_sync_are_local() -> None:
    model = wrap(Mlp())
    plain_step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    plain_model = copy.deepcopy(model.module)
    for one in (model, plain_model):
        one.zero_grad()
    x, y = batch(1)
    with model.no_sync():
        F.cross_entropy(model(x), y).backward()
    F.cross_entropy(plain_model(x), y).backward()
    for ours, theirs in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def several_backwards_without_zero_grad() -> dict[str, str]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad(set_to_none=bool(number % 2))
        for micro in range(2):
            x, y = batch(10 * number + micro)
            F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return compare_twins(Mlp, step)


def two_forwards_one_backward() -> dict[str, str]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        (x, y), (z, _) = batch(number), batch(number + 500)
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) + model(z).square().mean()).backward()
        optimizer.step()

    # torch refuses in-place buffer updates between the two forwards, so buffers are left alone.
    return compare_twins(Mlp, step, broadcast_buffers=False)


def layer_called_several_times() -> dict[str, str]:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(20, 20)
            self.head = nn.Linear(20, 5)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = torch.tanh(self.cell(x))
            return self.head(x)

    return compare_twins(Recurrent, plain_step)


def tied_weights() -> dict[str, str]:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 16)
            self.mix = nn.Linear(16, 16)
            self.out = nn.Linear(16, 50, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.tanh(self.mix(self.embed(x))))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        tokens = torch.randint(0, 50, (3, 4), generator=seed_of_rank(number))
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    return compare_twins(Tied, step)


def frozen_parameters() -> dict[str, str]:
    def make() -> nn.Module:
        model = Mlp()
        model.first.requires_grad_(False)
        model.second.bias.requires_grad_(False)
        model.last.weight.requires_grad_(False)
        return model

    return compare_twins(make, plain_step)


def unused_parameters() -> dict[str, str]:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(20, 40)
            self.heads = nn.ModuleList(nn.Linear(40, 5) for _ in range(3))
            self.scale = nn.Parameter(torch.ones(5))
            self.never = nn.Linear(40, 40)

        def forward(self, x: Tensor, which: int) -> Tensor:
            return self.heads[which](F.relu(self.stem(x))) * self.scale

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x, y = batch(number)
        optimizer.zero_grad()
        # Head 2 is unused in some steps by everybody, head 0 and 1 by some ranks only.
        which = (number + dist.get_rank()) % 2 if number % 3 else 2
        F.cross_entropy(model(x, which), y).backward()
        assert model.module.never.weight.grad is None
        optimizer.step()

    return compare_twins(Branches, step, find_unused_parameters=True)


def static_graph_with_unused_and_reentrant_checkpoint() -> dict[str, str]:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(20, 40)
            self.shared = nn.Linear(40, 40)
            self.last = nn.Linear(40, 5)
            self.unused = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            for _ in range(2):
                x = checkpoint(lambda v: torch.tanh(self.shared(v)), x, use_reentrant=True)
            return self.last(x)

    return compare_twins(Twice, plain_step, static_graph=True)


def checkpointing_without_reentry() -> dict[str, str]:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(20, 40)
            self.blocks = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))
            self.last = nn.Linear(40, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(lambda v, block=block: torch.tanh(block(v)), x, use_reentrant=False)
            return self.last(x)

    return compare_twins(Deep, plain_step)


def checkpointing_with_reentry() -> dict[str, str]:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(20, 40)
            self.block = nn.Linear(40, 40)
            self.last = nn.Linear(40, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(lambda v: torch.tanh(self.block(v)), self.first(x), use_reentrant=True))

    return compare_twins(Deep, plain_step)


def bucket_views() -> dict[str, str]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x, y = batch(number)
        optimizer.zero_grad(set_to_none=bool(number % 2))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return compare_twins(Mlp, step, gradient_as_bucket_view=True)


@dataclasses.dataclass
class Output:
    logits: Tensor
    extra: dict[str, list[Tensor]]
    name: str = "output"


def structured_outputs() -> dict[str, str]:
    class Structured(Mlp):
        def forward(self, x: Tensor) -> Any:
            hidden = F.relu(self.first(x))
            return Output(self.last(self.norm(self.second(hidden))), {"hidden": [hidden]})

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x, y = batch(number)
        optimizer.zero_grad()
        out = model(x)
        assert isinstance(out, Output)
        (F.cross_entropy(out.logits, y) + out.extra["hidden"][0].square().mean()).backward()
        optimizer.step()

    return compare_twins(Structured, step)


def autocast_bf16() -> dict[str, str]:
    torch.set_default_dtype(torch.float32)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(20, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 5))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x, y = batch(number)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    # bf16 keeps 8 bits: torch rounds each worker's gradient to them, the factors route only the factors.
    return compare_twins(make, step, rtol=2e-2, atol=2e-3)


def gradient_scaler() -> dict[str, str]:
    torch.set_default_dtype(torch.float32)
    scalers: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        scaler = scalers.setdefault(model, torch.amp.GradScaler("cpu", init_scale=2.0**10))
        x, y = batch(number)
        # One worker overflows in one step: all must skip it.
        if number == 3 and dist.get_rank() == 1:
            x = x * float("inf")
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        before = [p.detach().clone() for p in model.parameters()]
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if number == 3:
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            model.module.norm.reset_running_stats()
            optimizer.zero_grad()

    return compare_twins(Mlp, step, steps=8, rtol=1e-3, atol=1e-4, broadcast_buffers=False)


def clipping() -> dict[str, str]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x, y = batch(number)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    return compare_twins(Mlp, step)


def compiled_inner_model() -> dict[str, str]:
    return compare_twins(lambda: torch.compile(Mlp(), backend="aot_eager"), plain_step, steps=5)


def compiled_wrapper() -> dict[str, str]:
    torch.manual_seed(7)
    theirs = wrap_torch(Mlp())
    torch.manual_seed(7)
    ours = wrap(Mlp())
    compiled = torch.compile(ours, backend="aot_eager")
    pairs = [(m, torch.optim.SGD(m.parameters(), lr=0.05)) for m in (theirs, compiled)]
    for number in range(5):
        for model, optimizer in pairs:
            plain_step(model, optimizer, number)
    ours.verify_replicas()
    for left, right in zip(theirs.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)
    assert ours.plan is not None
    return ours.plan.routes


def sparse_embedding() -> dict[str, str]:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(60, 8, sparse=True)
            self.out = nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.embed(x).mean(1))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        generator = seed_of_rank(number)
        optimizer.zero_grad()
        x = torch.randint(0, 60, (4, 3), generator=generator)
        F.cross_entropy(model(x), torch.randint(0, 5, (4,), generator=generator)).backward()
        assert model.module.embed.weight.grad.is_sparse
        optimizer.step()

    return compare_twins(Sparse, step)


def embedding_bags() -> dict[str, str]:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total = nn.EmbeddingBag(90, 8, mode="sum")
            self.mean = nn.EmbeddingBag(90, 8, mode="mean", padding_idx=0)
            self.most = nn.EmbeddingBag(90, 8, mode="max")
            self.words = nn.Embedding(90, 24, padding_idx=3)
            self.out = nn.Linear(24, 5)

        def forward(self, x: Tensor) -> Tensor:
            bags = torch.cat([self.total(x), self.mean(x), self.most(x)], dim=1)
            return self.out(bags + self.words(x).sum(1))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        generator = seed_of_rank(number)
        optimizer.zero_grad(set_to_none=bool(number % 2))
        x = torch.randint(0, 90, (4, 3 + dist.get_rank()), generator=generator)
        F.cross_entropy(model(x), torch.randint(0, 5, (4,), generator=generator)).backward()
        optimizer.step()

    return compare_twins(Bags, step)


def embedding_used_twice_in_different_ways() -> dict[str, str]:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(70, 8)
            self.out = nn.Linear(8, 70)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.embed(x)
            return self.out(hidden) + hidden @ self.embed.weight.t()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x = torch.randint(0, 70, (5,), generator=seed_of_rank(number))
        optimizer.zero_grad()
        F.cross_entropy(model(x), x).backward()
        optimizer.step()

    return compare_twins(Odd, step)


def weight_used_outside_its_layer() -> dict[str, str]:
    class Functional(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            hidden = F.relu(self.first(x))
            return self.last(self.norm(self.second(hidden) + F.linear(hidden, self.second.weight)))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x, y = batch(number)
        optimizer.zero_grad()
        # Also in the loss, which no walk from the model's outputs would find, and on one rank only in some steps.
        penalty = model.module.first.weight.square().sum() if (number + dist.get_rank()) % 2 else 0.0
        (F.cross_entropy(model(x), y) + 1e-3 * penalty).backward()
        optimizer.step()

    return compare_twins(Functional, step)


def gradient_penalty() -> dict[str, str]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x, y = batch(number)
        x.requires_grad_()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
        optimizer.step()

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(20, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 5))

    return compare_twins(make, step)


def autograd_grad_stays_local() -> None:
    model = wrap(Mlp())
    plain_step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    x, y = batch(3)
    weight = model.module.second.weight
    (ours,) = torch.autograd.grad(F.cross_entropy(model(x), y), weight)
    plain_model = copy.deepcopy(model.module)
    (theirs,) = torch.autograd.grad(F.cross_entropy(plain_model(x), y), plain_model.second.weight)
    torch.testing.assert_close(ours, theirs)


def channels_last_and_mixed_types() -> dict[str, str]:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3, bias=False)
            self.deep = nn.Linear(8 * 4, 30).float()
            self.out = nn.Linear(30, 5)

        def forward(self, x: Tensor) -> Tensor:
            features = F.adaptive_avg_pool2d(F.relu(self.conv(x)), 2).flatten(1)
            return self.out(torch.tanh(self.deep(features.float())).double())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x = torch.randn(3, 3, 8, 8, generator=seed_of_rank(number)).to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return compare_twins(lambda: Mixed().to(memory_format=torch.channels_last), step, rtol=1e-4, atol=1e-6)


def higher_rank_inputs_and_keywords() -> dict[str, str]:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(20, 64, bias=False)
            self.down = nn.Linear(64, 20)

        def forward(self, *, tokens: Tensor) -> Tensor:
            return self.down(F.gelu(self.up(tokens)))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x = torch.randn(2, 3, 20, generator=seed_of_rank(number))
        optimizer.zero_grad()
        model(tokens=x).square().mean().backward()
        optimizer.step()

    return compare_twins(Tokens, step)


def attention_that_uses_a_weight_without_its_layer() -> dict[str, str]:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
            self.out = nn.Linear(16, 96)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.attention(x, x, x, need_weights=False)[0])

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x = torch.randn(2, 3, 16, generator=seed_of_rank(number))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return compare_twins(Attention, step)


def join_with_uneven_inputs(divide_by_initial_world_size: bool, options: dict[str, Any]) -> None:
    def run(wrapped: Any) -> list[Tensor]:
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
        with wrapped.join(divide_by_initial_world_size=divide_by_initial_world_size):
            for number in range(4 + 2 * dist.get_rank()):
                plain_step(wrapped, optimizer, number)
        return [p.detach().clone() for p in wrapped.parameters()]

    torch.manual_seed(7)
    theirs = run(wrap_torch(Mlp()))
    torch.manual_seed(7)
    wrapped = wrap(Mlp(), **options)
    ours = run(wrapped)
    wrapped.verify_replicas()
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)
    plain_step(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.05), 99)
    wrapped.verify_replicas()


def two_models_in_one_job() -> None:
    torch.manual_seed(3)
    first, second = wrap(Mlp()), wrap(nn.Sequential(nn.Linear(5, 60), nn.Tanh(), nn.Linear(60, 1)))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (first, second)]
    for number in range(6):
        x, _ = batch(number)
        for optimizer in optimizers:
            optimizer.zero_grad()
        second(first(x)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    first.verify_replicas()
    second.verify_replicas()


def subgroup_of_workers() -> None:
    group = dist.new_group([0, 2])
    if dist.get_rank() not in (0, 2):
        return
    torch.manual_seed(dist.get_rank())
    model = wrap(Mlp(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(4):
        plain_step(model, optimizer, number)
    model.verify_replicas()


def copies_and_state() -> None:
    torch.manual_seed(dist.get_rank())
    model = wrap(Mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    plain_step(model, optimizer, 0)
    assert type(model.module.second) is not nn.Linear  # its factors travel
    keys = list(wrap_torch(Mlp()).state_dict())
    assert list(model.state_dict()) == keys
    inner = copy.deepcopy(model.module)
    assert type(inner.second) is nn.Linear
    loaded = pickle.loads(pickle.dumps(model.module))
    assert type(loaded.second) is nn.Linear
    assert repr(loaded) == repr(model.module) == repr(Mlp())
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    again = copy.deepcopy(model)
    again.load_state_dict(torch.load(buffer, weights_only=True))
    for one in (model, again):
        plain_step(one, torch.optim.SGD(one.parameters(), lr=0.05), 1)
        one.verify_replicas()
    for left, right in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(left, right)  # the copy has not planned yet, so it sums in another order
    # The copies were made from a layer whose factors travel, but take no part in any exchange.
    F.cross_entropy(inner(batch(5)[0]), batch(5)[1]).backward()
    model.close()
    assert type(model.module.second) is nn.Linear


def one_worker_alone_copies() -> None:
    torch.manual_seed(dist.get_rank())
    model = wrap(Mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    plain_step(model, optimizer, 0)
    if dist.get_rank() == 1:
        # As for averaged weights: evaluated, changed and saved where the others wait for nothing.
        average = copy.deepcopy(model)
        average.load_state_dict(model.state_dict())
        with torch.no_grad():
            before = average(batch(1)[0])
        for parameter in average.parameters():
            parameter.requires_grad_(False)
        assert torch.equal(average.eval()(batch(1)[0]), average.module(batch(1)[0]))
        assert not before.requires_grad
        buffer = io.BytesIO()
        torch.save(average, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        assert all(torch.equal(one, other) for one, other in zip(loaded.parameters(), model.parameters(), strict=True))
        average.close()
    plain_step(model, optimizer, 1)
    model.verify_replicas()


def copies_meet_when_trained(join: bool) -> None:
    model = wrap(Mlp())
    plain_step(model, torch.optim.SGD(model.parameters(), lr=0.05), 0)
    twin = copy.deepcopy(model)
    if dist.get_rank() == 0:
        with torch.no_grad():
            twin.eval()(batch(1)[0])
            twin.train()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.05)
    with twin.join() if join else contextlib.nullcontext():
        for number in range(2 + (join and dist.get_rank() == 0)):
            plain_step(twin, optimizer, number)
    twin.verify_replicas()
    assert twin.plan is not None
    again = copy.deepcopy(twin)
    again.verify_replicas()
    twin.close()


def replans_when_the_batch_changes() -> None:
    from poseidon.planning.cluster import Cluster, Link

    # On this wire, factors of a 40 x 40 layer pay up to about 10 rows.
    cluster = Cluster(machines=dist.get_world_size(), between=Link(1e6, 0), flops=1e15)
    model = wrap(nn.Linear(40, 40), cluster=cluster)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(rows: int) -> str:
        optimizer.zero_grad()
        model(torch.randn(rows, 40)).square().mean().backward()
        optimizer.step()
        assert model.plan is not None
        return model.plan.routes["(root)"]

    torch.manual_seed(dist.get_rank())
    assert step(4) == "factors"
    assert [step(4), step(64), step(4)] == ["factors"] * 3  # one odd batch changes nothing
    assert [step(64), step(64)] == ["factors", "allreduce"]
    assert step(64) == "allreduce"
    # Having changed once, it must stay longer.
    assert [step(4) for _ in range(4)] == [*["allreduce"] * 3, "factors"]
    model.verify_replicas()


def evaluation_between_steps() -> None:
    model = wrap(Mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(3):
        plain_step(model, optimizer, number)
        model.eval()
        # As many evaluations as one likes, and on some ranks only; buffers are not exchanged for them here.
        with torch.no_grad():
            for _ in range(1 + dist.get_rank()):
                model.module(batch(number)[0])
        model.train()
    model.verify_replicas()


def buffers_follow_rank_0() -> None:
    model = wrap(Mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(3):
        plain_step(model, optimizer, number)
    model.sync_buffers(0)
    means = [torch.empty_like(model.module.norm.running_mean) for _ in range(dist.get_world_size())]
    dist.all_gather(means, model.module.norm.running_mean)
    assert all(torch.equal(means[0], mean) for mean in means)
    assert model.module.norm.num_batches_tracked.item() == 3


def starts_from_rank_0() -> None:
    torch.manual_seed(100 + dist.get_rank())
    wrap(Mlp()).verify_replicas()


def forward_without_gradients_before_backward() -> dict[str, str]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        (x, y), (z, _) = batch(number), batch(number + 500)
        optimizer.zero_grad()
        out = model(x)
        with torch.no_grad():
            target = model(z).mean()
        (F.cross_entropy(out, y) + (out.mean() - target).square()).backward()
        optimizer.step()

    return compare_twins(Mlp, step, broadcast_buffers=False)


def penalty_in_a_backward_of_its_own() -> dict[str, str]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        plain_step(model, optimizer, number)
        (1e-3 * sum(p.square().sum() for p in model.parameters())).backward()
        optimizer.step()

    return compare_twins(Mlp, step)


def users_hook_on_a_weight() -> dict[str, str]:
    def make() -> nn.Module:
        model = Mlp()
        model.second.weight.register_hook(lambda gradient: gradient * 2)
        return model

    return compare_twins(make, plain_step)


def users_hook_after_a_weights_gradient() -> dict[str, str]:
    def halve(weight: Tensor) -> None:
        assert weight.grad is not None
        weight.grad.mul_(0.5)

    def make() -> nn.Module:
        model = Mlp()
        model.second.weight.register_post_accumulate_grad_hook(halve)
        return model

    return compare_twins(make, plain_step)


def embedding_with_another_parameter() -> dict[str, str]:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(60, 8)
            self.table.scale = nn.Parameter(torch.ones(8))
            self.out = nn.Linear(8, 60)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.table(x) * self.table.scale)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x = torch.randint(0, 60, (5,), generator=seed_of_rank(number))
        optimizer.zero_grad()
        F.cross_entropy(model(x), x).backward()
        optimizer.step()

    return compare_twins(Scaled, step)


def dense_parts_in_another_order_on_each_rank() -> dict[str, str]:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(20, 30), nn.Linear(20, 30)

        def forward(self, x: Tensor) -> Tensor:
            pair = [self.left, self.right] if dist.get_rank() % 2 else [self.right, self.left]
            return pair[0](x) + pair[1](x)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        penalty = model.module.left.weight.square().sum() + 3 * model.module.right.weight.square().sum()
        (model(batch(number)[0]).square().mean() + 1e-2 * penalty).backward()
        optimizer.step()

    return compare_twins(Two, step)


def uneven_evaluations() -> None:
    model = wrap(Mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(3):
        plain_step(model, optimizer, number)
        model.eval()
        with torch.no_grad():
            for _ in range(1 + dist.get_rank()):
                model(batch(number)[0])
        model.train()
    model.verify_replicas()


def replaced_buffers_are_followed() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(20, 5)
            self.register_buffer("average", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.average = 0.5 * self.average + 0.5 * x.mean().detach()
            return self.layer(x)

    model = wrap(Average())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(3):
        plain_step(model, optimizer, number)
    model.sync_buffers(0)
    averages = [torch.empty_like(model.module.average) for _ in range(dist.get_world_size())]
    dist.all_gather(averages, model.module.average)
    assert all(torch.equal(averages[0], average) for average in averages)


def half_precision_replicas_can_be_verified() -> None:
    model = wrap(nn.Linear(20, 30).bfloat16())
    model(torch.randn(3, 20, dtype=torch.bfloat16)).float().square().mean().backward()
    model.verify_replicas()


SIDE_BY_SIDE = {
    plain: {"factors", "allreduce"},
    gathered_factors: {"factors", "allreduce"},
    gathered_factors_with_growing_batches: {"factors"},
    uneven_batches: {"factors"},
    sparse_inputs: {"allreduce", "factors"},
    nested_inputs: {"allreduce"},
    empty_batch_on_one_rank: {"factors"},
    accumulation_with_no_sync: {"factors"},
    several_backwards_without_zero_grad: {"factors"},
    two_forwards_one_backward: {"factors"},
    layer_called_several_times: {"allreduce"},
    tied_weights: {"allreduce"},
    frozen_parameters: {"allreduce"},
    unused_parameters: {"factors"},
    static_graph_with_unused_and_reentrant_checkpoint: {"factors"},
    checkpointing_without_reentry: {"factors"},
    checkpointing_with_reentry: {"factors"},
    bucket_views: {"factors"},
    structured_outputs: {"factors"},
    autocast_bf16: {"factors"},
    gradient_scaler: {"factors"},
    clipping: {"factors"},
    compiled_inner_model: {"factors"},
    compiled_wrapper: {"factors"},
    sparse_embedding: {"rows"},
    embedding_bags: {"rows"},
    embedding_used_twice_in_different_ways: {"rows"},
    weight_used_outside_its_layer: {"factors"},
    gradient_penalty: {"factors"},
    channels_last_and_mixed_types: {"factors"},
    higher_rank_inputs_and_keywords: {"factors"},
    attention_that_uses_a_weight_without_its_layer: {"factors"},
    forward_without_gradients_before_backward: {"factors"},
    penalty_in_a_backward_of_its_own: {"factors"},
    users_hook_on_a_weight: {"factors"},
    users_hook_after_a_weights_gradient: {"factors"},
    embedding_with_another_parameter: {"allreduce"},
    dense_parts_in_another_order_on_each_rank: {"factors"},
}


ON_FOUR = amount(
    [
        *(plain, gathered_factors_with_growing_batches, empty_batch_on_one_rank, accumulation_with_no_sync),
        *(layer_called_several_times, tied_weights, frozen_parameters, unused_parameters, bucket_views, autocast_bf16),
        *(static_graph_with_unused_and_reentrant_checkpoint, sparse_embedding, weight_used_outside_its_layer),
        *(embedding_with_another_parameter, dense_parts_in_another_order_on_each_rank),
    ],
    list(SIDE_BY_SIDE),
)
"""On four workers too: where gradients are full, or not the same on all workers."""

COMPILER = ["torch._inductor.compile_fx"]
"""What ``torch.compile`` takes a second to import when it is first used."""


def _exactly(function: Any, *args: Any) -> Any:
    """Run in double precision, where some steps do not blow rounding up to a visible size, with warnings as errors."""
    quiet()
    torch.set_default_dtype(torch.float64)
    return function(*args)


@pytest.mark.parametrize(
    ("behaviour", "workers"),
    [*((behaviour, 2) for behaviour in SIDE_BY_SIDE), *((behaviour, 4) for behaviour in ON_FOUR)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_side_by_side_with_torch(behaviour: Any, workers: int) -> None:
    preload = COMPILER if behaviour in (compiled_inner_model, compiled_wrapper) else ()
    routes = run_ranks(_exactly, workers, behaviour, preload=preload)[0]
    # Between more than two machines the parameter server has fewer hops, so full gradients take it there.
    full = {"sharded" if workers > 2 and route == "allreduce" else route for route in SIDE_BY_SIDE[behaviour]}
    assert full <= set(routes.values()), routes


@pytest.mark.parametrize("divide_by_initial_world_size", [True, False])
@pytest.mark.parametrize("options", [{}, {"gather_factors": True}], ids=["messages", "gather"])
def test_join(divide_by_initial_world_size: bool, options: dict[str, Any]) -> None:
    run_ranks(_exactly, 3, join_with_uneven_inputs, divide_by_initial_world_size, options)


ALONE = [
    gradients_inside_no_sync_are_local,
    autograd_grad_stays_local,
    two_models_in_one_job,
    copies_and_state,
    replans_when_the_batch_changes,
    evaluation_between_steps,
    uneven_evaluations,
    replaced_buffers_are_followed,
    half_precision_replicas_can_be_verified,
    buffers_follow_rank_0,
    starts_from_rank_0,
]


@pytest.mark.parametrize("behaviour", ALONE, ids=lambda function: function.__name__)
def test_behaviour(behaviour: Any) -> None:
    run_ranks(_exactly, 2, behaviour)


def test_subgroup_of_workers() -> None:
    run_ranks(_exactly, 3, subgroup_of_workers)


def _note_buffers(state: list[int], buffers: dict[str, torch.Tensor]) -> None:
    state.append(len(buffers))


def test_one_worker_alone_copies() -> None:
    run_ranks(one_worker_alone_copies, 2)


@pytest.mark.parametrize("join", [False, True])
def test_copies_meet_when_they_are_trained(join: bool) -> None:
    run_ranks(copies_meet_when_trained, 2, join)


def test_hooks_are_pickled_with_the_wrapper() -> None:
    model = poseidon.DistributedDataParallel(Mlp())
    model._register_buffer_comm_hook([7], _note_buffers)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    loaded = pickle.loads(pickle.dumps(model))
    assert loaded._buffer_hook.func is _note_buffers
    loaded._buffer_hook({"mean": torch.zeros(1)})
    assert loaded._buffer_hook.args == ([7, 1],)
    assert loaded._comm_hooks == [(default_hooks.allreduce_hook, None)]
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), loaded.parameters(), strict=True))


def test_no_process_group_means_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    model = poseidon.DistributedDataParallel(Mlp())
    x, y = torch.randn(4, 20), torch.randint(0, 5, (4,))
    F.cross_entropy(model(x), y).backward()
    with model.no_sync(), model.join():
        assert model(x).shape == (4, 5)
    assert model.plan is None
