"""What code written for torch's DistributedDataParallel relies on, compared with torch's class where it can be."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.utils.checkpoint import checkpoint

import poseidon
from poseidon.errors import ConfigError, MismatchError, UnsupportedError
from ranks import run_ranks
from twins import compare_twins, quiet, seed_of_rank, train, wrap, wrap_torch


def batch(number: int, size: int = 6) -> tuple[Tensor, Tensor]:
    with torch.device("cpu"):
        generator = seed_of_rank(number)
        x, y = torch.randn(size, 20, generator=generator), torch.randint(0, 5, (size,), generator=generator)
    return x.to(torch.get_default_device()), y.to(torch.get_default_device())


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(20, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))


class Normed(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x))) + self.second(x[:, :16]))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(20, 16)
        self.heads = nn.ModuleList(nn.Linear(16, 5) for _ in range(3))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.heads[which](torch.relu(self.stem(x)))


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    x, y = batch(number)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


# Gradients.


def layers_used_only_without_an_exchange() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x, y = batch(number)
        optimizer.zero_grad()
        with model.no_sync():
            F.cross_entropy(model(x, number % 2), y).backward()
        F.cross_entropy(model(x, 2), y).backward()
        optimizer.step()

    compare_twins(Heads, step, find_unused_parameters=True)


def outputs_without_a_part_in_the_loss() -> None:
    class Two(Heads):
        def forward(self, x: Tensor, _: int) -> Any:
            hidden = torch.relu(self.stem(x))
            return [head(hidden) for head in self.heads]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x, y = batch(number)
        optimizer.zero_grad()
        F.cross_entropy(model(x, 0)[dist.get_rank()], y).backward()
        assert model.module.heads[2].weight.grad is None
        optimizer.step()

    compare_twins(Two, step, find_unused_parameters=True)


def outputs_with_a_backward_each() -> None:
    class Two(Mlp):
        def forward(self, x: Tensor) -> Any:
            return self.first(x), self.last(self.second(x[:, :16]))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x, y = batch(number)
        optimizer.zero_grad()
        first, second = model(x)
        F.cross_entropy(first, y).backward()
        F.cross_entropy(second, y).backward()
        optimizer.step()

    compare_twins(Two, step)


def a_backward_that_is_prepared() -> None:
    """As pipelines have it, whose forwards all run without an exchange; and as Accelerate, which names no outputs."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x, y = batch(number)
        optimizer.zero_grad()
        with model.no_sync():
            first, last = model(x[:2]), model(x[2:])
            F.cross_entropy(first, y[:2]).backward()
        model.reducer.prepare_for_backward([last] if number % 2 else [])
        F.cross_entropy(last, y[2:]).backward()
        optimizer.step()

    compare_twins(Mlp, step)


def a_wrapper_that_is_gone() -> None:
    x, y = batch(0)
    loss = F.cross_entropy(wrap(Mlp())(x), y)
    with pytest.raises(UnsupportedError, match=r"wrapper was closed, or dropped.*Keep the wrapper"):
        loss.backward()
    model = wrap(Mlp())
    loss = F.cross_entropy(model(x), y)
    model.close()
    with pytest.raises(UnsupportedError, match="wrapper was closed"):
        loss.backward()
    F.cross_entropy(model.module(x), y).backward()


def forwards_that_use_different_parts() -> None:
    """Two forwards before one backward, and one whose output nobody uses."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x, y = batch(number)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, number % 2), y) + F.cross_entropy(model(x, 2), y)
        loss.backward()
        assert model.module.heads[1 - number % 2].weight.grad is None
        optimizer.step()
        model(x, 1 - number % 2)

    # Torch's class raises here: it only looks at the last forward.
    torch.manual_seed(7)
    ours = train(wrap(Heads(), find_unused_parameters=True), step, 4)
    torch.manual_seed(7)
    alone = Heads()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    for number in range(4):
        optimizer.zero_grad()
        for rank in range(dist.get_world_size()):
            generator = torch.Generator().manual_seed(1000 * rank + number)
            x, y = torch.randn(6, 20, generator=generator), torch.randint(0, 5, (6,), generator=generator)
            loss = F.cross_entropy(alone(x, number % 2), y) + F.cross_entropy(alone(x, 2), y)
            (loss / dist.get_world_size()).backward()
        optimizer.step()
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(ours[f"module.{name}"], parameter.detach(), msg=name)


def two_forwards_of_a_normalized_model() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x, y = batch(number)
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) + F.cross_entropy(model(x * 0.5), y)).backward()
        optimizer.step()

    compare_twins(Normed, step)


def a_checkpointed_wrapper() -> None:
    for reenters in (False, True):

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, reenters: bool = reenters) -> None:
            x, y = batch(number)
            optimizer.zero_grad()
            inputs = x.requires_grad_()  # reentrant checkpoints need one
            F.cross_entropy(checkpoint(model, inputs, use_reentrant=reenters), y).backward()
            optimizer.step()

        torch.manual_seed(7)
        ours = train(wrap(Mlp()), step, 5)
        torch.manual_seed(7)
        theirs = train(wrap_torch(Mlp()), plain_step, 5)
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, msg=f"{name}, {reenters=}")


def a_static_graph_that_changes() -> None:
    x, y = batch(0)
    model = wrap(Heads(), static_graph=True)
    F.cross_entropy(model(x, 0), y).backward()
    with pytest.raises(UnsupportedError, match=r"training graph has changed.* heads\.1\.\w+ got a gradient 1 time"):
        F.cross_entropy(model(x, 1), y).backward()
    model.close()
    for options in ({}, {"find_unused_parameters": True}):
        model = wrap(Mlp())
        model.find_unused_parameters = bool(options)
        model._set_static_graph()
        F.cross_entropy(model(x), y).backward()
        torch.relu(model.module.first(x)).sum()
        model(x)
        # Half of the model is left out: the backward ends, and the next forward complains.
        model.module.forward = lambda x, model=model: model.module.second(torch.relu(model.module.first(x)))
        model(x).sum().backward()
        with pytest.raises(UnsupportedError, match=r"training graph has changed(?s:.*)last\.weight, last\.bias"):
            model(x)
        model.close()  # or what is on its way to the other worker may be cut off


# Uneven inputs.


def gradients_after_join() -> None:
    """The early finisher goes into the next epoch with its own gradients, whatever the others exchanged meanwhile."""

    def epochs(model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for epoch in range(3):
            with model.join():
                for number in range(2 + 2 * dist.get_rank()):
                    x, y = batch(10 * epoch + number)
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            found += [p.detach().clone() for p in model.parameters()]
            assert all(p.grad is None for p in model.parameters())
        return found

    for options in ({}, {"gradient_as_bucket_view": True}):
        torch.manual_seed(7)
        ours = epochs(wrap(Mlp(), **options))
        torch.manual_seed(7)
        theirs = epochs(wrap_torch(Mlp(), **options))
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other)


def gradients_kept_through_join() -> None:
    for options in ({}, {"gradient_as_bucket_view": True}):
        model = wrap(Mlp(), **options)
        last = None
        with model.join():
            for number in range(2 + 2 * dist.get_rank()):
                x, y = batch(number)
                model.zero_grad()
                F.cross_entropy(model(x), y).backward()
                last = [p.grad.clone() for p in model.parameters()]
        assert last is not None
        assert all(torch.equal(p.grad, kept) for p, kept in zip(model.parameters(), last, strict=True))


def buffers_after_rank_0_has_finished() -> None:
    def run(model: nn.Module) -> Tensor:
        torch.manual_seed(dist.get_rank())
        with model.join():
            for number in range(2 + 3 * dist.get_rank()):
                x, y = batch(number)
                F.cross_entropy(model(x), y).backward()
        return model.module.norm.running_mean.clone()

    torch.manual_seed(7)
    ours = run(wrap(Normed()))
    torch.manual_seed(7)
    theirs = run(wrap_torch(Normed()))
    torch.testing.assert_close(ours, theirs)


# Hooks.


def _state() -> Any:
    """Full rank: what lower ones leave out depends on the order of gradients in a bucket."""
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=16, start_powerSGD_iter=3, min_compression_rate=0.01
    )


HOOKS: dict[str, tuple[Callable[[], Any], Any]] = {
    "allreduce": (lambda: None, default_hooks.allreduce_hook),
    "fp16": (lambda: None, default_hooks.fp16_compress_hook),
    "noop": (lambda: None, noop_hook),
    "powersgd": (_state, powerSGD_hook.powerSGD_hook),
    "fp16_allreduce": (lambda: None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
}


def torchs_hooks() -> None:
    for name, (state, hook) in HOOKS.items():
        found = []
        for make in (wrap, wrap_torch):
            torch.manual_seed(7)
            model = make(Mlp())
            model.register_comm_hook(state(), hook)
            found.append(train(model, plain_step, 6))
        for key, value in found[1].items():
            torch.testing.assert_close(found[0][key], value, rtol=1e-5, atol=1e-6, msg=f"{name}: {key}")


def hooks_with_sparse_gradients() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.EmbeddingBag(10, 20, sparse=True)
            self.last = nn.Linear(20, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.table((x[:, :2].abs() * 3).long().clamp(max=9)))

    def hook(_, bucket):  # torch's class does not understand annotations that are evaluated late
        bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x, y = batch(number)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        assert model.module.table.weight.grad.is_sparse

    found = []
    for make in (wrap, wrap_torch):
        torch.manual_seed(7)
        model = make(Table())
        model.register_comm_hook(None, hook)
        found.append(train(model, step, 3))
    for key, value in found[1].items():
        torch.testing.assert_close(found[0][key], value, msg=key)


def hooks_see_all_buckets_in_one_order() -> None:
    seen: list[tuple[int, bool, list[str]]] = []
    model = wrap(Mlp(), bucket_cap_mb=0.0005)
    names = {parameter: name for name, parameter in model.module.named_parameters()}

    def hook(state: str, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        assert state == "state"
        sizes = [gradient.shape == parameter.shape for gradient, parameter in _pairs(bucket)]
        assert all(sizes)
        assert bucket.buffer().numel() == sum(p.numel() for p in bucket.parameters())
        seen.append((bucket.index(), bucket.is_last(), [names[p] for p in bucket.parameters()]))
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(torch.full_like(bucket.buffer(), 3.0))
        return future

    model.register_comm_hook("state", hook)
    for number in range(3):
        model.zero_grad()
        x, y = batch(number)
        F.cross_entropy(model(x), y).backward()
        assert all(bool((p.grad == 3).all()) for p in model.parameters()), "what the hook returns is the gradient"
    count = len(seen) // 3
    assert count > 2
    assert [entry[:2] for entry in seen] == [(i, i == count - 1) for i in range(count)] * 3
    assert sorted(name for entry in seen[-count:] for name in entry[2]) == sorted(names.values())
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, seen)
    assert everybody[0] == everybody[1]
    assert set(model.plan.routes.values()) == {"hook"}
    alone = wrap(Mlp())
    alone.register_comm_hook(None, noop_hook)
    twin = copy.deepcopy(alone)
    x, y = batch(0)
    F.cross_entropy(twin(x), y).backward()
    assert set(twin.plan.routes.values()) == {"hook"}, "a copy of the wrapper has its hook"


def _pairs(bucket: Any) -> Any:
    return zip(bucket.gradients(), bucket.parameters(), strict=True)


def hooks_that_are_refused() -> None:
    model = wrap(Mlp())
    with pytest.raises(TypeError, match="must be callable"):
        model.register_comm_hook(None, 1)
    assert "must be callable" in model._get_ddp_logging_data()["error"]
    with pytest.raises(ConfigError, match="bucket annotation should be"):
        model.register_comm_hook(None, _wrong_bucket)
    with pytest.raises(ConfigError, match="return annotation should be"):
        model.register_comm_hook(None, _wrong_result)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with pytest.raises(UnsupportedError, match="only be called once"):
        model.register_comm_hook(None, noop_hook)
    x, y = batch(0)
    F.cross_entropy(model(x), y).backward()
    late = wrap(Mlp())
    F.cross_entropy(late(x), y).backward()
    with pytest.raises(UnsupportedError, match="in step 1; it should be called before training loop starts"):
        late.register_comm_hook(None, noop_hook)
    with pytest.raises(UnsupportedError, match=r"before training loop starts"):
        late._set_static_graph()
    odd = wrap(Mlp())
    odd.register_comm_hook(None, _no_future)
    with pytest.raises(UnsupportedError, match=r"callback must return a torch\.futures\.Future object, but got .*int"):
        F.cross_entropy(odd(x), y).backward()
    inner = Mlp()
    deferred, _ = poseidon.distribute(inner, torch.optim.SGD(inner.parameters(), 0.1))
    with pytest.raises(UnsupportedError, match="with poseidon"):
        deferred.register_comm_hook(None, noop_hook)


def _no_future(state: Any, bucket: Any) -> Any:
    return 1


def _wrong_bucket(state: Any, bucket: int) -> torch.futures.Future[Tensor]:
    raise NotImplementedError


def _wrong_result(state: Any, bucket: dist.GradBucket) -> int:
    raise NotImplementedError


# Other things that code touches.


def ignored_tensors_are_not_compared() -> None:
    model = Mlp()
    model.own = nn.Parameter(torch.ones(dist.get_rank() + 1))
    model.register_buffer("seen", torch.zeros(2 + dist.get_rank()))
    poseidon.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["own", "seen"])
    wrapped = wrap(model)
    plain_step(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1), 0)
    wrapped.verify_replicas()
    assert list(wrapped._get_data_parallel_params(wrapped.module)) == wrapped._module_parameters


def what_torchs_class_has() -> None:
    model = wrap(Normed(), batched_grad_copy=True, skip_all_reduce_unused_params=True)
    theirs = wrap_torch(Normed())
    assert isinstance(model, type(theirs))
    for name in ("device_type", "is_multi_device_module", "parameters_to_ignore", "_distributed_rank"):
        assert getattr(model, name) == getattr(theirs, name), name
    assert model.process_group is theirs.process_group
    assert list(model.named_module_buffers) == list(theirs.named_module_buffers)
    assert model.will_sync_module_buffers() == theirs.will_sync_module_buffers()
    model._set_static_graph()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model._set_static_graph()
    assert "no need to set it again" in str(caught[0].message)
    group = dist.new_group()
    other = wrap(Mlp(), process_group=group)
    assert other.process_group is group
    with pytest.raises(UnsupportedError, match="default process group"):
        copy.deepcopy(other)


def names_in_distributed_checkpoints() -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, plain = wrap(Normed()), Normed()
    optimizer, its = (torch.optim.Adam(one.parameters()) for one in (model, plain))
    plain_step(model, optimizer, 0)
    weights, state = get_state_dict(model, optimizer)
    assert set(weights) == set(plain.state_dict())
    assert set(state["state"]) == {name for name, _ in plain.named_parameters()}
    set_state_dict(plain, its, model_state_dict=weights, optim_state_dict=state)
    assert all(torch.equal(plain.state_dict()[name], value) for name, value in model.module.state_dict().items())
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    plain_step(model, optimizer, 1)
    model.verify_replicas()


def optimizers_in_backward() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = Mlp()
    twin = wrap(copy.deepcopy(model))
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for number in range(3):
        x, y = batch(number)
        F.cross_entropy(wrapped(x), y).backward()
        plain_step(twin, optimizer, number)
        for mine, other in zip(wrapped.parameters(), twin.parameters(), strict=True):
            assert mine.grad is None
            assert torch.equal(mine, other)


def distributed_autograd_is_refused() -> None:
    import torch.distributed.autograd as dist_autograd
    from torch.distributed import rpc

    model = wrap(Mlp())
    os.environ.update(TP_SOCKET_IFNAME="lo")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{_free_port()}")
    rpc.init_rpc(f"worker{dist.get_rank()}", rank=0, world_size=1, rpc_backend_options=options)
    x, _ = batch(0)
    model(x).sum().backward()
    with dist_autograd.context(), pytest.raises(UnsupportedError, match="would not be averaged"):
        model(x)
    rpc.shutdown()


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# Replicas.


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        plain_step(model, optimizer, number)


def _make(is_deferred: bool, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    inner = Mlp()
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9)
    if not is_deferred:
        return wrap(inner, **options), optimizer
    return poseidon.distribute(inner, optimizer, **options)


def divergence_is_found(is_deferred: bool) -> None:
    model, optimizer = _make(is_deferred)
    _train(model, optimizer, range(12))
    with torch.no_grad():
        if dist.get_rank() == 1:
            model.module.second.bias.data[3] += 1e-3  # no version counter sees this
    with pytest.raises(MismatchError, match=r"second\.bias.* on rank 1 .* is not what rank 0") as caught:
        # A sixteenth of the model every 8 steps, and the message two steps later.
        _train(model, optimizer, range(12, 12 + 16 * 8 + 3))
    assert "optimizer" in str(caught.value)


def another_checkpoint_is_found_at_once(is_deferred: bool) -> None:
    model, optimizer = _make(is_deferred)
    _train(model, optimizer, range(3))
    state = {name: value + dist.get_rank() for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    with pytest.raises(MismatchError, match=r"first\.weight, .* on rank 1 .* is not what rank 0"):
        _train(model, optimizer, range(3, 8))
    model, optimizer = _make(is_deferred)
    _train(model, optimizer, range(3))
    if dist.get_rank() == 0:  # not through the wrapper, and on one worker only
        model.module.load_state_dict({name: value * 2 for name, value in model.module.state_dict().items()})
    with pytest.raises(MismatchError, match="replicas differ"):
        _train(model, optimizer, range(3, 17))


def equal_replicas_pass(is_deferred: bool) -> None:
    model, optimizer = _make(is_deferred, find_unused_parameters=True)
    for epoch in range(3):
        _train(model, optimizer, range(20 * epoch, 20 * epoch + 12))
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        if dist.get_rank() == 0:
            evaluation = copy.deepcopy(model.module.state_dict())
            model.module.load_state_dict(evaluation)
        with model.no_sync():
            x, y = batch(epoch)
            F.cross_entropy(model(x), y).backward()
    model.verify_replicas()


def the_check_can_be_switched_off() -> None:
    os.environ["POSEIDON_CHECK_REPLICAS"] = "0"
    model, optimizer = _make(False)
    if dist.get_rank() == 1:
        model.module.second.bias.data[3] += 1e-3
    _train(model, optimizer, range(20))
    with pytest.raises(MismatchError, match="second"):
        model.verify_replicas()


ALONE = [
    layers_used_only_without_an_exchange,
    outputs_without_a_part_in_the_loss,
    outputs_with_a_backward_each,
    a_backward_that_is_prepared,
    a_wrapper_that_is_gone,
    forwards_that_use_different_parts,
    two_forwards_of_a_normalized_model,
    a_checkpointed_wrapper,
    a_static_graph_that_changes,
    gradients_after_join,
    gradients_kept_through_join,
    buffers_after_rank_0_has_finished,
    torchs_hooks,
    hooks_with_sparse_gradients,
    hooks_see_all_buckets_in_one_order,
    hooks_that_are_refused,
    ignored_tensors_are_not_compared,
    what_torchs_class_has,
    names_in_distributed_checkpoints,
    optimizers_in_backward,
    distributed_autograd_is_refused,
    the_check_can_be_switched_off,
]
BOTH_WAYS = [divergence_is_found, another_checkpoint_is_found_at_once, equal_replicas_pass]


def _strictly(function: Any, *args: Any) -> None:
    quiet()
    warnings.filterwarnings("ignore", message=".*nn.Module.*checkpoint|.*torch.distributed.optim.*|.*jit.*")
    torch.set_default_dtype(torch.float64)  # the order of additions is no difference then
    function(*args)


def _on_gpu(function: Any, *args: Any) -> None:
    torch.set_default_device("cuda:0")
    _strictly(function, *args)


@pytest.mark.parametrize("behaviour", ALONE, ids=lambda function: function.__name__)
def test_drop_in(behaviour: Any) -> None:
    run_ranks(_strictly, 2, behaviour)


@pytest.mark.parametrize("is_deferred", [False, True], ids=["wrapper", "distribute"])
@pytest.mark.parametrize("behaviour", BOTH_WAYS, ids=lambda function: function.__name__)
def test_replicas(behaviour: Any, is_deferred: bool) -> None:
    run_ranks(_strictly, 2, behaviour, is_deferred)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("is_deferred", [False, True], ids=["wrapper", "distribute"])
@pytest.mark.parametrize("behaviour", BOTH_WAYS, ids=lambda function: function.__name__)
def test_replicas_on_a_gpu(behaviour: Any, is_deferred: bool) -> None:
    run_ranks(_on_gpu, 2, behaviour, is_deferred)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_hooks_on_a_gpu() -> None:
    run_ranks(_on_gpu, 2, torchs_hooks)
