from __future__ import annotations

from poseidon.engine.replanning import REPLAN_AFTER, Replanning
from poseidon.routes import standard_routes
from poseidon.units import Load
from toy_models import CLUSTER, CONV, FC, TABLE


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


def test_small_changes_never_do() -> None:
    planning = make()
    assert not any(planning.is_due(batch) for batch in (90, 110, 125, 80, 129))


def test_a_batch_of_unknown_size_never_does() -> None:
    planning = make(batch=0)
    assert not any(planning.is_due(batch) for batch in (1, 1000, 1000))
