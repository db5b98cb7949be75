"""Whole plans tried while training goes on: workers are threads, two routes go through memory."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from in_memory import Meeting, MemoryRoute, ThreadTeam, run_threads
from poseidon.engine import choosing, schedules
from poseidon.engine.choices import FORMAT, Choices, describe_job
from poseidon.engine.discover import find_units
from poseidon.engine.engine import Engine
from poseidon.engine.hooks import AutogradFrontEnd
from poseidon.engine.options import Options
from poseidon.engine.policy import UpdateNow
from poseidon.engine.schedules import Schedules
from poseidon.engine.update import DeferredUpdates
from poseidon.errors import MismatchError, UnsupportedError
from poseidon.planning.candidates import AT_ONCE
from poseidon.planning.cluster import Cluster, Link
from poseidon.planning.costs import Cost
from poseidon.planning.planner import LAYER_BY_LAYER, Plan
from poseidon.planning.route import Routes
from poseidon.units import Load, Unit
from toy_models import CLUSTER, CONV, FC, LOADS

WORKERS = 2
STEPS = 34
"""More than it takes to try five plans."""
INTO_THE_SECOND_PLAN = 10
_SEEDING = threading.Lock()


@dataclass(frozen=True, eq=False)
class CheaperRoute(MemoryRoute):
    """The same bits by another name, which the planner prefers, but not for a small layer with more than 8 rows."""

    name = "cheaper"

    def cost(self, unit: Unit, load: Load | None, cluster: Cluster) -> Cost:
        is_dear = load is not None and load.rows > 8 and unit.size_bytes < 100
        size_bytes = unit.size_bytes * 2 if is_dear else unit.size_bytes / 2
        return Cost(size_bytes, size_bytes / cluster.between.bytes_per_s, 0.0)


class Turns:
    def __init__(self, policy) -> None:
        self.begin_backward, self.end_backward, self.close = policy.begin_backward, policy.end_backward, policy.close


@dataclass
class Run:
    """What one worker saw."""

    values: list[torch.Tensor]
    plans: list[Plan | None]
    """By step."""
    open_routes: set[str]


@pytest.fixture(autouse=True)
def short_trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(choosing, "FEWEST_LAPS", 2)
    monkeypatch.setattr(choosing, "MOST_LAPS", 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("POSEIDON_TRIALS", "1")


def train(defers: bool = False, steps: int = STEPS, batches: dict[int, int] | None = None, **options) -> list[Run]:
    meeting = Meeting(WORKERS)
    routes = Routes([MemoryRoute(meeting, "one"), CheaperRoute(meeting)])

    def work(rank: int) -> Run:
        with _SEEDING:  # the random state is one for all threads
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        chosen = Options(bucket_bytes=1, defers=defers, **{"tries": True, **options})
        engine = Engine(find_units(model), ThreadTeam(rank, meeting), Cluster(WORKERS), chosen, routes)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        policy = DeferredUpdates(optimizer) if defers else UpdateNow()
        policy.connect(model, engine)
        front_end = AutogradFrontEnd(engine, Turns(policy))
        plans = []
        for step in range(steps):
            x = torch.randn((batches or {}).get(step, 4), 6, generator=torch.Generator().manual_seed(9 * step + rank))
            policy.before_forward(model, True, False)
            engine.arm(True, x.numel())
            out = model(x)
            front_end.watch_outputs([out], [])
            optimizer.zero_grad()
            out.square().mean().backward()
            optimizer.step()
            plans.append(engine.plan)
        policy.finish()
        values = [parameter.detach().clone() for parameter in model.parameters()]
        opened = set(engine._schedules._exchangers)
        front_end.close()
        policy.close()
        return Run(values, plans, opened)

    return run_threads(work, WORKERS)


def names(run: Run) -> list[str]:
    """The plans in the order in which they were used."""
    found: list[str] = []
    for plan in run.plans:
        if plan is not None and plan.name not in found[-1:]:
            found.append(plan.name)
    return found


def same_bits(runs: list[Run]) -> bool:
    return all(torch.equal(one, two) for run in runs[1:] for one, two in zip(runs[0].values, run.values, strict=True))


@pytest.mark.parametrize("defers", [False, True])
def test_plans_are_tried_in_the_same_steps_and_results_stay_the_same(
    defers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = train(defers)
    used = [[None if plan is None else plan.name for plan in run.plans] for run in runs]
    assert len(set(used[0])) > 1
    # Deferred updates settle at the next forward, so the plan as seen between two steps may lag behind.
    assert defers or used[0] == used[1]
    assert names(runs[0]) == names(runs[1])
    last = runs[0].plans[-1]
    assert last is not None
    assert last.tried == runs[1].plans[-1].tried  # type: ignore[union-attr]
    measured = {one.name: one.measured_s for one in last.tried if one.measured_s is not None}
    assert len(measured) > 1
    assert min(measured, key=lambda name: measured[name] or 0) == last.name
    assert set(names(runs[0])) == set(measured) | {LAYER_BY_LAYER}
    assert defers == any(name.endswith(AT_ONCE) for name in measured)
    assert "plans tried" in str(last)
    monkeypatch.setenv("POSEIDON_TRIALS", "0")
    plain = train(defers)
    assert names(plain[0]) == [LAYER_BY_LAYER]
    assert plain[0].plans[-1].tried == ()  # type: ignore[union-attr]
    assert same_bits([*runs, *plain])


def test_routes_of_dropped_plans_are_closed() -> None:
    runs = train()
    last = runs[0].plans[-1]
    assert last is not None
    # Nor is the first route kept for gradients that were accumulated: those travel as in the plan.
    assert runs[0].open_routes == set(last.routes.values())


def test_what_an_earlier_run_chose_is_used_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train()[0].plans[-1]
    assert first is not None
    (stored,) = (tmp_path / "poseidon" / "choices").iterdir()
    for run in train(steps=3):
        again = run.plans[-1]
        assert names(run) == [first.name]
        assert again is not None
        assert again.is_remembered
        assert again.tried == first.tried
        assert "in an earlier run" in str(again)
    assert len(names(train(defers=True, steps=INTO_THE_SECOND_PLAN)[0])) > 1  # another mode is another job
    monkeypatch.setenv("POSEIDON_TRIALS", "fresh")
    assert len(names(train(steps=INTO_THE_SECOND_PLAN)[0])) > 1
    monkeypatch.setenv("POSEIDON_TRIALS", "1")
    stored.write_text("{")
    with pytest.warns(UserWarning, match="plans are tried anew"):
        assert len(names(train()[0])) > 1
    assert FORMAT in stored.read_text()


def test_a_job_is_known_by_what_its_choice_depends_on() -> None:
    units = [CONV, FC]
    key = describe_job(units, LOADS, CLUSTER, {"defers": True})
    faster = Cluster(2, between=Link(1.1e9, 2e-4), flops=9e9)
    assert describe_job(units, LOADS, faster, {"defers": True}) == key  # a measurement never repeats exactly
    others = [
        describe_job([FC], LOADS, CLUSTER, {"defers": True}),
        describe_job(units, {**LOADS, "fc": Load(16)}, CLUSTER, {"defers": True}),
        describe_job(units, LOADS, Cluster(2, between=Link(1e10, 1e-4)), {"defers": True}),
        describe_job(units, LOADS, Cluster(3, between=Link(1e9, 1e-4)), {"defers": True}),
        describe_job(units, LOADS, CLUSTER, {"defers": False}),
    ]
    assert len({key, *others}) == 6


def test_a_folder_that_cannot_be_written_only_warns(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    choices = Choices(blocked / "below")
    choices.key = "k"
    with pytest.warns(UserWarning, match="cannot be stored"):
        choices.write({"name": "x", "tried": []})


@pytest.mark.parametrize("defers", [False, True])
def test_steps_of_another_size_are_not_measured_and_many_of_them_end_the_trial(defers: bool) -> None:
    odd = dict.fromkeys(range(5, STEPS, 2), 9)
    runs = train(defers, batches=odd)
    last = runs[0].plans[-1]
    assert last is not None
    assert names(runs[0]) == names(runs[1]) == [LAYER_BY_LAYER]
    assert last.tried == ()
    assert same_bits(runs)


@pytest.mark.parametrize("defers", [False, True])
def test_a_batch_that_changes_for_good_plans_and_tries_anew(defers: bool) -> None:
    runs = train(defers, steps=2 * STEPS, batches=dict.fromkeys(range(STEPS, 2 * STEPS), 16))
    plans = [plan for plan in runs[0].plans if plan is not None]
    assert plans[STEPS - 2].tried
    assert not plans[STEPS + 4].tried
    assert plans[-1].tried
    assert same_bits(runs)


@pytest.mark.parametrize("defers", [False, True])
def test_a_batch_that_changes_for_good_and_wants_the_same_plan_changes_nothing(
    defers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[object] = []
    plain = Schedules._plan
    monkeypatch.setattr(Schedules, "_plan", lambda self, *given: planned.append(given) or plain(self, *given))
    runs = train(defers, steps=2 * STEPS, batches=dict.fromkeys(range(STEPS, 2 * STEPS), 7))
    assert len(planned) == WORKERS
    assert runs[0].plans[-1] is runs[0].plans[STEPS - 2]
    assert same_bits(runs)


def test_a_plan_never_changes_while_a_forward_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    # The batch has changed for two steps when plans are ranked, after the third backward of the first plan; and another
    # plan than that is to run.
    monkeypatch.setattr(choosing, "shortlist", lambda *_: [1])
    changes: list[bool] = []
    plain = Schedules._plan

    def plan(self, *arguments) -> None:
        # In the end of backward, autograd is at work; a forward touches a parameter outside of it.
        changes.append(torch._C._current_graph_task_id() != -1)
        plain(self, *arguments)

    monkeypatch.setattr(Schedules, "_plan", plan)
    runs = train(defers=True, batches=dict.fromkeys(range(2, STEPS), 16))
    assert len(changes) == 2 * WORKERS
    assert all(changes)
    assert same_bits(runs)


def test_no_worker_waits_for_the_others_when_it_touches_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    # They may be waiting for that worker, which writes a checkpoint.
    places: list[bool] = []

    def noting(plain):
        def gather(self, *arguments):
            places.append(torch._C._current_graph_task_id() != -1)
            return plain(self, *arguments)

        return gather

    plain = AutogradFrontEnd.__init__

    def begin(self, *arguments) -> None:
        plain(self, *arguments)
        team = type(self.engine.team)
        with _SEEDING:
            if not places:
                places.append(True)
                for name in ("gather_ints", "gather_json"):
                    monkeypatch.setattr(team, name, noting(getattr(team, name)))

    monkeypatch.setattr(AutogradFrontEnd, "__init__", begin)
    runs = train(defers=True)
    assert len(names(runs[0])) > 1
    assert len(places) > 10
    assert all(places)


@pytest.mark.parametrize("lands", ["first", "at once"])
def test_no_step_is_taken_after_a_backward_that_failed(lands: str, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = Meeting(1)
    model = nn.Linear(6, 2)
    routes = Routes([MemoryRoute(meeting)])
    engine = Engine(find_units(model), ThreadTeam(0, meeting), Cluster(1), Options(defers=True), routes)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    policy = DeferredUpdates(optimizer)
    policy.connect(model, engine)
    front_end = AutogradFrontEnd(engine, Turns(policy))

    def step() -> None:
        policy.before_forward(model, True, False)
        engine.arm(True, 6)
        out = model(torch.ones(1, 6))
        front_end.watch_outputs([out], [])
        out.sum().backward()
        optimizer.step()

    if lands == "at once":
        step()
        policy.finish()
        monkeypatch.setattr(Engine, "lands_at_once", True)

    def differ(*_: object) -> None:
        raise MismatchError("replicas differ")

    monkeypatch.setattr(Schedules, "settle", differ)
    before = model.weight.detach().clone()
    with pytest.raises(MismatchError):
        step()
    with pytest.raises(UnsupportedError, match="restart from a checkpoint"):
        optimizer.step()
    assert torch.equal(model.weight, before)
    front_end.close()
    policy.close()


def test_nothing_is_tried_where_the_front_end_or_determinism_forbids_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nor do other plans cost anything then.
    monkeypatch.delattr(schedules, "make_candidates")
    assert names(train(steps=INTO_THE_SECOND_PLAN, tries=False)[0]) == [LAYER_BY_LAYER]
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms, less an import of torch's compiler
    try:
        assert names(train(steps=INTO_THE_SECOND_PLAN)[0]) == [LAYER_BY_LAYER]
    finally:
        torch.set_deterministic_debug_mode("default")
