"""Local steps: workers train by themselves and exchange parameters every few steps."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import poseidon
from local_twin import Form, simulate
from poseidon.errors import ConfigError, MismatchError, UnsupportedError, WorkerLostError
from ranks import run_ranks

STEPS = 11


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * rank + step))
    return model(batch.to(next(model.parameters()).device)).square().mean()


def _state(model: Any) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.module.state_dict().items()}


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for step in range(count):
        optimizer.zero_grad()
        _loss(model, dist.get_rank(), step).backward()
        optimizer.step()


def _same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def _own_outer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5, momentum=0.8, nesterov=True)


STREAM = [(2, ("0.", "1.")), (4, ("3.", "5."))]
FORMS: list[tuple[dict[str, Any], Form, Any]] = [
    ({"sync_every": 3}, Form(3), _sgd),
    ({"sync_every": 2, "outer": "nesterov"}, Form(2, 0.7, 0.9), _adamw),
    ({"sync_every": 4, "outer": _own_outer, "warmup_steps": 2}, Form(4, 0.5, 0.8, warmup=2), _sgd),
    (
        {"sync_every": 4, "outer": "nesterov", "fragments": 2, "overlap": 1, "mix": 0.25},
        Form(4, 0.7, 0.9, STREAM, 1, 0.25),
        _sgd,
    ),
]


def _train_forms() -> list[tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]]:
    """Train each form; return this worker's parameters, the shared ones, and everything after the last exchange."""
    found = []
    for options, _, make_optimizer in FORMS:
        model = _model()
        if "fragments" in options:
            model[1] = nn.Identity()  # statistics are exchanged with the last fragment, which the twin does not follow
        wrapped, optimizer = poseidon.distribute(
            model,
            make_optimizer(model),
            consistency="local",
            routes={"*": "allreduce"} if "warmup_steps" in options else None,
            **options,
        )
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            _loss(wrapped, dist.get_rank(), step).backward()
            optimizer.step()
        wrapped.verify_replicas()
        own = {name: p.detach().clone() for name, p in model.named_parameters()}
        shared = {name: value.clone() for name, value in wrapped.shared_state_dict().items() if name in own}
        wrapped.synchronize()
        found.append((own, shared, _state(wrapped)))
        wrapped.close()
        assert type(optimizer) in (torch.optim.SGD, torch.optim.AdamW), "the optimizer has its own class again"
    return found


def _count_observed() -> list[bool]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3))
    wrapped, optimizer = poseidon.distribute(model, _sgd(model), consistency="local", sync_every=2)
    observed = []
    for step in range(5):
        optimizer.zero_grad()
        wrapped(torch.tensor([[step, 1]])).sum().backward()
        optimizer.step()
        observed.append(wrapped._engine.is_observing)  # type: ignore[union-attr]
    wrapped.close()
    return observed


def test_nothing_is_observed_in_steps_that_exchange_no_gradients() -> None:
    """To count the rows of a table makes a GPU wait in every forward."""
    for observed in run_ranks(_count_observed, 2):
        assert not any(observed)


def test_every_form_is_what_one_process_computes_for_all_workers() -> None:
    """Bit by bit: sums are taken in rank order on both sides."""
    workers = run_ranks(_train_forms, 3)
    for number, (options, form, make_optimizer) in enumerate(FORMS):
        model = _model()
        if form.fragments:
            model[1] = nn.Identity()
        expected, shared = simulate(model, make_optimizer, _loss, form, 3, STEPS)
        for rank, results in enumerate(workers):
            own, agreed, end = results[number]
            for name in own:
                assert torch.equal(own[name], expected[rank][name]), f"{options}: {name} of worker {rank}"
                assert torch.equal(agreed[name], shared[name]), f"{options}: the shared {name} at worker {rank}"
            floating = {name: value for name, value in end.items() if value.is_floating_point()}
            assert all(torch.equal(value, workers[0][number][2][name]) for name, value in floating.items())
        assert not _same(workers[0][number][0], workers[1][number][0]), "between exchanges workers differ"


def _train_exactly(**options: Any) -> dict[str, Tensor]:
    model = _model()
    model[1] = nn.Identity()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, optimizer = poseidon.distribute(model, optimizer, **options)
    _steps(wrapped, optimizer, 20)
    wrapped.finish_step()
    return _state(wrapped)


def _both() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return _train_exactly(), _train_exactly(consistency="local", sync_every=1)


def test_exchanging_after_every_step_of_sgd_is_exact_training() -> None:
    """Up to rounding: each step rounds the worker's own weights once more, to half a unit in the last place of each."""
    for exact, local in run_ranks(_both, 2):
        for name in exact:
            largest = exact[name].abs().max().item()
            # Of 20 steps, with a factor of 4 for errors that gradients carry on.
            assert (exact[name] - local[name]).abs().max().item() <= 4 * 20 * largest * 2**-24, name


def _on_machines(steps: int, options: dict[str, Any]) -> dict[str, Tensor]:
    model = _model()
    wrapped, optimizer = poseidon.distribute(model, _sgd(model), consistency="local", **options)
    _steps(wrapped, optimizer, steps)
    return {name: value for name, value in _state(wrapped).items() if value.is_floating_point()}


@pytest.mark.parametrize(
    ("machines", "extra"),
    [("aabb", {}), ("abc", {}), ("ab", {"POSEIDON_WIRE_ENCRYPT": "1"})],
    ids=["two of two workers", "three", "encrypted"],
)
def test_machines_hold_the_same_after_an_exchange(machines: str, extra: dict[str, str]) -> None:
    env = [{"POSEIDON_MACHINE": name, **extra} for name in machines]
    found = run_ranks(_on_machines, len(machines), 6, {"sync_every": 3, "outer": "nesterov"}, env=env)
    assert all(_same(found[0], one) for one in found)


def _train_unevenly(options: dict[str, Any]) -> dict[str, Tensor]:
    model = _model()
    wrapped, optimizer = poseidon.distribute(model, _sgd(model), consistency="local", **options)
    with wrapped.join():
        _steps(wrapped, optimizer, (7, 2, 4)[dist.get_rank()])
    return {name: value for name, value in _state(wrapped).items() if value.is_floating_point()}


@pytest.mark.parametrize(
    "options",
    [
        {"sync_every": 3},
        {"sync_every": 4, "outer": "nesterov", "fragments": 2},
        {"sync_every": "0.02s"},
    ],
    ids=["steps", "fragments", "time"],
)
def test_workers_without_batches_take_part_under_join(options: dict[str, Any]) -> None:
    found = run_ranks(_train_unevenly, 3, options)
    assert _same(found[0], found[1])
    assert _same(found[0], found[2])


def _compressed() -> list[tuple[dict[str, Tensor], int]]:
    found = []
    for compress in (None, "bf16", "int8", "int4"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 200), nn.Tanh(), nn.Linear(200, 100), nn.Tanh(), nn.Linear(100, 1))
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        options: dict[str, Any] = {"sync_every": 2, "outer": "nesterov", "compress": compress}
        wrapped, optimizer = poseidon.distribute(model, _sgd(model), consistency="local", **options)
        assert wrapped.plan is not None
        assert ("lossy" in str(wrapped.plan)) == (compress is not None)
        _steps(wrapped, optimizer, 8)
        found.append((_state(wrapped), wrapped.plan.exchanged_bytes))
        wrapped.close()
    return found


def test_compressed_changes_leave_all_workers_the_same_and_near_the_exact_ones() -> None:
    """Feedback keeps what is lost within the rounding of one exchange: 8 bits of a bf16 or an int8, 4 of an int4."""
    first, second, third = run_ranks(_compressed, 3)
    (exact, whole), *lossy = first
    for place, (state, sent) in enumerate(lossy):
        assert _same(state, second[1 + place][0])
        assert _same(state, third[1 + place][0])
        assert sent <= whole * (0.5, 0.26, 0.14)[place]
        far = max((state[name] - exact[name]).abs().max().item() for name in state)
        assert 0 < far < (0.01, 0.01, 0.1)[place], far


# Precisions, and what else optimizers do.


def _scaled_steps() -> tuple[list[float], dict[str, Tensor], int]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, optimizer = poseidon.distribute(model, optimizer, consistency="local", sync_every=4, max_grad_norm=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    counted = []
    for step in range(4):
        optimizer.zero_grad()
        loss = _loss(wrapped, dist.get_rank(), step)
        if dist.get_rank() == 1 and step == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        before = model[0].weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        counted.append(float((model[0].weight - before).abs().max()))
    return (
        counted,
        {name: value for name, value in _state(wrapped).items() if "running" not in name},
        wrapped._engine.step,
    )


def test_a_step_that_a_scaler_skips_counts_as_one() -> None:
    first, second = run_ranks(_scaled_steps, 2)
    assert second[0][1] == 0.0, "the step with infinite gradients was taken"
    assert all(change > 0 for change in [*first[0], *second[0][:1], *second[0][2:]])
    assert _same(first[1], second[1])
    assert all(torch.isfinite(value).all() for value in first[1].values())
    assert first[2] == second[2] == 4


class _Mixed(nn.Module):
    """Embedding with sparse gradients, a frozen layer, one that is never used, double and half precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(20, 6, sparse=True)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.narrow = nn.Linear(6, 6).to(torch.bfloat16)
        self.wide = nn.Linear(6, 2).double()
        self.unused = nn.Linear(3, 3)
        self.register_buffer("mask", torch.tensor([0.1, float("-inf")]))

    def forward(self, words: Tensor) -> Tensor:
        out = self.frozen(self.table(words)).to(torch.bfloat16)
        return self.wide(self.narrow(out).double())


def _mixed() -> dict[str, Tensor]:
    model = _Mixed()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    wrapped, optimizer = poseidon.distribute(model, optimizer, consistency="local", sync_every=2, outer="nesterov")
    assert wrapped.plan is not None
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(2):  # accumulated: steps count, not backwards
            wrapped(torch.randint(20, (5,), generator=generator)).square().sum().backward()
        optimizer.step()
    after = _state(wrapped)
    for name in ("frozen.weight", "unused.weight"):
        assert torch.equal(after[name], before[name])
    for name in ("table.weight", "narrow.weight", "wide.weight"):
        assert not torch.equal(after[name], before[name])
    assert after["narrow.weight"].dtype == torch.bfloat16
    assert after["mask"].tolist() == torch.tensor([0.1, float("-inf")]).tolist()
    return after


def test_sparse_frozen_unused_half_and_double_parameters() -> None:
    first, second = run_ranks(_mixed, 2)
    assert _same(first, second)


# What goes wrong.


def _tampered() -> str:
    model = _model()
    wrapped, optimizer = poseidon.distribute(model, _sgd(model), consistency="local", sync_every=2)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[0].weight += 1.0
        wrapped.load_state_dict(wrapped.state_dict())  # on one worker only
    with pytest.raises(MismatchError) as found:
        _steps(wrapped, optimizer, 2)
    with pytest.raises(UnsupportedError, match="restart from a checkpoint"):
        optimizer.step()
    return str(found.value)


def test_parameters_loaded_on_one_worker_only_are_found_at_the_next_exchange() -> None:
    for text in run_ranks(_tampered, 2):
        assert text.startswith("replicas differ: 0.weight on rank 1")


def _loaded() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = _model()
    state = {name: value + 1 for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    wrapped, optimizer = poseidon.distribute(model, optimizer, consistency="local", sync_every=3, outer="nesterov")
    for step in range(5):
        if step == 2:
            model.load_state_dict(state)  # on all workers, past the wrapper
        optimizer.zero_grad()
        _loss(wrapped, dist.get_rank(), step).backward()
        optimizer.step()
    return _state(wrapped), state


def test_a_round_begins_from_parameters_that_were_loaded() -> None:
    (first, state), (second, _) = run_ranks(_loaded, 2)
    assert all(torch.equal(first[name], second[name]) for name in first if first[name].is_floating_point())
    assert (first["5.bias"] - state["5.bias"]).abs().max() < 0.01, "the outer step did not see the load as progress"


def _leaves_early() -> str:
    model = _model()
    wrapped, optimizer = poseidon.distribute(model, _sgd(model), consistency="local", sync_every=3, timeout_s=10)
    try:
        _steps(wrapped, optimizer, 2 + dist.get_rank())
    except WorkerLostError as error:
        return str(error)
    wrapped.close()
    return ""


def test_a_worker_that_ends_without_join_is_named() -> None:
    left, waited = run_ranks(_leaves_early, 2)
    assert not left
    assert "the outer parameters" in waited
    assert "rank 0" in waited


def _refusals() -> list[str]:
    said = []
    cases: list[dict[str, Any]] = [
        {"consistency": "local"},
        {"consistency": "local", "sync_every": 0},
        {"consistency": "local", "sync_every": 4, "outer": "adam"},
        {"consistency": "local", "sync_every": 4, "mix": 1.5},
        {"consistency": "local", "sync_every": 4, "mix": None},
        {"consistency": "local", "sync_every": 4, "warmup_steps": -1},
        {"consistency": "local", "sync_every": 4, "warmup_steps": 1.5},
        {"consistency": "local", "sync_every": 4, "fragments": None},
        {"consistency": "local", "sync_every": 4, "overlap": 1.5},
        {"consistency": "local", "sync_every": 4, "fragments": 9},
        {"consistency": "local", "sync_every": 9, "fragments": 5},
        {"consistency": "local", "sync_every": 4, "compress": "int3"},
        {"consistency": "local", "sync_every": 4, "lossy": "int8"},
        {"consistency": "local", "sync_every": 4, "managed": True},
        {"consistency": "local", "sync_every": 4, "update": "server"},
        {"consistency": "local", "sync_every": 4, "staleness": 2},
        {"consistency": "local", "sync_every": 4, "routes": {"*": "allreduce"}},
        {"consistency": "bsp", "sync_every": 4},
        {"consistency": "ssp", "outer": "nesterov"},
    ]
    for options in cases:
        model = _model()
        with pytest.raises((ConfigError, UnsupportedError)) as found:
            poseidon.distribute(model, _sgd(model), **options)
        said.append(str(found.value))
    with pytest.raises(UnsupportedError, match=r"poseidon\.distribute") as found:
        poseidon.DistributedDataParallel(_model(), consistency="local", sync_every=4)
    said.append(str(found.value))
    model = _model()
    wrapped, _ = poseidon.distribute(model, _sgd(model), consistency="local", sync_every=4)
    with pytest.raises(UnsupportedError, match="register_comm_hook"):
        wrapped.register_comm_hook(None, lambda _, bucket: bucket)
    return said


def test_what_cannot_be_combined_is_refused() -> None:
    said = run_ranks(_refusals, 2)[0]
    expected = [
        "needs sync_every",
        "sync_every is 0",
        "unknown outer 'adam'; known: average, nesterov",
        "mix is 1.5",
        "mix is None",
        "warmup_steps is -1",
        "warmup_steps is 1.5; expected a whole number",
        "fragments=None: expected a whole number",
        "overlap=1.5: expected a whole number",
        "fragments=9: expected 1 to sync_every=4",
        "fragments=5: the model has 4 layers",
        "unknown compress 'int3'",
        "lossy='int8' with consistency='local'",
        "managed=True",
        'update="server" takes exact steps',
        "staleness=2",
        "gradients travel only during warmup_steps",
        "sync_every=4 with consistency='bsp'",
        "outer='nesterov' with consistency='ssp'",
        "consistency='local' needs the optimizer",
    ]
    assert len(said) == len(expected)
    for text, part in zip(said, expected, strict=True):
        assert part in text


def _by_another_optimizer(options: dict[str, Any]) -> None:
    model = _model()
    wrapped, optimizer = poseidon.distribute(model, _sgd(model), **options)
    other = _adamw(model)
    _loss(wrapped, 0, 0).backward()
    with pytest.raises(UnsupportedError, match=r"AdamW\.step\(\) for parameters whose steps the distributed SGD takes"):
        other.step()
    optimizer.step()
    wrapped.close()
    other.step()  # nothing is shared any more


@pytest.mark.parametrize(
    "options", [{"consistency": "local", "sync_every": 4}, {"consistency": "ssp", "staleness": 1}], ids=["local", "ssp"]
)
def test_another_optimizer_for_the_same_parameters_is_refused(options: dict[str, Any]) -> None:
    run_ranks(_by_another_optimizer, 2, options)


def _by_hand() -> list[dict[str, Tensor]]:
    model = _model()
    wrapped, optimizer = poseidon.distribute(model, _sgd(model), consistency="local", sync_every=2, fragments=2)
    _steps(wrapped, optimizer, 4)
    wrapped.synchronize()
    states = [_state(wrapped)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    states.append(_state(wrapped))
    wrapped.synchronize()
    states.append(_state(wrapped))
    _steps(wrapped, optimizer, 1)
    wrapped.synchronize()
    states.append(_state(wrapped))
    wrapped.close()
    return states


def test_what_is_changed_by_hand_between_two_exchanges_counts() -> None:
    one, other = run_ranks(_by_hand, 2)
    before, halved, kept, after = one
    assert _same(halved, kept)
    assert _same(after, other[3])
    weights = [name for name in before if name.endswith("weight")]
    assert all((after[name] - halved[name]).norm() < (after[name] - before[name]).norm() for name in weights)


def test_one_worker_averages_nothing_and_looks_ahead_if_asked() -> None:
    for outer, form in ((None, None), ("nesterov", Form(3, 0.7, 0.9))):
        model = _model()
        wrapped, optimizer = poseidon.distribute(model, _sgd(model), consistency="local", sync_every=3, outer=outer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(1, 8):
                optimizer.zero_grad()
                _loss(wrapped, 0, step).backward()
                optimizer.step()
        assert wrapped.plan is None
        wrapped.synchronize()
        found = {name: p.detach().clone() for name, p in model.named_parameters()}
        wrapped.close()
        if form is None:
            (expected,), _ = simulate(_model(), _sgd, _loss, Form(100), 1, 7)
            assert _same(found, expected)
        else:
            assert not _same(found, simulate(_model(), _sgd, _loss, Form(100), 1, 7)[0][0])


def _compiled() -> dict[str, Tensor]:
    model = _model()
    wrapped, optimizer = poseidon.distribute(model, _sgd(model), consistency="local", sync_every=2)
    compiled = torch.compile(wrapped, backend="eager")
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = _loss(compiled, dist.get_rank(), step)
        loss.backward()
        optimizer.step()
    return {name: value for name, value in _state(wrapped).items() if value.is_floating_point()}


def test_compiled_models_under_autocast() -> None:
    first, second = run_ranks(_compiled, 2)
    assert _same(first, second)


class _Least(nn.Module):
    """Keeps the least input that it has seen, as observers of quantisation do; infinite at first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("least", torch.full((2,), float("inf")))
        self.register_buffer("mask", torch.tensor([float("-inf"), 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        self.least[0] = torch.minimum(self.least[0], x.detach().min())
        scores: Tensor = self.layer(x)
        return scores


def _infinite_buffers() -> list[Tensor]:
    torch.manual_seed(0)
    net = _Least()
    model, optimizer = poseidon.distribute(net, _sgd(net), consistency="local", sync_every=2)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.full((2, 6), 1.0 + dist.get_rank() + step)).sum().backward()
        optimizer.step()
    model.close()
    return [net.least, net.mask]


def test_buffers_that_are_infinite_at_first_become_the_mean_of_what_workers_have() -> None:
    for least, mask in run_ranks(_infinite_buffers, 2):
        assert least.tolist() == [1.5, float("inf")]
        assert mask.tolist() == [float("-inf"), 0.0]


def _load_in_mid_round(how: str, outer: str | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Load in the middle of a round; return the shared parameters of a run with that load, and of one without."""
    found = []
    for loads in (True, False):
        net = _model()
        model, optimizer = poseidon.distribute(net, _sgd(net), consistency="local", sync_every=4, outer=outer)
        for step in range(1, 9):
            if step == 3 and loads and how == "other weights for an evaluation":
                own = {name: value.clone() for name, value in net.state_dict().items()}
                net.load_state_dict({name: torch.ones_like(value) for name, value in own.items()})
                with torch.no_grad():
                    model.eval()
                    model(torch.ones(2, 6))
                    model.train()
                net.load_state_dict(own)
            if step == 3 and how == "one layer":
                with torch.no_grad():
                    if loads:
                        net[5].load_state_dict({"weight": torch.zeros(3, 8), "bias": torch.zeros(3)})
                    else:
                        net[5].weight.zero_(), net[5].bias.zero_()
                        rounds = model._local.rounds
                        agreed = rounds.agreed()
                        agreed["5.weight"].zero_(), agreed["5.bias"].zero_()
            optimizer.zero_grad()
            _loss(model, dist.get_rank(), step).backward()
            optimizer.step()
        model.verify_replicas()
        found.append({name: value.clone() for name, value in model.shared_state_dict().items()})
        model.close()
    return found[0], found[1]


@pytest.mark.parametrize("outer", [None, "nesterov"])
@pytest.mark.parametrize("how", ["other weights for an evaluation", "one layer"])
def test_what_is_loaded_in_mid_round_concerns_itself_alone(how: str, outer: str | None) -> None:
    for with_load, without in run_ranks(_load_in_mid_round, 2, how, outer):
        assert _same(with_load, without)


def _after_warm_up(folder: str) -> tuple[bool, int]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            net = _model()
            model, optimizer = poseidon.distribute(
                net, _sgd(net), consistency="local", sync_every=4, warmup_steps=2, routes={"*": "allreduce"}
            )
            with poseidon.Checkpoint(folder, every=5, model=model, optimizer=optimizer) as checkpoint:
                begun = checkpoint.resume()
                syncs = model.require_forward_param_sync
                for step in range(begun, 5):
                    optimizer.zero_grad()
                    _loss(model, dist.get_rank(), step).backward()
                    optimizer.step()
                    checkpoint.step(step + 1)
            model.close()
    return syncs, begun


def test_a_job_that_resumes_after_its_warm_up_keeps_every_workers_buffers_and_warns_of_nothing(tmp_path: Any) -> None:
    assert run_ranks(_after_warm_up, 2, str(tmp_path)) == [(False, 5)] * 2


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.middle, self.head = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.middle(self.table(rows))))
        return out


def _load_what_worker_0_has(options: dict[str, Any]) -> bool:
    net = _Tied()
    if options["consistency"] == "ssp":
        net.middle = nn.Identity()  # type: ignore[assignment] - no other parameter is loaded
    # Small steps: how large values have become depends on what a worker saw in time, and so does the rounding below.
    model, optimizer = poseidon.distribute(net, torch.optim.SGD(net.parameters(), 0.02), **options)
    loaded: dict[str, Tensor] = {}
    for step in range(6):
        if step == 2:
            loaded = {name: value.clone() for name, value in net.state_dict().items()}
            for value in loaded.values():
                dist.broadcast(value, 0)
            net.load_state_dict(loaded)
            optimizer.param_groups[0]["lr"] = 0.0
        optimizer.zero_grad()
        model(torch.tensor([dist.get_rank(), step])).square().sum().backward()
        optimizer.step()
    if options["consistency"] == "local":
        model.synchronize()
    is_loaded = all((value - loaded[name]).abs().max() < 1e-6 for name, value in net.state_dict().items())
    if options["consistency"] == "ssp":
        is_loaded &= model._relaxed._table.now == 8  # two beside the steps
    model.close()
    return is_loaded


@pytest.mark.parametrize(
    "options",
    [
        {"consistency": "local", "sync_every": 4},
        {"consistency": "local", "sync_every": 4, "fragments": 2},
        {"consistency": "ssp", "staleness": 1},
    ],
    ids=["local", "fragments", "ssp"],
)
def test_tied_weights_that_worker_0_has_already_are_loaded_on_all(options: dict[str, Any]) -> None:
    assert run_ranks(_load_what_worker_0_has, 2, options, timeout_s=30) == [True, True]
