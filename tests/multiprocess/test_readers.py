"""Whoever reads a model, its gradients or its optimizer under ``distribute`` sees what plain training shows."""

from __future__ import annotations

import copy
import io
import itertools
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import poseidon
from patience import comes_true
from ranks import run_ranks
from small_net import ROWS, batch_of, small_net

UPDATES = ("worker", "server")
STEPS = 5


def _traced_part() -> nn.Sequential:
    net = small_net()
    return nn.Sequential(torch.jit.trace(net[:2], torch.zeros(ROWS, 8)), net[2])


Step = Callable[[Any, Any, Any, Tensor, Tensor, list[Any]], None]
"""One step of a called model, the user's module and an optimizer, with what the script remembers."""


def _plain(model: Any, _module: Any, optimizer: Any, x: Tensor, y: Tensor, _seen: list[Any]) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def _keeps_gradients(model: Any, module: Any, optimizer: Any, x: Tensor, y: Tensor, seen: list[Any]) -> None:
    """Look at gradients after the step, and keep them: the next backward makes others."""
    _plain(model, module, optimizer, x, y, seen)
    seen.extend(value.grad for value in module.parameters())


def _keeps_gradients_before(model: Any, module: Any, optimizer: Any, x: Tensor, y: Tensor, seen: list[Any]) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    seen.extend(value.grad for value in module.parameters())
    optimizer.step()


def _by_functions(model: Any, module: Any, optimizer: Any, x: Tensor, y: Tensor, seen: list[Any]) -> None:
    """Look at the module through torch.func between two steps."""
    _plain(model, module, optimizer, x, y, seen)
    weights = dict(module.named_parameters())
    seen.append(torch.func.functional_call(module, weights, (x[:1] * 0 + 1,)).detach())

    def loss(weights: dict[str, Tensor], one: Tensor) -> Tensor:
        return torch.func.functional_call(module, weights, (one[None],)).square().sum()

    ones = torch.ones(2, 8)
    detached = {name: value.detach() for name, value in weights.items()}
    seen.extend(torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(detached, ones).values())
    seen.extend(torch.func.grad(loss)(weights, ones[0]).values())
    stacked, _ = torch.func.stack_module_state([module])  # type: ignore[list-item]
    seen.extend(value.clone() for value in stacked.values())


def _by_gradients(model: Any, module: Any, optimizer: Any, x: Tensor, y: Tensor, seen: list[Any]) -> None:
    """Let a transform of torch.func be the first to read parameters after a step."""
    _plain(model, module, optimizer, x, y, seen)

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return sum((value.square().sum() for value in weights.values()), torch.zeros(()))

    seen.extend(torch.func.grad(loss)(dict(module.named_parameters())).values())


def _by_batches(model: Any, module: Any, optimizer: Any, x: Tensor, y: Tensor, seen: list[Any]) -> None:
    """Let vmap be that."""
    _plain(model, module, optimizer, x, y, seen)
    seen.append(torch.func.vmap(lambda row: row.square().sum())(module[0].weight).detach())
    seen.append(torch.func.jacrev(lambda row: row.square())(module[2].bias).detach())
    seen.append(torch.func.jacfwd(lambda row: row.square())(module[0].bias).detach())


def _by_captures(model: Any, module: Any, optimizer: Any, x: Tensor, y: Tensor, seen: list[Any]) -> None:
    """Let parameters be read first inside a transform that got others."""
    _plain(model, module, optimizer, x, y, seen)
    seen.append(torch.func.grad(lambda one: module(one).square().sum())(torch.ones(2, 8)).detach())
    seen.append(torch.func.jacfwd(lambda one: one * module[0].weight.sum())(torch.ones(2)).detach())


def _evaluates(model: Any, module: Any, optimizer: Any, x: Tensor, y: Tensor, seen: list[Any]) -> None:
    """Call the user's own module between two steps, as an evaluation does that knows nothing of the other."""
    _plain(model, module, optimizer, x, y, seen)
    with torch.no_grad():
        seen.append(module(torch.ones(ROWS, 8)))


def _evaluates_a_part(model: Any, module: Any, optimizer: Any, x: Tensor, y: Tensor, seen: list[Any]) -> None:
    _plain(model, module, optimizer, x, y, seen)
    with torch.no_grad():
        seen.append(module[0](torch.ones(ROWS, 8)))


def _made_anew(model: Any, module: Any, optimizer: Any, x: Tensor, y: Tensor, seen: list[Any]) -> None:
    """Make parameters and buffers of parameters."""
    _plain(model, module, optimizer, x, y, seen)
    seen.append(nn.Parameter(module[0].weight).detach().clone())
    seen.append(nn.Parameter(module[2].weight, requires_grad=False).clone())
    seen.append(nn.Buffer(module[2].bias).detach().clone())


def _recorded(model: Any, module: Any, optimizer: Any, x: Tensor, y: Tensor, seen: list[Any]) -> None:
    """Record the module for other programs, with gradients switched on."""
    _plain(model, module, optimizer, x, y, seen)
    traced = torch.jit.trace(module, torch.zeros(2, 8))
    torch.jit.save(traced, io.BytesIO())
    seen.append(traced(torch.ones(2, 8)).detach().clone())
    seen.append(torch.fx.symbolic_trace(module)(torch.ones(2, 8)).detach().clone())


def _compiled_in_place() -> nn.Sequential:
    net = small_net()
    net.compile(backend="eager")
    return net


def _forward_compiled() -> nn.Sequential:
    net: Any = small_net()
    net.forward = torch.compile(net.forward, backend="eager", fullgraph=True)
    return net


def _part_compiled_in_place() -> nn.Sequential:
    net = small_net()
    net[0].compile(backend="eager")
    return net


class Observed(nn.Parameter):
    """A parameter of a class that sees every operation itself."""

    seen = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Observed.seen += 1
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _observed() -> nn.Sequential:
    net = small_net()
    for layer in (net[0], net[2]):
        layer.weight = Observed(layer.weight.detach())
    return net


class Seeing:
    """Sees every operation first, and looks at nothing else, as nested tensors do; with a default of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = {}) -> Any:  # noqa: B006
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


class Passing(Seeing, Tensor):
    """A tensor that does."""


class Shifted(nn.Module):
    """Adds a parameter to such a tensor: nothing is kept for backward that could tell an old value from a new one."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8))
        self.body = small_net()

    def forward(self, x: Tensor) -> Tensor:
        shifted = x.as_subclass(Passing) + self.shift  # type: ignore[arg-type]
        out: Tensor = self.body(shifted.as_subclass(Tensor))  # type: ignore[arg-type]
        return out


class Selective(nn.Sequential):
    """Keeps the products of its layers for backward, and computes the rest again."""

    def forward(self, x: Tensor) -> Tensor:
        products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
        contexts = partial(create_selective_checkpoint_contexts, products)
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)
        return out


def _selective() -> nn.Sequential:
    torch.manual_seed(5)
    return Selective(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False))


def _beside_others(model: Any, module: Any, optimizer: Any, x: Tensor, y: Tensor, seen: list[Any]) -> None:
    """Let tensors of another class be the first arguments beside parameters after a step."""
    _plain(model, module, optimizer, x, y, seen)
    ones: Any = torch.ones(2, 8).as_subclass(Passing)  # type: ignore[arg-type]
    with torch.no_grad():
        seen.append((ones + module.shift).as_subclass(Tensor))
        seen.append(F.linear(ones, module.body[0].weight).as_subclass(Tensor))


class Encoding(nn.Module):
    """Has layers that compute in another way while a parameter sees operations."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(x.unsqueeze(1))[:, 0])
        return out


def _encoding() -> nn.Module:
    torch.manual_seed(3)
    return Encoding()


def _evaluates_padded(model: Any, module: Any, optimizer: Any, x: Tensor, y: Tensor, seen: list[Any]) -> None:
    """Evaluate the user's own module on padded sequences: the faster way leaves zeros where the padding is."""
    _plain(model, module, optimizer, x, y, seen)
    module.eval()
    is_padded = torch.tensor([[False, False, True], [False, True, True]])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        for part in (module.encoder, module.encoder.layers[1]):
            seen.append(part(torch.ones(2, 3, 8), src_key_padding_mask=is_padded))
        seen.append(torch.jit.script(module)(torch.ones(2, 8)))
    module.train()
    seen.append(copy.deepcopy(module)(torch.ones(2, 8)).detach())


CASES: dict[str, tuple[Callable[[], nn.Module], Step]] = {
    "a scripted model": (lambda: torch.jit.script(small_net()), _plain),
    "a traced part": (_traced_part, _plain),
    "a traced model": (lambda: torch.jit.trace(small_net(), torch.zeros(ROWS, 8)), _plain),
    "a scripted model, evaluated": (lambda: torch.jit.script(small_net()), _evaluates),
    "a traced part, evaluated": (_traced_part, _evaluates_a_part),
    "a compiled model, evaluated": (lambda: torch.compile(small_net(), backend="eager"), _evaluates),
    "a model compiled in place, evaluated": (_compiled_in_place, _evaluates),
    "a model with a compiled forward, evaluated": (_forward_compiled, _evaluates),
    "a part compiled in place, evaluated": (_part_compiled_in_place, _evaluates_a_part),
    "a model, evaluated": (small_net, _evaluates),
    "a transformer, evaluated": (_encoding, _evaluates_padded),
    "parameters with a class of their own": (_observed, _evaluates),
    "gradients kept after the step": (small_net, _keeps_gradients),
    "gradients kept before the step": (small_net, _keeps_gradients_before),
    "torch.func": (small_net, _by_functions),
    "torch.func's gradients": (small_net, _by_gradients),
    "torch.func's batches": (small_net, _by_batches),
    "inside torch.func": (small_net, _by_captures),
    "parameters beside tensors of another class": (Shifted, _beside_others),
    "a selective checkpoint": (_selective, _plain),
    "parameters made of parameters": (small_net, _made_anew),
    "a model that is recorded": (small_net, _recorded),
}


def _train(case: str, update: str, routes: str | None = None) -> None:
    make, step = CASES[case]
    alone, ours = make(), make()
    plain = torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9)
    options: dict[str, Any] = {} if routes is None else {"routes": {"*": routes}}
    optimizer: Any = torch.optim.SGD(ours.parameters(), 0.1, momentum=0.9)
    model, optimizer = poseidon.distribute(ours, optimizer, update=update, **options)
    expected: list[Any] = []
    seen: list[Any] = []
    for number in range(STEPS):
        parts = [batch_of(number, rank) for rank in range(dist.get_world_size())]
        step(alone, alone, plain, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]), expected)
        step(model, ours, optimizer, *parts[dist.get_rank()], seen)
    shown = [[one for one in some if not isinstance(one, nn.Module)] for some in (seen, expected)]
    torch.testing.assert_close(*shown, rtol=1e-4, atol=1e-6)
    for mine, theirs in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-4, atol=1e-6)
    model.close()


@pytest.mark.parametrize("routes", ["factors", "sharded", "allreduce"])
@pytest.mark.parametrize(
    "case",
    [
        "gradients kept after the step",
        "parameters with a class of their own",
        "parameters beside tensors of another class",
        "a selective checkpoint",
        "a model that is recorded",
    ],
)
def test_readers_see_the_same_by_every_route(case: str, routes: str) -> None:
    run_ranks(_train, 2, case, "worker", routes)


def _read_alone(update: str, routes: str) -> None:
    net = small_net()
    options: dict[str, Any] = {} if update == "server" else {"routes": {"*": routes}}
    model, optimizer = poseidon.distribute(net, torch.optim.SGD(net.parameters(), 0.1), update=update, **options)
    for number in range(STEPS):
        x, y = batch_of(number, dist.get_rank())
        optimizer.zero_grad()
        penalty = sum(value.square().sum() for value in net.parameters())
        (F.cross_entropy(model(x), y) + 0.1 * penalty).backward()
        optimizer.step()
        if dist.get_rank() == 0:
            float(next(net.parameters()).detach().sum())
        dist.barrier()
    model.close()


@pytest.mark.parametrize("routes", ["factors", "allreduce", "sharded"])
def test_one_worker_may_read_the_model_while_the_others_wait(routes: str) -> None:
    run_ranks(_read_alone, 2, "worker", routes, timeout_s=60)


def test_one_worker_may_read_the_model_while_the_others_wait_for_it_and_owners_step() -> None:
    run_ranks(_read_alone, 2, "server", "", timeout_s=60)


class Factored(torch.optim.SGD):
    """Steps by what the script sets, which torch's own classes do not have."""

    factor = 1.0
    factors: Any = (1.0,)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for value in group["params"]:
                value.sub_(group["lr"] * self.factor * self.factors[-1] * value.grad)


class ElementwiseFactored(Factored):
    """The same, whose author says that parts may be stepped by themselves."""

    is_elementwise = True


def _set_attributes(kind: type[Factored]) -> None:
    alone, ours = small_net(), small_net()
    plain = kind(alone.parameters(), 0.1)
    model, optimizer = poseidon.distribute(ours, kind(ours.parameters(), 0.1))
    plain.factors, optimizer.factors = [1.0], [1.0]  # type: ignore[attr-defined]
    for number in range(STEPS):
        parts = [batch_of(number, rank) for rank in range(2)]
        x, y = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
        for called, stepped, batch in ((alone, plain, (x, y)), (model, optimizer, parts[dist.get_rank()])):
            stepped.zero_grad()
            F.cross_entropy(called(batch[0]), batch[1]).backward()
            stepped.step()
            if kind is Factored:
                stepped.factors.append(0.5 + number)  # type: ignore[attr-defined]
            stepped.factor = 1.0 + number  # type: ignore[attr-defined]
    for mine, theirs in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-4, atol=1e-6)
    model.close()


@pytest.mark.parametrize("kind", [Factored, ElementwiseFactored])
def test_what_is_set_after_a_step_counts_from_the_next_one(kind: type[Factored]) -> None:
    run_ranks(_set_attributes, 2, kind)


def _read_in_threads(update: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    model, optimizer = poseidon.distribute(net, torch.optim.SGD(net.parameters(), 1e-4), update=update)
    wrong: list[str] = []
    for number in range(60):
        optimizer.zero_grad()
        model(torch.ones(2, 64) * (dist.get_rank() + 1)).sum().backward()
        optimizer.step()
        ready = threading.Barrier(4)
        read: list[list[Tensor]] = [[] for _ in range(4)]

        def look(mine: list[Tensor], ready: threading.Barrier = ready) -> None:
            ready.wait()
            mine += [value.detach().clone() for value in net.parameters()]

        threads = [threading.Thread(target=look, args=(mine,)) for mine in read]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        after = [value.detach().clone() for value in net.parameters()]
        wrong += [f"step {number}" for mine in read if not all(map(torch.equal, mine, after))]
    assert not wrong, wrong
    model.close()


@pytest.mark.parametrize("update", UPDATES)
def test_threads_that_read_at_once_see_the_same_step(update: str) -> None:
    run_ranks(_read_in_threads, 2, update, timeout_s=100)


class Exported(nn.Module):
    """A scripted model is also read by its other methods, and by save()."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    @torch.jit.export
    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))


def _saves(model: Any, module: Any, optimizer: Any, x: Tensor, y: Tensor, seen: list[Any]) -> None:
    _plain(model, module, optimizer, x, y, seen)
    with torch.no_grad():
        seen.append(module.encode(torch.ones(2, 8)))
        stream = io.BytesIO()
        torch.jit.save(module, stream)
        stream.seek(0)
        seen.append(torch.jit.load(stream)(torch.ones(2, 8)))
        seen.append(module.body(torch.ones(2, 8)))


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale


def total(values: list[Tensor]) -> Tensor:
    found = torch.zeros(())
    for value in values:
        found = found + value.sum()
    return found


def _by_scripts(model: Any, module: Any, optimizer: Any, x: Tensor, y: Tensor, seen: list[Any]) -> None:
    """Let functions that read in C++ be the first to read parameters after a step."""
    _plain(model, module, optimizer, x, y, seen)
    with torch.no_grad():
        seen.append(torch.jit.script(scaled)(torch.ones(4), scale=module[2].bias))
        seen.append(torch.jit.script(total)(list(module[0].parameters())))
    seen.append(torch.from_dlpack(torch.utils.dlpack.to_dlpack(module[2].weight)).clone())


def _copies(model: Any, module: Any, optimizer: Any, x: Tensor, y: Tensor, seen: list[Any]) -> None:
    """Let a copy of the model, as for an average of weights, go its own way."""
    _plain(model, module, optimizer, x, y, seen)
    seen.append(copy.deepcopy(module))
    with torch.no_grad():
        seen.append([one(torch.ones(ROWS, 8)) for one in seen if isinstance(one, nn.Module)])


CASES["a scripted model, saved and called by name"] = (lambda: torch.jit.script(Exported()), _saves)
CASES["scripted functions"] = (small_net, _by_scripts)
CASES["copies of a model compiled in place"] = (_part_compiled_in_place, _copies)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("case", list(CASES))
def test_readers_see_what_plain_training_shows(case: str, update: str) -> None:
    run_ranks(_train, 2, case, update)


def _is_used(bucket: Any) -> bool:
    """Whether a bucket's memory has more users than the bucket itself."""
    if bucket._flat is None:
        return False
    uses: int = torch._C._storage_Use_Count(bucket._flat.untyped_storage()._cdata)
    return uses > bucket._uses


def _keep_buckets(how: str) -> None:
    net = small_net()
    lossy: dict[str, Any] = {"lossy": "lowrank", "rank": 1} if how == "lowrank" else {"routes": {"*": "sharded"}}
    model, optimizer = poseidon.distribute(net, torch.optim.SGD(net[0].parameters(), 0.1), **lossy)
    places = set()
    settled = 0
    for number in itertools.count():
        x, y = batch_of(number, dist.get_rank())
        if how == "cleared in part":
            optimizer.zero_grad()
        else:
            model.zero_grad(set_to_none=how != "filled")
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        model.finish_step()
        settled = 0 if model.is_choosing else settled + 1  # while plans are tried, each has buckets of its own
        if settled > 2:
            engine: Any = model._engine
            buckets = [live.bucket for live in engine.planned.items if live.bucket is not None]
            # The wire's threads let go of a bucket a moment after its values have landed.
            comes_true(lambda buckets=buckets: not any(map(_is_used, buckets)))
            places.add(tuple(bucket._flat.data_ptr() for bucket in buckets if bucket._flat is not None))
        if settled == 8:
            break
    assert len(places) == 1
    assert places != {()}
    model.close()


@pytest.mark.parametrize("how", ["cleared", "filled", "cleared in part", "lowrank"])
def test_buckets_stay_where_they_are_if_nobody_keeps_a_gradient(how: str) -> None:
    run_ranks(_keep_buckets, 2, how)


def _join_twice() -> None:
    net = small_net()
    model, optimizer = poseidon.distribute(net, torch.optim.SGD(net.parameters(), 0.1))
    for epoch in range(3):
        with model.join():
            for number in range(3 + dist.get_rank()):
                x, y = batch_of(10 * epoch + number, dist.get_rank())
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    model.verify_replicas()
    model.close()


def test_workers_that_ran_out_of_input_may_train_again() -> None:
    run_ranks(_join_twice, 2)


def _hook_on_one_worker() -> None:
    net = small_net()
    routes = {"routes": {"*": "factors"}}
    model, optimizer = poseidon.distribute(net, torch.optim.SGD(net.parameters(), 0.1), **routes)
    if dist.get_rank() == 0:
        net[0].weight.register_hook(lambda _: None)
    for number in range(STEPS):
        x, y = batch_of(number, dist.get_rank())
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        dist.all_reduce(loss.detach())
        optimizer.step()
    model.verify_replicas()
    model.close()


def test_a_worker_that_needs_the_others_to_land_does_not_wait_for_them_alone() -> None:
    run_ranks(_hook_on_one_worker, 2, timeout_s=60)


class Following(torch.optim.SGD):
    """Steps towards another model, which it reads."""

    teacher: Any = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for value, other in zip(group["params"], self.teacher.parameters(), strict=True):
                value.sub_(group["lr"] * value.grad).add_(other, alpha=0.1)


def _read_another_model() -> None:
    nets = [small_net() for _ in range(4)]
    teachers = [nets[0], nets[1]]
    plain_teacher = torch.optim.SGD(teachers[0].parameters(), 0.1)
    teacher, teacher_optimizer = poseidon.distribute(teachers[1], torch.optim.SGD(teachers[1].parameters(), 0.1))
    plain = Following(nets[2].parameters(), 0.1)
    model, optimizer = poseidon.distribute(nets[3], Following(nets[3].parameters(), 0.1))
    plain.teacher, optimizer.teacher = teachers  # type: ignore[attr-defined]
    for number in range(STEPS):
        parts = [batch_of(number, rank) for rank in range(2)]
        whole = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
        _plain(teachers[0], None, plain_teacher, *whole, [])
        _plain(nets[2], None, plain, *whole, [])
        _plain(teacher, None, teacher_optimizer, *parts[dist.get_rank()], [])
        _plain(model, None, optimizer, *parts[dist.get_rank()], [])
    for mine, theirs in zip(nets[3].parameters(), nets[2].parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-4, atol=1e-6)
    model.close()
    teacher.close()


def test_an_optimizer_that_reads_another_model_sees_its_last_step() -> None:
    run_ranks(_read_another_model, 2)


# On a CUDA device, where work is only queued, and streams do not wait for each other.


def _on_gpu(function: Any, *args: Any) -> None:
    torch.set_default_device("cuda:0")
    torch.backends.cuda.matmul.allow_tf32 = False
    function(*args)


def _read_on_another_stream(update: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    model, optimizer = poseidon.distribute(net, torch.optim.SGD(net.parameters(), 1e-3), update=update)
    side, wrong = torch.cuda.Stream(), []
    for number in range(8):
        optimizer.zero_grad()
        model(torch.ones(2, 256) * (dist.get_rank() + 1)).sum().backward()
        optimizer.step()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            seen = [value.detach().clone() for value in net.parameters()]
        # Nobody asked this stream to wait for the other one.
        after = [value.detach().clone() for value in net.parameters()]
        torch.cuda.synchronize()
        final = [value.detach().clone() for value in net.parameters()]
        for name, values in (("on the other stream", seen), ("on this one", after)):
            wrong += [] if all(map(torch.equal, values, final)) else [f"step {number}, {name}"]
    assert not wrong, wrong
    model.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("case", list(CASES))
def test_readers_see_what_plain_training_shows_on_a_device(case: str, update: str) -> None:
    run_ranks(_on_gpu, 2, _train, case, update)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("read", [_read_in_threads, _read_on_another_stream])
def test_threads_and_streams_see_the_same_step_on_a_device(read: Any, update: str) -> None:
    run_ranks(_on_gpu, 2, read, update)
