from __future__ import annotations

import random

from poseidon.engine.replanning import MOST_REPLAN_AFTER, REPLAN_AFTER, Replanning
from poseidon.planning.planner import make_plan
from poseidon.routes import standard_routes
from poseidon.units import Load
from toy_models import CLUSTER, CONV, FC, TABLE, unit


def make(batch: float = 100.0) -> Replanning:
    planning = Replanning([CONV, FC, TABLE], CLUSTER, standard_routes(), None)
    planning.make({"fc": Load(8), "table": Load(5)}, batch)
    return planning


def test_loads_of_several_calls_add_up() -> None:
    planning = Replanning([FC], CLUSTER, standard_routes(), None)
    planning.observe("fc", Load(8, 4))
    planning.observe("fc", Load(3, 2))
    assert planning.loads["fc"] == Load(11, 4)
    assert planning.plan is None


def test_one_odd_batch_changes_nothing() -> None:
    planning = make()
    assert not planning.is_due(50)
    assert not planning.is_due(100)
    assert not planning.is_due(50)


def test_a_batch_that_stays_otherwise_makes_a_new_plan_due_and_scales_the_loads() -> None:
    planning = make()
    assert [planning.is_due(200) for _ in range(REPLAN_AFTER)] == [False, True]
    loads = planning.scaled_loads(200)
    assert loads["fc"] == Load(16)
    planning.make(loads, 200)
    assert not planning.is_due(200)
    assert not planning.is_due(200)


def test_batches_that_differ_among_themselves_have_not_come_to_stay() -> None:
    planning = make()
    assert not any(planning.is_due(batch) for batch in (200, 10, 200, 400, 30, 200, 20, 500))


def test_every_new_plan_makes_the_next_one_wait_longer() -> None:
    planning, steps, size = make(), [], 100.0
    for _ in range(12):
        size = 300.0 - size
        steps.append(next(step for step in range(1, 1000) if planning.is_due(size)))
        planning.make(planning.scaled_loads(size), size)
    assert steps[:4] == [2, 4, 8, 16]
    assert set(steps[7:]) == {MOST_REPLAN_AFTER}


def test_random_batches_lead_to_few_new_plans() -> None:
    planning, sizes, plans = make(), random.Random(1), 0
    for _ in range(10_000):
        size = float(sizes.randint(1, 256))
        if planning.is_due(size):
            plans += 1
            planning.make(planning.scaled_loads(size), size)
    assert plans <= 6


def test_only_a_plan_that_gains_time_is_worthwhile() -> None:
    wide = unit("wide", "linear", (1000, 1000))
    planning = Replanning([CONV, wide], CLUSTER, standard_routes(), None)
    routes = planning.make({"wide": Load(4)}, 100).routes
    found = set()
    for size in range(100, 100_000, 100):
        loads = planning.scaled_loads(size)
        is_other = make_plan([CONV, wide], loads, CLUSTER, standard_routes()).routes != routes
        found.add((is_other, planning.is_worthwhile(loads)))
    # Where another plan is only just the better one, nothing changes.
    assert found == {(False, False), (True, False), (True, True)}


def test_an_accepted_batch_is_the_usual_one() -> None:
    planning = make()
    planning.accept(planning.scaled_loads(200), 200)
    assert not any(planning.is_due(200) for _ in range(5))
    assert planning.loads["fc"] == Load(16)
    assert [planning.is_due(100) for _ in range(REPLAN_AFTER)] == [False, True]


def test_small_changes_never_do() -> None:
    planning = make()
    assert not any(planning.is_due(batch) for batch in (90, 110, 125, 80, 129))


def test_a_batch_of_unknown_size_never_does() -> None:
    planning = make(batch=0)
    assert not any(planning.is_due(batch) for batch in (1, 1000, 1000))
