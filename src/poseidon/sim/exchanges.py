"""A plan as things to move: which units wait for each other, and how many bytes leave each machine when they go."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from poseidon.planning.ordering import order_by_need
from poseidon.planning.packing import assign_buckets, limit_served
from poseidon.planning.planner import Plan, PlanEntry, make_plan
from poseidon.sim.setting import Setting
from poseidon.sums.chunks import Chunk
from poseidon.sums.compact import COMPACT_SHARE, is_worth_compacting
from poseidon.sums.slots import Slot, make_slots

MOST_ROUNDS = 400
"""A model is cut into about as many rounds of chunks at most, and into fewer where machines are followed one by one:
finer ones change the answer by less than they cost."""


@dataclass(frozen=True)
class Leg:
    """A part of an exchange that must be over everywhere before the next begins."""

    out_bytes: float
    """Leaves every machine, and as much arrives."""
    owner_bytes: tuple[float, float] | None = None
    """What leaves and what reaches the one machine that holds the unit, where it is not as the others."""
    others_in_bytes: float | None = None
    """What reaches each of the others then."""


@dataclass(frozen=True)
class Exchange:
    """Units that travel together."""

    name: str
    units: tuple[int, ...]
    """All must be ready."""
    route: str
    legs: tuple[Leg, ...]
    is_collective: bool
    """Goes in one order on all machines, one after the other."""
    owner: int = 0
    staged_bytes: float = 0.0
    """What crosses between device and host in each leg."""
    priority: int = 0
    """Lower is more urgent, where a system heeds it."""
    hops: int = 1
    """Messages that follow each other in each leg, every one with the link's latency."""
    inside_s: float = 0.0
    """On the link inside each machine and for its own work, once before and once after."""

    @property
    def out_bytes(self) -> float:
        """What a machine (the owner, where there is one) sends in all."""
        return sum(leg.out_bytes if leg.owner_bytes is None else leg.owner_bytes[0] for leg in self.legs)


@dataclass(frozen=True)
class Schedule:
    """All exchanges of a step, in the order in which they become ready, and what they ask of the device."""

    plan: Plan
    exchanges: tuple[Exchange, ...]
    rebuild_s: tuple[float, ...]
    """By unit: on the device once its exchange is over."""
    saved_s: tuple[float, ...]
    """By unit: what its backward is shorter by than the profile says."""

    @property
    def wire_bytes(self) -> float:
        """What a machine sends per step."""
        return sum(exchange.out_bytes for exchange in self.exchanges)


def make_schedule(setting: Setting) -> Schedule:
    """Plan with the real planner and turn the plan into exchanges."""
    profile, cluster, system = setting.profile, setting.cluster, setting.system
    overrides = setting.overrides if system.special == "planned" else {}
    offers_server = setting.offers_server and system.dense == "planned"
    plan = make_plan(profile.specs, profile.loads, cluster, overrides, offers_server)
    count = len(plan.entries)
    if system.dense == "none" or cluster.workers == 1:
        return Schedule(plan, (), (0.0,) * count, (0.0,) * count)
    routes = [_route(setting, entry) for entry in plan.entries]
    units = {route: [i for i in profile.ready_order if routes[i] == route] for route in routes}
    exchanges = [_broadcast(setting, i, plan.entries[i]) for route in ("factors", "rows") for i in units.get(route, ())]
    pushed = enumerate(units.get("factor-push", ()))
    exchanges += [_factor_push(setting, i, plan.entries[i], place) for place, i in pushed]
    exchanges += _served(setting, units.get("sharded", ()))
    exchanges += _collectives(setting, units.get("allreduce", ()))
    place = {unit: at for at, unit in enumerate(profile.ready_order)}
    exchanges.sort(key=lambda exchange: max(place[unit] for unit in exchange.units))
    if system.overlaps_forward:
        exchanges = _by_need(setting, exchanges, place)
    device_s = [_device_s(entry, route) for entry, route in zip(plan.entries, routes, strict=True)]
    return Schedule(plan, tuple(exchanges), tuple(s for s, _ in device_s), tuple(s for _, s in device_s))


def _route(setting: Setting, entry: PlanEntry) -> str:
    """Return the way a system sends a unit, given what the planner says of it."""
    system = setting.system
    if system.special == "planned" and entry.route in ("factors", "rows"):
        return entry.route
    if system.special == "factor-push" and _pays_pushed(entry, setting):
        return "factor-push"
    if system.dense == "planned":
        return "sharded" if entry.route == "sharded" else "allreduce"
    return system.dense


def _by_need(setting: Setting, exchanges: list[Exchange], place: Mapping[int, int]) -> list[Exchange]:
    """Return the exchanges with collectives in the order that the engine settles when forward need not wait for all."""
    profile = setting.profile
    ready_s = list(itertools.accumulate(profile.units[i].backward_s for i in profile.ready_order))
    per_byte = setting.collectives.seconds_per_byte(setting.wire_bytes_per_s(0))
    collectives = [exchange for exchange in exchanges if exchange.is_collective]
    order = order_by_need(
        [ready_s[max(place[unit] for unit in exchange.units)] for exchange in collectives],
        [exchange.out_bytes * per_byte for exchange in collectives],
    )
    return [*(collectives[number] for number in order), *(each for each in exchanges if not each.is_collective)]


def _device_s(entry: PlanEntry, route: str) -> tuple[float, float]:
    """Return what rebuilding a gradient from everybody's factors takes, and what not making one's own saves."""
    if route != "factors":
        return 0.0, 0.0
    return entry.costs["factors"].compute_s, entry.costs["allreduce"].compute_s


def _inside_s(setting: Setting, size_bytes: float) -> float:
    """Return the time for the workers of one machine to combine, or to share what came."""
    members, link = setting.cluster.workers_per_machine, setting.cluster.inside
    return (members - 1) / members * size_bytes / link.bytes_per_s + (members - 1) * link.latency_s


def _collectives(setting: Setting, units: Sequence[int]) -> list[Exchange]:
    profile, machines = setting.profile, setting.cluster.machines
    members = [(i, parameter) for i in units for parameter in profile.units[i].unit.parameters]
    sizes = [(parameter.itemsize, parameter.size_bytes) for _, parameter in members]
    exchanges = []
    for chosen in _pack(setting, sizes):
        size = sum(sizes[i][1] for i in chosen) * setting.wire_share
        names = [profile.units[members[i][0]].unit.name for i in chosen]
        exchanges.append(
            Exchange(
                name=names[0] if names[0] == names[-1] else f"{names[0]} ... {names[-1]}",
                units=tuple(dict.fromkeys(members[i][0] for i in chosen)),
                route="allreduce",
                legs=(Leg(2 * size * (machines - 1) / machines),),
                is_collective=True,
                hops=setting.collectives.hops(machines),
                inside_s=_inside_s(setting, size),
            )
        )
    return exchanges


def _pack(setting: Setting, sizes: Sequence[tuple[int, int]]) -> list[list[int]]:
    if setting.system.packing == "engine":
        return assign_buckets(sizes, setting.system.bucket_bytes)
    if setting.system.packing == "whole":
        return [list(range(len(sizes)))] if sizes else []
    return ddp_buckets([size for _, size in sizes], setting.system.bucket_bytes)


def ddp_buckets(sizes: Sequence[int], limit_bytes: int, first_bytes: int = 2**20) -> list[list[int]]:
    """Return how torch's DistributedDataParallel compacts: a small first bucket, then full ones."""
    buckets: list[list[int]] = [[]]
    total = 0
    for index, size in enumerate(sizes):
        buckets[-1].append(index)
        total += size
        if total >= (first_bytes if len(buckets) == 1 else limit_bytes):
            buckets.append([])
            total = 0
    return [bucket for bucket in buckets if bucket]


def _broadcast(setting: Setting, unit: int, entry: PlanEntry) -> Exchange:
    """Return everybody's factors or rows to everybody, as the planner counts them."""
    cost = entry.cost
    machines = setting.cluster.machines
    own = cost.wire_bytes / max(machines - 1, 1)
    is_collective = setting.uses_gathers and entry.route == "factors"
    return Exchange(
        name=entry.unit,
        units=(unit,),
        route=entry.route,
        legs=(Leg(cost.wire_bytes if machines > 1 else 0.0),),
        is_collective=is_collective,
        staged_bytes=0.0 if is_collective else own * machines,
        hops=machines - 1 if is_collective else 2,
        inside_s=_inside_s(setting, own) + (0.0 if is_collective else setting.messages.message_s * (machines - 1)),
    )


def _served(setting: Setting, units: Sequence[int]) -> list[Exchange]:
    """Return what goes through the parameter server, packed and cut as the engine does it.

    Chunks that keep all owners busy at once make one exchange: they end at about the same time.
    """
    if not units:
        return []
    profile, machines = setting.profile, setting.cluster.machines
    members = [(i, parameter) for i in units for parameter in profile.units[i].unit.parameters]
    sizes = [(parameter.itemsize, parameter.size_bytes) for _, parameter in members]
    if setting.system.packing == "units":
        packed = [[at for at, (i, _) in enumerate(members) if i == unit] for unit in units]
    else:
        packed = assign_buckets(sizes, limit_served(None, machines, setting.least_chunk_bytes))
    items = [sizes[bucket[0]][0] for bucket in packed]
    elements = [sum(members[at][1].numel for at in bucket) for bucket in packed]
    rounds = MOST_ROUNDS if setting.is_symmetric else MOST_ROUNDS // 8
    chunk_bytes = max(setting.least_chunk_bytes, sum(size for _, size in sizes) // (rounds * machines))
    slots = make_slots(0, elements, items, machines, chunk_bytes)
    return [
        _round(setting, [members[at][0] for at in bucket], chunks, slot, itemsize)
        for bucket, slot, itemsize in zip(packed, slots, items, strict=True)
        for chunks in (slot.chunks[at : at + machines] for at in range(0, len(slot.chunks), machines))
    ]


def _round(setting: Setting, units: Sequence[int], chunks: Sequence[Chunk], slot: Slot, itemsize: int) -> Exchange:
    machines = setting.cluster.machines
    size = sum(chunk.length for chunk in chunks) * itemsize * setting.wire_share
    share = Leg(size * _served_share(setting, slot, itemsize) * (machines - 1) / machines)
    return Exchange(
        name=f"{setting.profile.units[units[-1]].unit.name} [{chunks[0].index}]",
        units=tuple(dict.fromkeys(units)),
        route="sharded",
        legs=(share, share),
        is_collective=False,
        staged_bytes=size,
        priority=slot.priority,
        inside_s=_inside_s(setting, size),
    )


def _served_share(setting: Setting, slot: Slot, itemsize: int) -> float:
    """Return what is left of a bucket's bytes if devices compact it."""
    # What was shortened already (``wire_share``) is no float32 any more.
    can_be = setting.compacts and setting.wire_share == 1
    return COMPACT_SHARE if can_be and is_worth_compacting(itemsize, slot.chunks) else 1.0


def _pays_pushed(entry: PlanEntry, setting: Setting) -> bool:
    """Project Adam pushes factors wherever they are smaller than the matrix."""
    if entry.kind != "linear" or not entry.rows:
        return False
    return entry.costs["factors"].wire_bytes / max(setting.cluster.machines - 1, 1) < _matrix_bytes(entry)


def _matrix_bytes(entry: PlanEntry) -> float:
    rows, columns = entry.shape[0]
    return 4.0 * rows * columns


def _factor_push(setting: Setting, unit: int, entry: PlanEntry, place: int) -> Exchange:
    """Return factors to the machine that holds the unit, and the whole matrix back from it to everybody."""
    machines = setting.cluster.machines
    factors = entry.costs["factors"].wire_bytes / max(machines - 1, 1)
    matrix = _matrix_bytes(entry)
    return Exchange(
        name=entry.unit,
        units=(unit,),
        route="factor-push",
        legs=(
            Leg(factors, owner_bytes=(0.0, (machines - 1) * factors), others_in_bytes=0.0),
            Leg(0.0, owner_bytes=((machines - 1) * matrix, 0.0), others_in_bytes=matrix),
        ),
        is_collective=False,
        owner=place % machines,
        staged_bytes=matrix,
    )


def count_exchanges(exchanges: Sequence[Exchange], units: int) -> list[int]:
    """Return for every unit in how many exchanges it takes part."""
    counts = Counter(unit for exchange in exchanges for unit in exchange.units)
    return [counts[unit] for unit in range(units)]
