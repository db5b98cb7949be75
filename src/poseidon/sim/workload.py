"""A plan as transfers: which units travel together, and how many bytes each machine sends."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from poseidon.planning.ordering import order_by_need
from poseidon.planning.packing import assign_buckets, even_buckets
from poseidon.planning.planner import Plan, PlanEntry, make_plan
from poseidon.planning.route import Route, Routes
from poseidon.planning.schedule import Model, Packing, Schedule, make_schedule
from poseidon.planning.transfers import Conditions, Transfer
from poseidon.routes import standard_routes
from poseidon.routes.bits import is_rounded
from poseidon.routes.catalogue import served_routes
from poseidon.routes.lossy import lossy_routes
from poseidon.sim.adam import FactorPush, pays_pushed
from poseidon.sim.setting import Setting

MOST_ROUNDS = 400
"""About the most rounds of chunks to cut a model into, or fewer if machines are simulated individually: finer ones cost
more than they change."""


@dataclass(frozen=True)
class Workload:
    """All transfers of a step, in the order in which they become ready, and their work on the device."""

    plan: Plan
    transfers: tuple[Transfer, ...]
    rebuild_s: tuple[float, ...]
    """By unit: device time once its transfer has finished."""
    saved_s: tuple[float, ...]
    """By unit: how much shorter its backward is than in the profile."""

    @property
    def wire_bytes(self) -> float:
        """Bytes a machine sends per step."""
        return sum(transfer.out_bytes for transfer in self.transfers)


def make_workload(setting: Setting) -> Workload:
    """Plan with the real planner, pack with the real schedule, and turn its items into transfers."""
    profile, cluster, system = setting.profile, setting.cluster, setting.system
    lossy = setting.lossy if system.dense == "planned" else None
    routes = Routes([*_routes(setting).values(), *lossy_routes(lossy)])
    forced = {} if lossy is None else lossy.forced(profile.specs, routes)
    overrides = setting.overrides if system.special == "planned" else {}
    plan = make_plan(profile.specs, profile.loads, cluster, routes, {**forced, **overrides})
    count = len(plan.entries)
    if system.dense == "none" or cluster.workers == 1:
        return Workload(plan, (), (0.0,) * count, (0.0,) * count)
    routes = Routes([*routes.values(), FactorPush()])
    route_of = [_route(setting, entry, routes) for entry in plan.entries]
    packing = _Packing(cluster, system.bucket_bytes, system.overlaps_forward, style=system.packing)
    return plan_workload(setting, plan, route_of, routes, packing)


def _routes(setting: Setting) -> Routes:
    """Return the routes among which the system's planner chooses."""
    system = setting.system
    if system.dense == "served":
        return served_routes(setting.least_chunk_bytes)
    return standard_routes(
        offers_server=setting.offers_server and system.dense == "planned",
        gathers_factors=setting.uses_gathers,
        combines_first=setting.cluster.workers_per_machine > 1,
        chunk_bytes=setting.least_chunk_bytes,
    )


def plan_workload(setting: Setting, plan: Plan, route_of: Sequence[str], routes: Routes, packing: Packing) -> Workload:
    """Return the transfers of a plan whose units take these routes."""
    profile, system = setting.profile, setting.system
    schedule = make_schedule(_model(setting), route_of, profile.ready_order, routes, packing, profile.loads)
    transfers = _transfers(setting, schedule, routes)
    if system.overlaps_forward:
        place = {unit: at for at, unit in enumerate(profile.ready_order)}
        transfers = _by_need(setting, transfers, place)
    device_s = [_device_s(entry, routes[name]) for entry, name in zip(plan.entries, route_of, strict=True)]
    return Workload(plan, tuple(transfers), tuple(s for s, _ in device_s), tuple(s for _, s in device_s))


def _model(setting: Setting) -> Model:
    """Return the model; weights that the server sends rounded travel apart from the others."""
    specs = setting.profile.specs
    if setting.system.dense != "served":
        return Model.of(specs)
    kinds = [
        (parameter.itemsize, is_rounded(unit, setting.precision)) for unit in specs for parameter in unit.parameters
    ]
    return Model.of(specs, kinds)


@dataclass(frozen=True)
class _Packing(Packing):
    """Packs like the simulated system."""

    style: str = "engine"

    def pack(self, route: Route, sizes: Sequence[tuple[Hashable, int]], units: Sequence[int]) -> list[list[int]]:
        if self.style == "engine" or not route.is_packed:
            # The system's limit applies to collectives; the server's follows from its chunks.
            asked = None if route.queue is None else self.asked_bytes
            limit = route.limit_bytes(asked, self.defers, self.cluster)
            return assign_buckets(sizes, limit) if route.is_packed else super().pack(route, sizes, units)
        if self.style == "units":
            return [[at for at, one in enumerate(units) if one == unit] for unit in dict.fromkeys(units)]
        if self.style == "whole":
            return [list(range(len(sizes)))] if sizes else []
        return even_buckets(sizes, self.asked_bytes or 0)


def _route(setting: Setting, entry: PlanEntry, routes: Routes) -> str:
    """Return the route by which a system sends a unit, given the planner's decision."""
    system = setting.system
    if system.dense == "served":
        return entry.route
    is_short = routes[entry.route].delivers != "gradients"
    if system.special == "planned" and is_short:
        return entry.route
    if system.special == "factor-push" and pays_pushed(entry, setting.cluster):
        return FactorPush.name
    if system.dense == "planned":
        return "allreduce" if is_short else entry.route
    return system.dense


def _transfers(setting: Setting, schedule: Schedule, routes: Routes) -> list[Transfer]:
    conditions = Conditions(
        cluster=setting.cluster,
        collective_hops=setting.collectives.hops(setting.cluster.machines),
        message_s=setting.messages.message_s,
        packing_s=(setting.messages.packing_s, setting.messages.looking_s),
        wire_share=setting.wire_share,
        compacts=setting.compacts,
        precision=setting.precision,
        loads=setting.profile.loads,
        sent_bits=setting.sent_bits,
        rounds=MOST_ROUNDS if setting.is_symmetric else MOST_ROUNDS // 8,
    )
    sizes: Counter[str] = Counter()
    for item in schedule.items:
        sizes[item.route] += item.size_bytes
    by_route = {name: replace(conditions, model_bytes=size) for name, size in sizes.items()}
    return [
        transfer for item in schedule.items for transfer in routes[item.route].transfers(item, by_route[item.route])
    ]


def _by_need(setting: Setting, transfers: list[Transfer], place: Mapping[int, int]) -> list[Transfer]:
    """Return the transfers with collectives in the order the engine uses when forward need not wait for all."""
    profile = setting.profile
    ready_s = list(itertools.accumulate(profile.units[i].backward_s for i in profile.ready_order))
    per_byte = setting.collectives.seconds_per_byte(setting.wire_bytes_per_s(0))
    collectives = [transfer for transfer in transfers if transfer.is_collective]
    order = order_by_need(
        [ready_s[max(place[unit] for unit in transfer.units)] for transfer in collectives],
        [transfer.out_bytes * per_byte for transfer in collectives],
    )
    return [*(collectives[number] for number in order), *(each for each in transfers if not each.is_collective)]


def _device_s(entry: PlanEntry, route: Route) -> tuple[float, float]:
    """Return the time to rebuild a gradient from all factors, and the time saved by not computing the local one."""
    if "factors" not in route.delivers or route.name not in entry.costs:
        return 0.0, 0.0
    # A job that encrypts has no allreduce; either way of sending it in full needs the same product.
    full = next((entry.costs[name] for name in ("allreduce", "sharded") if name in entry.costs), None)
    return entry.costs[route.name].compute_s, 0.0 if full is None else full.compute_s


def count_transfers(transfers: Sequence[Transfer], units: int) -> list[int]:
    """Return, for every unit, the number of transfers it takes part in."""
    counts = Counter(unit for transfer in transfers for unit in transfer.units)
    return [counts[unit] for unit in range(units)]
