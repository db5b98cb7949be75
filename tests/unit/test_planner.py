import json
import re
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.errors import ConfigError
from poseidon.planning import planner
from poseidon.planning.cluster import Cluster, Link
from poseidon.planning.planner import Plan, check_overrides, server_beats_nccl
from poseidon.routes import standard_routes
from poseidon.routes.catalogue import served_routes
from poseidon.team.nccl import chooses_sockets
from poseidon.units import Kind, Load, ParameterSpec, Unit

SLOW = Cluster(8, between=Link(1e8, 1e-4), flops=1e12)
FAST = Cluster(8, between=Link(1e12, 1e-6), flops=1e9)


ROUTES = standard_routes()


def make_plan(
    units: Sequence[Unit], loads: Mapping[str, Load], cluster: Cluster, overrides: Mapping[str, str] | None = None
) -> Plan:
    return planner.make_plan(units, loads, cluster, ROUTES, overrides)


def possible_routes(one: Unit) -> list[str]:
    return [route.name for route in ROUTES.for_unit(one)]


def unit(name: str, kind: Kind, *shape: int, is_sparse: bool = False) -> Unit:
    return Unit(name, kind, (ParameterSpec(f"{name}.weight", shape, 4),), is_sparse)


CONV = unit("conv", "dense", 64, 3, 7, 7)
FC = unit("head.fc", "linear", 4096, 4096)
OUT = unit("head.out", "linear", 1000, 4096)
TABLE = unit("table", "embedding", 100_000, 64)
WORDS = unit("words", "tied", 50_000, 768)
SPARSE = unit("bag", "embedding", 1000, 16, is_sparse=True)
LOADS = {"head.fc": Load(32), "head.out": Load(32), "table": Load(100)}


def test_each_unit_gets_the_cheapest_route() -> None:
    plan = make_plan([CONV, FC, OUT, TABLE, SPARSE], LOADS, SLOW)
    assert plan.routes == {
        "conv": "allreduce",
        "head.fc": "factors",
        "head.out": "factors",
        "table": "rows",
        "bag": "rows",
    }


def test_arithmetic_counts_where_the_wire_is_fast() -> None:
    assert make_plan([FC], LOADS, FAST).routes == {"head.fc": "allreduce"}


@given(
    st.lists(
        st.tuples(st.sampled_from(["linear", "embedding", "dense"]), st.integers(1, 3000)), min_size=1, max_size=6
    ),
    st.integers(0, 2000),
    st.integers(1, 32),
    st.integers(1, 4),
    st.floats(1e6, 1e12),
    st.floats(1e9, 1e14),
)
def test_no_possible_route_is_cheaper_than_the_chosen_one(
    layers: list[tuple[Kind, int]], rows: int, machines: int, workers: int, rate: float, flops: float
) -> None:
    units = [unit(f"layer{i}", kind, side, side + 1) for i, (kind, side) in enumerate(layers)]
    cluster = Cluster(machines, workers, Link(rate, 1e-4), flops=flops)
    plan = make_plan(units, {u.name: Load(rows) for u in units}, cluster)
    assert list(plan.routes) == [u.name for u in units]
    for one, entry in zip(units, plan.entries, strict=True):
        assert entry.route in possible_routes(one)
        assert entry.cost.seconds == min(cost.seconds for cost in entry.costs.values())
        if entry.cost.seconds == entry.costs["allreduce"].seconds:
            assert entry.route == "allreduce"
    assert plan.wire_bytes == sum(entry.cost.wire_bytes for entry in plan.entries)
    assert plan.allreduce_bytes == sum(entry.costs["allreduce"].wire_bytes for entry in plan.entries)


@pytest.mark.parametrize("loads", [{}, {"head.fc": Load(0), "table": Load(0)}])
def test_units_without_rows_take_allreduce(loads: dict[str, Load]) -> None:
    plan = make_plan([FC, TABLE], loads, SLOW)
    assert set(plan.routes.values()) == {"allreduce"}
    assert {entry.why for entry in plan.entries} == {"no rows seen in backward"}


def test_only_rows_can_carry_sparse_gradients() -> None:
    assert possible_routes(SPARSE) == ["rows"]
    (entry,) = make_plan([SPARSE], {}, SLOW).entries
    assert entry.route == "rows"
    assert entry.why == "sparse gradients were asked for"


def test_reasons_are_given_with_figures() -> None:
    conv, fc, _, table, _ = make_plan([CONV, FC, OUT, TABLE, SPARSE], LOADS, SLOW).entries
    assert conv.why == "no cheaper exact form"
    # 2 B (P - 1) / P against K (P - 1)(M + N) v: 2 * 4096 * 4096 / 8 / (32 * 8192) = 16.
    assert fc.why == "16.0x fewer bytes than allreduce"
    assert re.fullmatch(r"[\d.]+x fewer bytes than allreduce", table.why)
    (slower,) = make_plan([FC], {"head.fc": Load(32)}, FAST).entries
    assert re.fullmatch(r"[\d.]+x faster than factors", slower.why)


def test_the_load_is_shown_only_where_it_matters() -> None:
    conv, fc = make_plan([CONV, FC], {"conv": Load(5), "head.fc": Load(32)}, SLOW).entries
    assert conv.rows is None
    assert fc.rows == 32


@pytest.mark.parametrize(
    ("overrides", "routes"),
    [
        ({"head.fc": "allreduce"}, {"head.fc": "allreduce", "head.out": "factors"}),
        ({"head.*": "allreduce"}, {"head.fc": "allreduce", "head.out": "allreduce"}),
        ({"*": "allreduce"}, {"head.fc": "allreduce", "head.out": "allreduce"}),
        ({"head.fc": "factors", "*": "allreduce"}, {"head.fc": "factors", "head.out": "allreduce"}),
        ({"*": "allreduce", "head.fc": "factors"}, {"head.fc": "allreduce", "head.out": "allreduce"}),
        ({"head.[!o]*": "allreduce"}, {"head.fc": "allreduce", "head.out": "factors"}),
    ],
)
def test_overrides_are_obeyed_and_the_first_match_wins(overrides: dict[str, str], routes: dict[str, str]) -> None:
    assert make_plan([FC, OUT], LOADS, SLOW, overrides).routes == routes


def test_an_override_is_the_reason_given() -> None:
    (entry,) = make_plan([FC], LOADS, SLOW, {"head.fc": "factors"}).entries
    assert entry.why == "asked for"


def test_a_pattern_skips_the_units_that_cannot_take_its_route() -> None:
    plan = make_plan([CONV, FC, TABLE, SPARSE], LOADS, FAST, {"*": "factors"})
    assert plan.routes["conv"] == "allreduce"
    assert plan.routes["head.fc"] == "factors"
    assert plan.routes["bag"] == "rows"


def test_an_override_needs_no_load() -> None:
    (entry,) = make_plan([FC], {}, SLOW, {"head.fc": "factors"}).entries
    assert entry.route == "factors"
    assert entry.cost.seconds == 0


def test_one_worker_exchanges_nothing_whatever_is_asked_for() -> None:
    plan = make_plan([CONV, FC, TABLE], LOADS, Cluster(1), {"head.fc": "factors"})
    assert set(plan.routes.values()) == {"allreduce"}
    assert plan.wire_bytes == 0


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ({"head.fc": "carrier pigeon"}, "unknown route 'carrier pigeon'; known: allreduce, factors, rows"),
        ({"body.*": "allreduce"}, r"no unit matches 'body\.\*'; the model's units are conv, head\.fc"),
        ({"HEAD.fc": "factors"}, "no unit matches 'HEAD.fc'"),
        ({"conv": "factors"}, "'conv' cannot take 'factors': conv is dense; it can take allreduce"),
        ({"head.fc": "rows"}, "head.fc is linear; it can take allreduce, sharded, factors"),
        ({"bag": "allreduce"}, "bag is embedding; it can take rows"),
    ],
)
def test_overrides_that_cannot_be_obeyed_are_refused(overrides: dict[str, str], match: str) -> None:
    units = [CONV, FC, OUT, TABLE, SPARSE]
    with pytest.raises(ConfigError, match=match):
        check_overrides(units, overrides, ROUTES)
    with pytest.raises(ConfigError, match=match):
        make_plan(units, LOADS, SLOW, overrides)


def test_a_plan_becomes_plain_data() -> None:
    plan = make_plan([CONV, FC, TABLE], LOADS, SLOW)
    data = json.loads(plan.to_json())
    assert Cluster.from_dict(data["cluster"]) == SLOW
    assert [entry["route"] for entry in data["entries"]] == list(plan.routes.values())
    assert data["wire_bytes"] == plan.wire_bytes < data["allreduce_bytes"]
    assert data["entries"][1]["costs"]["factors"]["wire_bytes"] == plan.entries[1].cost.wire_bytes


def test_no_units_make_an_empty_plan() -> None:
    plan = make_plan([], {}, SLOW)
    assert plan == Plan(SLOW, ())
    assert plan.wire_bytes == 0


@pytest.mark.parametrize(
    ("load", "route"),
    [
        # A full gradient moves 2 * 50000 * 768 * 4 * 7/8 bytes, a token's factors 7 * 50768 * value_bytes.
        (Load(150, 4, 140), "tied"),
        (Load(300, 4, 280), "allreduce"),
        (Load(300, 2, 280), "tied"),
        (Load(600, 2, 560), "allreduce"),
        (Load(0, 4, 280), "tied"),
        (None, "allreduce"),
    ],
)
def test_a_tied_table_travels_in_two_short_forms_where_both_together_are_cheaper(load: Load | None, route: str) -> None:
    assert make_plan([WORDS], {} if load is None else {"words": load}, SLOW).routes == {"words": route}


@pytest.mark.parametrize(
    ("load", "route"),
    [
        (Load(100, 4, 90), "tied"),
        (Load(2048, 2, 2000), "sharded"),
        (None, "sharded"),
    ],
)
def test_with_a_server_of_sums_a_tied_table_is_not_split(load: Load | None, route: str) -> None:
    routes = standard_routes(offers_server=True)
    loads = {} if load is None else {"words": load}
    assert planner.make_plan([WORDS], loads, SLOW, routes).routes == {"words": route}


@pytest.mark.parametrize(
    ("load", "route"),
    [
        (Load(2048, 2, 2000), "split"),
        (Load(30_000, 2, 24_000), "split"),
        (Load(30_000, 2, 26_000), "served"),
        (None, "served"),
    ],
)
def test_with_the_servers_step_a_tied_table_is_split_unless_a_step_touches_half_of_it(
    load: Load | None, route: str
) -> None:
    loads = {} if load is None else {"words": load}
    assert planner.make_plan([WORDS], loads, SLOW, served_routes()).routes == {"words": route}


def test_a_table_of_half_precision_is_not_split() -> None:
    (route,) = [one for one in standard_routes(offers_server=True).values() if one.name == "split"]
    assert route.accepts(WORDS)
    assert not route.accepts(Unit("words", "tied", (ParameterSpec("words.weight", (50_000, 768), 2),)))


def test_every_route_is_known_to_some_unit() -> None:
    assert {route for one in (CONV, FC, TABLE, WORDS) for route in possible_routes(one)} == set(ROUTES)


def test_the_server_is_offered_beside_nccl_only_where_it_was_seen_to_pay() -> None:
    slow, fast = Link(10e9, 5e-5), Link(100e9, 5e-6)
    assert server_beats_nccl(Cluster(8, between=slow), defers=True)
    assert not server_beats_nccl(Cluster(8, between=slow), defers=False)
    assert not server_beats_nccl(Cluster(8, 2, between=slow), defers=True)
    assert not server_beats_nccl(Cluster(8, between=fast), defers=True)


@pytest.mark.parametrize(
    ("environment", "has_rdma", "goes_by_tcp"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"NCCL_IB_DISABLE": "1"}, True, True),
        ({"NCCL_IB_DISABLE": "0"}, True, False),
        ({"NCCL_NET": "Socket"}, True, True),
        ({"NCCL_NET": "AWS Libfabric"}, False, False),
    ],
)
def test_what_nccl_sends_over(environment: dict[str, str], has_rdma: bool, goes_by_tcp: bool) -> None:
    assert chooses_sockets(environment, has_rdma) is goes_by_tcp


@pytest.mark.parametrize(
    ("overrides", "whole"),
    [
        ({}, ["allreduce", "allreduce", "allreduce", "rows"]),
        ({"conv": "sharded"}, ["sharded", "sharded", "sharded", "rows"]),
        ({"conv": "sharded", "head.fc": "allreduce"}, ["sharded", "allreduce", "allreduce", "rows"]),
        ({"head.fc": "sharded"}, ["allreduce", "sharded", "sharded", "rows"]),
    ],
)
def test_where_all_must_travel_in_full_they_go_as_most_full_gradients_of_the_plan(
    overrides: dict[str, str], whole: list[str]
) -> None:
    units = [CONV, FC, TABLE, SPARSE]
    plan = make_plan(units, LOADS, SLOW, overrides)
    assert planner.whole_routes(plan, units, ROUTES) == whole


def test_without_any_they_go_by_what_is_cheapest() -> None:
    plan = make_plan([FC, OUT], LOADS, SLOW)
    assert set(plan.routes.values()) == {"factors"}
    assert planner.whole_routes(plan, [FC, OUT], ROUTES) == ["allreduce", "allreduce"]
    unseen = make_plan([FC, OUT], LOADS, SLOW, {"*": "factors"})
    assert planner.whole_routes(unseen, [FC, OUT], ROUTES) == ["allreduce", "allreduce"]
