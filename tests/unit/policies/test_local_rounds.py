"""Rounds of local steps without processes: workers are threads, and means are taken in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from in_memory import Meeting, run_threads
from local_twin import Form, mean, simulate
from poseidon.engine.outer import Fragment, check_outer, make_outer
from poseidon.engine.rounds import LocalRounds
from poseidon.errors import ConfigError, MismatchError
from poseidon.planning.local import LocalSchedule

WORKERS = 3


class MeetingAverage:
    """Averages over threads, as the parameter server does over processes."""

    checks = True

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.size = meeting.size
        self._rank = rank
        self._meeting = meeting

    def start(self, number: int, fragment: int, flats: Sequence[Tensor]) -> Callable[[], None]:
        for place, flat in enumerate(flats):
            self._meeting.put((number, fragment, place), self._rank, flat.clone())

        def landed() -> None:
            for place, flat in enumerate(flats):
                flat.copy_(mean(self._meeting.take((number, fragment, place))))

        return landed

    def rests(self) -> dict[int, Tensor]:
        return {}

    def differ(self, named: Sequence[tuple[str, Tensor]]) -> None:
        raise MismatchError(f"outer parameters differ: {named[0][0]}")

    def close(self) -> None:
        pass


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 2))
    chance = torch.Generator().manual_seed(3)  # threads share torch's own
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.4, 0.4, generator=chance)
    return model


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    batch = torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(batch).square().mean()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def _parts(model: nn.Module, cuts: Sequence[Sequence[str]]) -> list[dict[str, nn.Parameter]]:
    return [{n: p for n, p in model.named_parameters() if n.startswith(tuple(cut))} for cut in cuts]


def _rounds(
    rank: int,
    meeting: Meeting,
    schedule: LocalSchedule,
    outer: Any,
    kept: float,
    cuts: Sequence[Sequence[str]] = (("",),),
) -> tuple[nn.Module, torch.optim.Optimizer, LocalRounds]:
    model = _model()
    rounds = LocalRounds(_parts(model, cuts), {}, schedule, outer, kept)
    rounds.average_by(MeetingAverage(rank, meeting))
    return model, _sgd(model), rounds


def _take_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, rounds: LocalRounds, rank: int, steps: range
) -> dict[str, Tensor]:
    for step in steps:
        optimizer.zero_grad()
        _loss(model, rank, step).backward()
        optimizer.step()
        rounds.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


STREAMED = (("0.",), ("2.",), ("4.",))


@pytest.mark.parametrize(
    ("schedule", "outer", "form", "cuts"),
    [
        (LocalSchedule(3), None, Form(3), (("",),)),
        (LocalSchedule(2), "nesterov", Form(2, 0.7, 0.9), (("",),)),
        (
            LocalSchedule(6, fragments=3, overlap=2),
            "nesterov",
            Form(6, 0.7, 0.9, [(2, STREAMED[0]), (4, STREAMED[1]), (6, STREAMED[2])], 2, 0.5),
            STREAMED,
        ),
        (
            LocalSchedule(3, fragments=3, overlap=3),
            lambda params: torch.optim.SGD(params, lr=0.5),
            Form(3, 0.5, 0.0, [(1, STREAMED[0]), (2, STREAMED[1]), (3, STREAMED[2])], 3, 0.5),
            STREAMED,
        ),
        (
            LocalSchedule(4, fragments=2),
            None,
            Form(4, fragments=[(2, STREAMED[0]), (4, (*STREAMED[1], *STREAMED[2]))]),
            (STREAMED[0], (*STREAMED[1], *STREAMED[2])),
        ),
    ],
    ids=["average", "nesterov", "streaming", "streaming, always under way", "fragments that are waited for"],
)
def test_rounds_do_what_a_single_process_computes(
    schedule: LocalSchedule, outer: Any, form: Form, cuts: Sequence[Sequence[str]]
) -> None:
    meeting = Meeting(WORKERS)

    def work(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model, optimizer, rounds = _rounds(rank, meeting, schedule, outer, 0.5, cuts)
        own = _take_steps(model, optimizer, rounds, rank, range(1, 15))
        return own, {name: value.clone() for name, value in rounds.agreed().items()}

    found = run_threads(work, WORKERS)
    expected, shared = simulate(_model(), _sgd, _loss, form, WORKERS, 14)
    for rank, (own, agreed) in enumerate(found):
        for name in own:
            assert torch.equal(own[name], expected[rank][name]), f"{name} of worker {rank}"
            assert torch.equal(agreed[name], shared[name]), f"the shared {name} at worker {rank}"


def test_one_worker_with_an_outer_optimizer_looks_ahead() -> None:
    model = _model()
    rounds = LocalRounds(_parts(model, [("",)]), {}, LocalSchedule(4), "nesterov", 0.5)
    found = _take_steps(model, _sgd(model), rounds, 0, range(1, 9))
    (expected,), _ = simulate(_model(), _sgd, _loss, Form(4, 0.7, 0.9), 1, 8)
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_worker_without_batches_takes_part_until_all_are_done() -> None:
    """It counts by the steps that it took: of 4 in a round, worker 0 has taken all, worker 1 two, worker 2 none."""
    meeting = Meeting(WORKERS)

    def work(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
        model, optimizer, rounds = _rounds(rank, meeting, LocalSchedule(4), None, 0.5)
        before = _take_steps(model, optimizer, rounds, rank, range(1, (9, 7, 5)[rank]))
        rounds.drain()
        after = {name: p.detach().clone() for name, p in model.named_parameters()}
        return before, after, rounds.exchanges

    found = run_threads(work, WORKERS)
    assert {exchanges for _, _, exchanges in found} == {3}, (
        "one each after 4 and 8 steps, and one that finds nobody left"
    )
    first = simulate(_model(), _sgd, _loss, Form(4), WORKERS, 4)[1]
    half = found[1][0]
    for name, start in first.items():
        # Worker 0's own weights after its second round are those of a simulation in which the others stood still.
        assert torch.equal(found[0][1][name], found[1][1][name])
        assert torch.equal(found[0][1][name], found[2][1][name])
        moved = start - found[0][1][name]
        rest = moved * 1.5 - (start - half[name]) * 0.5  # (1 * a + 0.5 * b + 0 * c) / 1.5
        twin = _alone_from(first, 0, range(5, 9))[name]
        assert torch.allclose(start - rest, twin, atol=1e-6)


def _alone_from(start: dict[str, Tensor], rank: int, steps: range) -> dict[str, Tensor]:
    """Return where worker ``rank`` gets by itself; its momentum is that of the first round."""
    model = _model()
    optimizer = _sgd(model)
    for step in range(1, steps.start):
        optimizer.zero_grad()
        _loss(model, rank, step).backward()
        optimizer.step()
    model.load_state_dict(start)
    for step in steps:
        optimizer.zero_grad()
        _loss(model, rank, step).backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("overlap", [0, 1, 3])
@pytest.mark.parametrize("steps", [(0, 0, 0), (1, 4, 7), (6, 6, 6), (5, 6, 7)])
def test_all_hold_the_same_after_uneven_ends(overlap: int, steps: tuple[int, ...]) -> None:
    meeting = Meeting(WORKERS)
    cuts = (("0.", "2."), ("4.",))

    def work(rank: int) -> dict[str, Tensor]:
        schedule = LocalSchedule(3, fragments=2, overlap=overlap)
        model, optimizer, rounds = _rounds(rank, meeting, schedule, "nesterov", 0.5, cuts)
        _take_steps(model, optimizer, rounds, rank, range(1, 1 + steps[rank]))
        rounds.drain()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    first, *others = run_threads(work, WORKERS)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    is_moved = any(not torch.equal(first[name], p) for name, p in _model().named_parameters())
    assert is_moved == (max(steps) > 0), "where nobody has trained, no outer step is taken"


def test_synchronize_exchanges_the_rest_of_a_round_once() -> None:
    meeting = Meeting(WORKERS)

    def work(rank: int) -> tuple[dict[str, Tensor], int]:
        model, optimizer, rounds = _rounds(rank, meeting, LocalSchedule(4), "nesterov", 0.5)
        _take_steps(model, optimizer, rounds, rank, range(1, 7))
        rounds.synchronize()
        rounds.synchronize()  # nothing is left: momentum must not carry the parameters on
        return {name: p.detach().clone() for name, p in model.named_parameters()}, rounds.exchanges

    found = run_threads(work, WORKERS)
    assert [exchanges for _, exchanges in found] == [2, 2, 2]
    assert all(torch.equal(found[0][0][name], one[name]) for one, _ in found for name in one)


CUT_IN_TWO = (("0.",), ("2.", "4."))


@pytest.fixture(scope="module", params=[0, 2], ids=lambda overlap: f"overlap {overlap}")
def undisturbed(request: pytest.FixtureRequest) -> tuple[LocalSchedule, list[dict[str, Tensor]]]:
    """A schedule, and where 12 steps by it without a stop lead each worker."""
    schedule, meeting = LocalSchedule(4, fragments=2, overlap=request.param), Meeting(WORKERS)

    def work(rank: int) -> dict[str, Tensor]:
        return _take_steps(*_rounds(rank, meeting, schedule, "nesterov", 0.5, CUT_IN_TWO), rank, range(1, 13))

    return schedule, run_threads(work, WORKERS)


@pytest.mark.parametrize("stop", [3, 4, 5, 8])
def test_a_state_taken_at_any_step_goes_on_with_the_same_bits(
    undisturbed: tuple[LocalSchedule, list[dict[str, Tensor]]], stop: int
) -> None:
    schedule, expected = undisturbed
    meeting = Meeting(WORKERS)

    def work(rank: int) -> dict[str, Tensor]:
        model, optimizer, rounds = _rounds(rank, meeting, schedule, "nesterov", 0.5, CUT_IN_TWO)
        _take_steps(model, optimizer, rounds, rank, range(1, 1 + stop))
        agreed = {name: value.clone() for name, value in rounds.agreed().items()}
        shared, own, inner = rounds.shared_state(), rounds.own_state(), optimizer.state_dict()
        other, resumed, again = _rounds(rank, meeting, schedule, "nesterov", 0.5, CUT_IN_TWO)
        other.load_state_dict(agreed)
        again.load_shared_state(shared)
        again.load_own_state(own)
        resumed.load_state_dict(inner)
        return _take_steps(other, resumed, again, rank, range(1 + stop, 13))

    found = run_threads(work, WORKERS)
    for rank in range(WORKERS):
        assert all(torch.equal(found[rank][name], expected[rank][name]) for name in found[rank]), f"worker {rank}"


def test_weights_of_before_an_exchange_are_not_gone_on_with() -> None:
    """In an elastic job a worker may have missed the exchange that others completed."""
    model = _model()
    rounds = LocalRounds(_parts(model, [("",)]), {}, LocalSchedule(2), "nesterov", 0.5)
    _take_steps(model, _sgd(model), rounds, 0, range(1, 2))
    old = {
        **rounds.own_state(),
        "values": {name: value.clone() for name, value in rounds.own_state()["values"].items()},
    }
    rounds.step()
    agreed = {name: value.clone() for name, value in rounds.agreed().items()}
    rounds.load_own_state(old)
    assert all(torch.equal(p, agreed[name]) for name, p in model.named_parameters())


def test_outer_state_is_kept_by_name_when_the_model_is_cut_anew() -> None:
    model = _model()
    rounds = LocalRounds(_parts(model, [("4.",), ("0.", "2.")]), {}, LocalSchedule(2, fragments=2), "nesterov", 0.5)
    _take_steps(model, _sgd(model), rounds, 0, range(1, 5))
    state = rounds.shared_state()
    momenta = {
        name: state["outer"]["state"][place]["momentum_buffer"].clone() for place, name in enumerate(state["names"])
    }
    again = LocalRounds(_parts(model, [("",)]), {}, LocalSchedule(3), "nesterov", 0.5)
    again.load_shared_state(state)
    now = again.shared_state()
    for place, name in enumerate(now["names"]):
        assert torch.equal(now["outer"]["state"][place]["momentum_buffer"], momenta[name])
    with pytest.raises(ConfigError, match=r"not this model's: 0\.bias"):
        LocalRounds(_parts(model, [("2.",)]), {}, LocalSchedule(3), "nesterov", 0.5).load_shared_state(state)


def test_workers_whose_shared_parameters_differ_are_found_out() -> None:
    meeting = Meeting(2)

    def work(rank: int) -> str:
        model, optimizer, rounds = _rounds(rank, meeting, LocalSchedule(2), None, 0.5)
        if rank:
            with torch.no_grad():
                rounds.fragments[0].outer[0][0, 0] += 1e-6
        with pytest.raises(MismatchError) as found:
            _take_steps(model, optimizer, rounds, rank, range(1, 3))
        return str(found.value)

    assert run_threads(work, 2) == ["outer parameters differ: 0.weight"] * 2


def test_half_precision_is_shared_in_float32() -> None:
    half = nn.Linear(4, 4).to(torch.bfloat16)
    fragment = Fragment("all", dict(half.named_parameters()), {})
    outer = make_outer(lambda params: torch.optim.SGD(params, lr=0.5), fragment.outer)
    with torch.no_grad():
        half.weight += 1.0
    start = fragment.agreed()["weight"].clone()
    moved = half.weight.detach().float() - start
    fragment.collect(1.0, True, True)
    fragment.absorb(outer)
    assert torch.equal(fragment.agreed()["weight"], start + 0.5 * moved)
    fragment.mix(0.0)
    assert torch.equal(half.weight, (start + 0.5 * moved).to(torch.bfloat16))


def test_buffers_that_do_not_change_stay_as_they_are() -> None:
    """Masks may be infinite, and the mean of three equal numbers need not be that number."""
    model = nn.Linear(2, 2)
    mask = torch.tensor([0.1, float("-inf"), 0.7])
    fragment = Fragment("all", dict(model.named_parameters()), {"mask": lambda: mask})
    fragment.collect(1.0, True, False)
    fragment.absorb(make_outer(None, fragment.outer))
    fragment.mix(0.0)
    assert mask.tolist() == torch.tensor([0.1, float("-inf"), 0.7]).tolist()


def test_the_memory_of_steps_taken_by_time_is_weighted_by_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker with three times the samples counts three times as much, whatever its steps."""
    meeting = Meeting(2)
    clock = threading.local()
    monkeypatch.setattr("poseidon.engine.rounds.time.monotonic", lambda: getattr(clock, "now", 0.0))

    def work(rank: int) -> tuple[list[float], list[float]]:
        model = nn.Linear(1, 1, bias=False)
        model.weight.data.fill_(1.0)
        rounds = LocalRounds([dict(model.named_parameters())], {}, LocalSchedule(0, 10.0), None, 0.5)
        rounds.average_by(MeetingAverage(rank, meeting))
        seen = []
        for step in range(2 if rank else 3):
            clock.now = 4.0 * (step + 1) if not rank else 8.0 * (step + 1)
            with torch.no_grad():
                model.weight += 1.0 if rank else -1.0
            rounds.step(samples=9 if rank else 2)
            seen.append(model.weight.item())
        return seen, [rounds.exchanges]

    first, second = run_threads(work, 2)
    together = 1.0 + (3 * 2 * -3.0 + 2 * 9 * 2.0) / (6 + 18)
    assert first == ([0.0, -1.0, pytest.approx(together)], [1])
    assert second == ([2.0, pytest.approx(together)], [1])


def test_what_steps_the_outer_parameters_is_checked() -> None:
    with pytest.raises(ConfigError, match="unknown outer 'adam'; known: average, nesterov"):
        check_outer("adam")
    with pytest.raises(ConfigError, match="a function that makes an optimizer"):
        check_outer(0.7)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="outer made a list"):
        make_outer(lambda params: params, [nn.Parameter(torch.zeros(1))])  # type: ignore[arg-type, return-value]
