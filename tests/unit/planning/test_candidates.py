from __future__ import annotations

import itertools

import pytest

from poseidon.planning.candidates import (
    AS_TORCH,
    AT_ONCE,
    CLOSE,
    CLOSE_S,
    GUARD_CLOSE,
    Candidate,
    make_candidates,
    shortlist,
)
from poseidon.planning.cluster import Cluster, Link
from poseidon.planning.planner import LAYER_BY_LAYER, make_plan
from poseidon.planning.route import Routes
from poseidon.planning.schedule import Model, Packing
from poseidon.routes import standard_routes
from poseidon.units import Load, Unit
from toy_models import unit

CLUSTER = Cluster(4, between=Link(1e9, 1e-4), flops=1e12)
CONV = unit("conv", "dense", (512, 4608))
WIDE = unit("wide", "linear", (4096, 4096))
NARROW = unit("narrow", "linear", (512, 512))
TABLE = unit("table", "embedding", (100_000, 64))
UNITS = [CONV, TABLE, WIDE, NARROW]
LOADS = {"wide": Load(32), "narrow": Load(48), "table": Load(50)}


def candidates(
    units: list[Unit] = UNITS,
    defers: bool = False,
    fulls: tuple[str, ...] = ("allreduce", "sharded"),
    overrides: dict[str, str] | None = None,
    routes: Routes | None = None,
    cluster: Cluster = CLUSTER,
) -> dict[str, Candidate]:
    routes = routes or standard_routes()
    order = list(reversed(range(len(units))))
    best = make_plan(units, LOADS, cluster, routes, overrides)
    packing = Packing(cluster, None, defers)
    made = make_candidates(Model.of(units), order, LOADS, routes, overrides, best, packing, fulls)
    assert made[0].plan is best
    assert len({one.name for one in made}) == len(made)
    return {one.name: one for one in made}


def routes_of(candidate: Candidate) -> list[str]:
    return list(candidate.plan.routes.values())


def test_the_best_routes_of_each_layer_come_first_and_one_plan_is_torchs() -> None:
    made = candidates()
    assert next(iter(made)) == LAYER_BY_LAYER
    assert routes_of(made[LAYER_BY_LAYER]) == ["allreduce", "rows", "factors", "factors"]
    assert routes_of(made[AS_TORCH]) == ["allreduce"] * 4
    assert made[AS_TORCH].packing.is_even
    assert not made[AS_TORCH].packing.defers


def test_short_forms_stay_where_they_save_most() -> None:
    made = candidates()
    assert routes_of(made["sharded and short forms"]) == ["sharded", "rows", "factors", "factors"]
    assert routes_of(made["sharded and the best short forms"]) == ["sharded", "rows", "factors", "sharded"]
    assert routes_of(made["sharded alone"]) == ["sharded"] * 4
    assert routes_of(made["allreduce and the best short forms"]) == ["allreduce", "rows", "factors", "allreduce"]


def test_without_a_server_there_are_plans_by_collectives_only() -> None:
    used = {route for one in candidates(fulls=("allreduce",)).values() for route in routes_of(one)}
    assert used == {"allreduce", "factors", "rows"}


def test_deferred_landing_may_be_given_up_for_every_plan() -> None:
    made = candidates(defers=True)
    late = {name for name, one in made.items() if one.packing.defers}
    assert AS_TORCH not in late
    assert {name + AT_ONCE for name in late} | {AS_TORCH + AT_ONCE} == set(made) - late
    assert made[AS_TORCH + AT_ONCE].packing.is_even


def test_forced_routes_are_in_all_plans() -> None:
    made = candidates(overrides={"wide": "allreduce", "table": "rows"}, defers=True)
    assert all(one.plan.routes["wide"] == "allreduce" and one.plan.routes["table"] == "rows" for one in made.values())
    assert len({one.plan.routes["narrow"] for one in made.values()}) > 1


def test_a_sparse_gradient_keeps_its_only_route() -> None:
    sparse = unit("table", "embedding", (100_000, 64), is_sparse=True)
    assert all(one.plan.routes["table"] == "rows" for one in candidates([CONV, sparse]).values())


def test_in_a_compiled_model_the_same_layers_take_short_forms_in_all_plans() -> None:
    routes = standard_routes()
    best = make_plan(UNITS, LOADS, CLUSTER, routes)
    order = list(reversed(range(len(UNITS))))
    model, packing = Model.of(UNITS), Packing(CLUSTER)
    made = make_candidates(model, order, LOADS, routes, None, best, packing, ["allreduce", "sharded"], keeps_forms=True)
    assert [one.name for one in made] == [LAYER_BY_LAYER, "sharded and short forms"]


def test_plans_that_send_the_same_items_are_one() -> None:
    small = unit("small", "dense", (16, 16))
    assert list(candidates([small], fulls=("allreduce",))) == [LAYER_BY_LAYER]
    assert list(candidates([small], fulls=("allreduce",), defers=True)) == [LAYER_BY_LAYER, LAYER_BY_LAYER + AT_ONCE]
    assert list(candidates(overrides={"*": "allreduce"}, fulls=("allreduce", "sharded")))[:2] == [
        LAYER_BY_LAYER,
        AS_TORCH,
    ]


def test_costs_of_the_route_taken_are_known() -> None:
    for one in candidates(defers=True).values():
        assert one.plan.wire_bytes > 0
        assert str(one.plan)


@pytest.mark.parametrize("defers", [False, True])
def test_the_shortlist_holds_the_best_and_every_guard_that_is_close(defers: bool) -> None:
    made = list(candidates(defers=defers).values())
    guards = {number for number, one in enumerate(made) if one.is_guard}
    assert {made[number].name for number in guards} == (
        {LAYER_BY_LAYER, LAYER_BY_LAYER + AT_ONCE, AS_TORCH + AT_ONCE} if defers else {LAYER_BY_LAYER, AS_TORCH}
    )
    slow = [1.0 + 0.01 * number for number in range(len(made))]
    tried = shortlist(made, slow)
    assert tried[:2] == [0, 1]
    assert set(tried) == {0, 1} | guards | _firsts(made)


def _firsts(made: list[Candidate]) -> set[int]:
    """Return the first plan of each route of full gradients."""
    fulls = [one.full for one in made]
    return {fulls.index("allreduce"), fulls.index("sharded")}


def test_the_best_plan_of_another_carrier_is_tried_where_it_is_not_hopeless() -> None:
    made = list(candidates(fulls=("allreduce", "sharded")).values())
    of = {full: [number for number, one in enumerate(made) if one.full == full] for full in ("allreduce", "sharded")}
    assert len(of["sharded"]) > 1
    # The times were taken with collectives, and overstate all plans alike.
    times = [1.0] * len(made)
    for number in of["sharded"]:
        times[number] = GUARD_CLOSE - 0.01 * number
    tried = set(shortlist(made, times))
    assert tried & set(of["sharded"]) == {of["sharded"][-1]}
    for number in of["sharded"]:
        times[number] = GUARD_CLOSE + 0.1
    assert not set(shortlist(made, times)) & set(of["sharded"])


def test_where_only_deferring_offers_the_server_the_wrappers_plan_is_a_guard() -> None:
    made = candidates(defers=True, routes=standard_routes(offers_server=True))
    assert set(routes_of(made[LAYER_BY_LAYER])) == {"sharded", "rows", "factors"}
    guards = {name for name, one in made.items() if one.is_guard}
    assert "allreduce and short forms" + AT_ONCE in guards
    assert "allreduce and short forms" not in guards


def test_a_clear_prediction_leaves_nothing_to_try() -> None:
    made = list(candidates().values())
    guards = {number for number, one in enumerate(made) if one.is_guard}
    assert 2 not in guards
    far = [1.0 if number == 2 else GUARD_CLOSE + 0.01 for number in range(len(made))]
    assert shortlist(made, far) == [2]
    near = [1.0 if number == 2 else (GUARD_CLOSE if number in guards else CLOSE) - 0.01 for number in range(len(made))]
    assert guards < set(shortlist(made, near))


def test_where_python_decides_all_that_differ_by_little_time_are_close() -> None:
    made = list(candidates().values())
    times = [1e-3 if number == 2 else 1e-3 + 0.9 * CLOSE_S for number in range(len(made))]
    tried = shortlist(made, times)
    assert tried[0] == 2
    assert len(tried) >= 3
    assert all(a != b for a, b in itertools.pairwise(tried))
