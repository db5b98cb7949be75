"""Loss is chosen by users alone: what they ask for, and what planner, schedules and trials make of it."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import poseidon
from poseidon.errors import ConfigError, UnsupportedError
from poseidon.planning.candidates import make_candidates
from poseidon.planning.cluster import Cluster, Link
from poseidon.planning.lossy import LOSSY, LossyChoice, as_matrix, read_lossy
from poseidon.planning.planner import Plan, make_plan
from poseidon.planning.profile import Profile, UnitProfile
from poseidon.planning.route import Routes
from poseidon.planning.schedule import Model, Packing, make_schedule
from poseidon.planning.transfers import Conditions
from poseidon.routes import standard_routes
from poseidon.routes.lossy import LossyRoute, lossy_routes
from poseidon.sim.media import MEDIA
from poseidon.sim.setting import Setting
from poseidon.sim.steps import simulate
from poseidon.sim.systems import SYSTEMS
from poseidon.units import Load, ParameterSpec, Unit
from toy_models import unit

CLUSTER = Cluster(8, between=Link(1e9, 1e-4), flops=1e12)
CONV = unit("h.conv", "dense", (512, 4608))
WIDE = unit("h.wide", "linear", (4096, 4096))
NORM = unit("norm", "dense", (512,))
TABLE = unit("table", "embedding", (100_000, 64))
UNITS = [CONV, TABLE, WIDE, NORM]
LOADS = {"h.wide": Load(4096), "table": Load(50)}


def routes_for(choice: LossyChoice | None) -> Routes:
    return Routes([*standard_routes().values(), *lossy_routes(choice)])


def plan_for(lossy: Any, cluster: Cluster = CLUSTER, **options: Any) -> Plan:
    choice = read_lossy(lossy, **options)
    assert choice is not None
    routes = routes_for(choice)
    return make_plan(UNITS, LOADS, cluster, routes, choice.forced(UNITS, routes))


def test_one_way_for_all_layers_or_by_pattern_the_first_that_matches() -> None:
    assert set(plan_for("int8").routes.values()) == {"int8"}
    some = plan_for({"h.wide": "exact", "h.*": "topk", "norm": "bf16"}).routes
    assert some["h.conv"] == "topk"
    assert some["norm"] == "bf16"
    assert not {some["h.wide"], some["table"]} & set(LOSSY)


@pytest.mark.parametrize("lossy", [None, {}, "exact", {"*": "exact"}])
def test_nothing_asked_for_is_nothing_lost(lossy: Any) -> None:
    assert read_lossy(lossy) is None
    routes = routes_for(read_lossy("int8"))
    assert not set(make_plan(UNITS, LOADS, CLUSTER, routes).routes.values()) & set(LOSSY)
    assert not set(standard_routes()) & set(LOSSY)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lossy": "int4"}, "unknown way to lose something 'int4'"),
        ({"lossy": {"*": "in8"}}, "unknown way to lose something 'in8'; did you mean 'int8'?"),
        ({"lossy": 8}, "lossy is 8; give one of bf16, int8, topk, lowrank"),
        ({"lossy": "int8", "rank": 4}, "rank=4 is for lossy='lowrank', which is not asked for"),
        ({"lossy": None, "density": 0.1}, "density=0.1 is for lossy='topk'"),
        ({"lossy": "lowrank", "rank": 0}, "rank=0 with lossy='lowrank': expected a whole number of at least 1"),
        ({"lossy": "topk", "density": 2}, "density=2 with lossy='topk': expected a share"),
        ({"lossy": "topk", "density": float("nan")}, "density=nan"),
        ({"lossy": "int8", "warmup_steps": -1}, "warmup_steps is -1; expected a whole number of at least 0"),
        ({"lossy": None, "warmup_steps": 5}, "warmup_steps=5 without lossy"),
        ({"lossy": "int8", "block_size": 33}, "block_size=33 with lossy='int8': expected an even number"),
        ({"lossy": "int8", "block_size": 10**30}, "with lossy='int8': expected an even number from 32 to 262144"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        poseidon.DistributedDataParallel(nn.Linear(2, 2), **options)


def test_a_pattern_without_a_layer_or_without_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lossy: no unit matches 'h\.\*'; the model's units are 0, 1"):
        poseidon.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), lossy={"h.*": "int8"})
    with pytest.raises(ConfigError, match=r"cannot take 'int8': .* sparse gradients or values of 8 bytes"):
        poseidon.DistributedDataParallel(nn.Linear(2, 2).double(), lossy="int8")
    with pytest.raises(ConfigError, match=r"cannot take 'bf16': .*not float32"):
        poseidon.DistributedDataParallel(nn.Linear(2, 2).half(), lossy="bf16")


@pytest.mark.parametrize("mode", [{"update": "server"}, {"consistency": "ssp"}, {"consistency": "asp"}])
def test_modes_that_send_no_mean_gradients_refuse_it(mode: dict[str, Any]) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="only mean gradients can be lossy; drop one"):
        poseidon.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), lossy="int8", **mode)


def test_one_worker_loses_nothing() -> None:
    model = nn.Linear(3, 2)
    wrapped = poseidon.DistributedDataParallel(model, lossy="topk")
    assert wrapped.plan is None
    wrapped(torch.ones(1, 3)).sum().backward()
    assert torch.equal(model.weight.grad, torch.ones(2, 3))
    assert wrapped.lossy_state_dict() == {"rests": {}, "bases": {}, "exact_steps": 0}
    assert "one worker" in str(plan_for("int8", Cluster(1)))
    assert not set(plan_for("int8", Cluster(1)).routes.values()) & set(LOSSY)
    assert list(model.state_dict()) == ["weight", "bias"]


def test_every_line_of_the_plan_says_so_and_what_it_saves() -> None:
    text = str(plan_for({"h.*": "int8", "*": "exact"}))
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert "lossy, asked for: 4.03x fewer bytes than allreduce" in lines["h.conv"]
    assert "lossy" in lines["h.wide"]
    assert "lossy" not in lines["table"]
    assert "lossy" not in lines["norm"]
    assert "lossy, as asked for: 2 of 4 layers; exact, one machine would send" in text


def test_what_low_rank_leaves_whole_is_exact() -> None:
    plan = plan_for("lowrank", rank=4)
    (norm,) = (entry for entry in plan.entries if entry.unit == "norm")
    assert not norm.is_lossy
    assert norm.why == "too small for lowrank: exact"
    (table,) = (entry for entry in plan.entries if entry.unit == "table")
    assert table.why == "lossy, asked for; rows would be exact, with no more bytes"


def test_matrices_are_the_first_dimension_by_the_rest_as_in_torchs_hook() -> None:
    assert as_matrix((512, 256, 3, 3), 4) == (512, 2304)
    assert as_matrix((512,), 1) is None
    assert as_matrix((8, 300), 4) is None
    assert as_matrix((0, 300), 1) is None
    assert as_matrix((16, 16), 4) == (16, 16)
    assert as_matrix((15, 16), 4) is None


def test_what_shares_an_item_depends_on_the_model_alone() -> None:
    units = [unit(f"u{number}", "dense", (300 + number, 1000)) for number in range(40)]
    choice = read_lossy({"u1*": "int8", "u2*": "lowrank"})
    assert choice is not None
    routes = routes_for(choice)
    forced = choice.forced(units, routes)
    route_of = [forced.get(one.name, "allreduce") for one in units]
    seen = set()
    for seed in range(5):
        order = list(range(len(units)))
        random.Random(seed).shuffle(order)
        cluster = Cluster(8, between=Link(10.0 ** (8 + seed % 3), 1e-4))
        packing = Packing(cluster, None, defers=bool(seed % 2), is_even=bool(seed % 3))
        made = make_schedule(Model.of(units), route_of, order, routes, packing)
        seen.add(frozenset((item.route, item.parameters) for item in made.items if item.route in LOSSY))
    assert len(seen) == 1


@pytest.mark.parametrize("defers", [False, True])
def test_no_trial_changes_how_much_a_layer_loses(defers: bool) -> None:
    choice = read_lossy({"h.*": "int8", "norm": "lowrank"})
    assert choice is not None
    routes = routes_for(choice)
    forced = choice.forced(UNITS, routes)
    best = make_plan(UNITS, LOADS, CLUSTER, routes, forced)
    made = make_candidates(
        Model.of(UNITS), [3, 2, 1, 0], LOADS, routes, forced, best, Packing(CLUSTER, None, defers), ["allreduce"]
    )
    assert len(made) > 1
    for one in made:
        lost = {name: route for name, route in one.plan.routes.items() if route in LOSSY}
        assert lost == {"h.conv": "int8", "h.wide": "int8", "norm": "lowrank"}


@pytest.mark.parametrize(
    ("way", "share"),
    [
        ("bf16", 0.5),
        ("int8", 254 / 1024),
        ("topk", 656 * 6 / 65536 / 4),
        ("lowrank", 4 * (512 + 4608 / 2 + 1.5 * 4096) / (512 * 4608 + 4096**2)),
    ],
)
def test_the_simulator_moves_what_the_planner_counts(way: str, share: float) -> None:
    choice = read_lossy(way)
    assert choice is not None
    routes = routes_for(choice)
    made = make_schedule(Model.of([CONV, WIDE]), [way, way], [1, 0], routes, Packing(CLUSTER))
    moved = sum(one.out_bytes for item in made.items for one in routes[way].transfers(item, Conditions(CLUSTER)))
    counted = [routes[way].cost(one, LOADS.get(one.name), CLUSTER) for one in (CONV, WIDE)]
    assert moved == pytest.approx(sum(one.wire_bytes for one in counted if one is not None), rel=1e-3)
    exact = 2 * (CONV.size_bytes + WIDE.size_bytes) * 7 / 8
    assert moved == pytest.approx(share * exact, rel=0.02)


def test_the_simulator_predicts_a_step() -> None:
    units = tuple(UnitProfile(one, LOADS.get(one.name), 0.01, 0.02) for one in (CONV, WIDE, NORM))
    profile = Profile("toy", "", 1, units, (0, 1, 2), (2, 1, 0), 0.0, source="test")
    exact = Setting(profile, CLUSTER, SYSTEMS["distribute"], gathers_factors=False)
    step_s = {way: simulate(replace(exact, lossy=read_lossy(way))).step_s for way in ("exact", *LOSSY)}
    assert step_s["exact"] > 1.5 * step_s["bf16"] > 1.5 * 1.5 * step_s["int8"]
    assert max(step_s["topk"], step_s["lowrank"]) < 1.2 * simulate(replace(exact, system=SYSTEMS["linear"])).step_s


@pytest.mark.parametrize(("machines", "members"), [(1, 8), (2, 4), (2, 1)])
@pytest.mark.parametrize("way", LOSSY)
def test_what_workers_of_one_machine_send_each_other_counts_in_short(way: str, machines: int, members: int) -> None:
    """A slow link inside, and a fast one between: a step takes about as long as the bytes inside."""
    slow = Link(1e9, 0.0)
    cluster = Cluster(machines, members, between=Link(1e15, 0.0), inside=slow, flops=1e18)
    units = tuple(UnitProfile(replace(WIDE, name=f"h.{place}"), None, 1e-9, 1e-9) for place in range(8))
    order = tuple(range(8))
    profile = Profile("toy", "", 1, units, order, order[::-1], 0.0, source="test")
    ideal = MEDIA["ideal"]
    lossy = Setting(profile, cluster, SYSTEMS["distribute"], ideal, ideal, gathers_factors=False, lossy=read_lossy(way))
    route = routes_for(lossy.lossy)[way]
    assert isinstance(route, LossyRoute)
    # Every worker sends parts to those beside it, and as owner sums.
    sent = 2 * 8 * WIDE.size_bytes * route.share(WIDE) * (members - 1) / cluster.workers
    outcome = simulate(lossy)
    assert outcome.step_s == pytest.approx(sent / slow.bytes_per_s, rel=0.02, abs=1e-4)
    cost = route.cost(WIDE, None, cluster)
    assert cost.wire_s == pytest.approx(sent / 8 / slow.bytes_per_s, rel=0.02, abs=1e-4)
    assert cost.wire_bytes == pytest.approx(sent / 8) or machines > 1
    assert outcome.sent_bytes == 0 or machines > 1


def test_half_precision_takes_int8_and_nothing_takes_sparse_gradients() -> None:
    half = Unit("half", "dense", (ParameterSpec("half.w", (64, 64), 2),))
    sparse = Unit("table", "embedding", (ParameterSpec("table.w", (64, 64), 4),), is_sparse=True)
    accepted = {route.name: (route.accepts(half), route.accepts(sparse)) for route in lossy_routes(read_lossy("int8"))}
    assert accepted == {
        "bf16": (False, False),
        "int8": (True, False),
        "topk": (True, False),
        "lowrank": (False, False),
    }


def test_a_hook_of_the_users_and_loss_exclude_each_other() -> None:
    wrapped = poseidon.DistributedDataParallel(nn.Linear(2, 2), lossy="int8")
    with pytest.raises((ConfigError, UnsupportedError), match="lossy"):
        wrapped.register_comm_hook(None, _hook)


def _hook(state: object, bucket: Any) -> Any:
    raise NotImplementedError


def test_the_documentation_lists_them() -> None:
    text = (Path(__file__).parents[3] / "docs" / "architecture.md").read_text()
    table = text.partition("<!-- lossy routes -->")[2].partition("<!-- end of lossy routes -->")[0]
    rows = [f"| `{route.name}` | {route.summary} |" for route in lossy_routes(read_lossy("int8"))]
    assert table.split("\n")[3:-1] == rows
    for route in lossy_routes(read_lossy("int8")):
        assert (route.is_lossy, route.uses_wire, route.queue, route.is_offered(CLUSTER)) == (True, True, None, False)
