"""Chooses the cheapest exact route for each unit, given load and cluster, and keeps the figures that decided it."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from poseidon.errors import ConfigError
from poseidon.planning.cluster import Cluster
from poseidon.planning.costs import Cost
from poseidon.planning.route import Route, Routes
from poseidon.units import Kind, Load, Unit

LAYER_BY_LAYER = "layer by layer"
"""Name of the plan in which every unit takes its own cheapest route."""
FASTEST_SERVED_BITS = 30e9
"""Above this rate, measured between programs, CPUs rather than links limit what goes through host memory. Nothing above
25 Gbit/s was tested."""


@dataclass(frozen=True)
class PlanEntry:
    """The decision for one unit."""

    unit: str
    kind: Kind
    shape: tuple[tuple[int, ...], ...]
    """Shapes of the unit's parameters."""
    rows: float | None
    """Load on one worker that decided it; None where no route depends on the load or none was seen."""
    route: str
    why: str
    costs: dict[str, Cost]
    """Every route that was possible."""
    is_lossy: bool = False
    """The user allowed loss for this unit, and its route has some."""

    @property
    def cost(self) -> Cost:
        """Cost of the chosen route."""
        return self.costs[self.route]

    @property
    def exact_bytes(self) -> float:
        """Bytes of the best exact route; of the chosen one, if that is exact."""
        if not self.is_lossy:
            return self.cost.wire_bytes
        others = [cost for name, cost in self.costs.items() if name != self.route]
        return min(others, key=lambda cost: cost.seconds, default=self.cost).wire_bytes


@dataclass(frozen=True)
class Tried:
    """One whole plan among those that were compared before one was kept."""

    name: str
    predicted_s: float
    """Step time according to the simulator."""
    measured_s: float | None
    """Median step time on the slowest worker; None if the plan was not tried."""


@dataclass(frozen=True)
class Plan:
    """A route for every unit; print it to see the table."""

    cluster: Cluster
    entries: tuple[PlanEntry, ...]
    name: str = LAYER_BY_LAYER
    """Which of the candidates it is (``planning/candidates.py``)."""
    tried: tuple[Tried, ...] = ()
    """The plans that were compared, this one included; empty where none were."""
    is_remembered: bool = False
    """The comparison is from an earlier run."""

    @property
    def routes(self) -> dict[str, str]:
        """Unit name to route name."""
        return {entry.unit: entry.route for entry in self.entries}

    @property
    def wire_bytes(self) -> float:
        """Bytes one machine sends per step under this plan."""
        return sum(entry.cost.wire_bytes for entry in self.entries)

    @property
    def allreduce_bytes(self) -> float:
        """Bytes one machine would send per step if every unit took allreduce."""
        return sum(entry.costs.get("allreduce", entry.cost).wire_bytes for entry in self.entries)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "cluster": self.cluster.to_dict(),
            "entries": [asdict(entry) for entry in self.entries],
            "wire_bytes": self.wire_bytes,
            "allreduce_bytes": self.allreduce_bytes,
            "name": self.name,
            "tried": [asdict(one) for one in self.tried],
        }

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        from poseidon.planning.table import format_plan

        return format_plan(self)


def make_plan(
    units: Sequence[Unit],
    loads: Mapping[str, Load],
    cluster: Cluster,
    routes: Routes,
    overrides: Mapping[str, str] | None = None,
) -> Plan:
    """Choose for every unit the route with the lowest estimated time; ties go to the first in ``routes``.

    ``loads`` holds the load on linear and embedding units by name; a unit without an entry travels in full.
    ``overrides`` maps unit names or patterns (``"head.*"``) to routes; the first that matches and is possible wins.
    """
    overrides = dict(overrides or {})
    check_overrides(units, overrides, routes)
    return Plan(cluster, tuple(_decide(unit, loads.get(unit.name), cluster, routes, overrides) for unit in units))


def whole_routes(plan: Plan, units: Sequence[Unit], routes: Routes) -> list[str]:
    """Return by which exact route each unit travels under a plan where its full gradient must, as after no_sync().

    As planned if that is in full. Otherwise as most of the plan's full gradients do, since whole plans were compared;
    without any, by what is cheapest.
    """
    full_bytes: dict[str, int] = {}
    for unit, entry in zip(units, plan.entries, strict=True):
        if _carries_whole(routes[entry.route]):
            full_bytes[entry.route] = full_bytes.get(entry.route, 0) + unit.size_bytes
    ranked = sorted(full_bytes, key=full_bytes.__getitem__, reverse=True)
    return [_whole_route(unit, entry, ranked, routes) for unit, entry in zip(units, plan.entries, strict=True)]


def _whole_route(unit: Unit, entry: PlanEntry, ranked: Sequence[str], routes: Routes) -> str:
    if _carries_whole(routes[entry.route]):
        return entry.route
    for name in ranked:
        if routes[name].accepts(unit):
            return name
    cheapest = sorted(entry.costs, key=lambda name: entry.costs[name].seconds)
    return next((name for name in cheapest if _carries_whole(routes[name])), routes.first_for(unit).name)


def _carries_whole(route: Route) -> bool:
    return route.delivers == "gradients" and not route.is_lossy


def server_beats_nccl(cluster: Cluster, defers: bool) -> bool:
    """Return whether to offer the parameter server where NCCL over TCP could carry gradients between devices.

    The server stages gradients in host memory, but it compacts them, urgent layers overtake the others, and its threads
    sleep where NCCL's spin. That pays off where gradients may land in the next forward (``defers``) and no GPUs of one
    machine combine first; measured at 10 and 25 Gbit/s (``docs/performance.md``). Without deferring, networks bound by
    the wire gain too, but others lose: a gradient takes longer to become its mean.
    """
    return defers and server_rivals_nccl(cluster)


def server_rivals_nccl(cluster: Cluster) -> bool:
    """Return whether the parameter server may be as fast as NCCL over TCP between devices, so that it can be tried."""
    return cluster.workers_per_machine == 1 and cluster.between.bits_per_s <= FASTEST_SERVED_BITS


def check_overrides(units: Sequence[Unit], overrides: Mapping[str, str], routes: Routes) -> None:
    """Raise :class:`ConfigError` for a pattern that matches nothing or a route that its units cannot take."""
    for pattern, name in overrides.items():
        route = routes[name]
        matched = [unit for unit in units if fnmatch.fnmatchcase(unit.name, pattern)]
        if not matched:
            names = ", ".join(unit.name for unit in units[:8]) + (", ..." if len(units) > 8 else "")
            raise ConfigError(f"routes: no unit matches {pattern!r}; the model's units are {names}")
        if not any(route.accepts(unit) for unit in matched):
            known = ", ".join(other.name for other in routes.for_unit(matched[0]))
            raise ConfigError(
                f"routes: {pattern!r} cannot take {name!r}: {matched[0].name} is {matched[0].kind}; it can take {known}"
            )


def _decide(unit: Unit, load: Load | None, cluster: Cluster, routes: Routes, overrides: Mapping[str, str]) -> PlanEntry:
    possible = routes.for_unit(unit)
    if not possible:
        raise ConfigError(f"{unit.name}: none of the routes {', '.join(routes)} can carry a {unit.kind} unit")
    costs = _costs(unit, load, cluster, [route for route in possible if route.is_offered(cluster)])
    wanted = find_forced(unit, overrides, possible)
    ranks = {name: rank for rank, name in enumerate(routes)}
    name = min(costs, key=lambda each: (costs[each].seconds, ranks[each]))
    if unit.is_sparse:
        why = "sparse gradients were asked for"
    elif cluster.workers > 1:
        why = _reason(routes[name], possible, costs, unit, load)
    else:
        why = "one worker: nothing to exchange"
    if wanted is not None and cluster.workers > 1:
        costs = {**_costs(unit, load, cluster, [wanted]), **costs}
        costs.setdefault(wanted.name, Cost(0.0, 0.0, 0.0))
        why = _say_price(unit, costs[name], costs[wanted.name], name, wanted)
        name = wanted.name
    return PlanEntry(
        unit=unit.name,
        kind=unit.kind,
        shape=tuple(p.shape for p in unit.parameters),
        rows=None if load is None or unit.kind == "dense" else load.rows,
        route=name,
        why=why,
        costs=costs,
        is_lossy=routes[name].loses(unit),
    )


def _say_price(unit: Unit, exact: Cost, asked: Cost, name: str, wanted: Route) -> str:
    """Say why a unit takes the route that was asked for; of a lossy one, what it saves."""
    if not wanted.is_lossy:
        return "asked for"
    if not wanted.loses(unit):
        return f"too small for {wanted.name}: exact"
    if asked.wire_bytes >= exact.wire_bytes:
        return f"lossy, asked for; {name} would be exact, with no more bytes"
    return f"lossy, asked for: {exact.wire_bytes / max(asked.wire_bytes, 1.0):.3g}x fewer bytes than {name}"


def find_forced(unit: Unit, overrides: Mapping[str, str], possible: Sequence[Route]) -> Route | None:
    """Return the route that the user's overrides force on a unit, if any."""
    for pattern, name in overrides.items():
        if fnmatch.fnmatchcase(unit.name, pattern):
            for route in possible:
                if route.name == name:
                    return route
    return None


def _costs(unit: Unit, load: Load | None, cluster: Cluster, possible: Sequence[Route]) -> dict[str, Cost]:
    found = {route.name: route.cost(unit, load, cluster) for route in possible}
    return {name: cost for name, cost in found.items() if cost is not None}


def _reason(route: Route, possible: Sequence[Route], costs: Mapping[str, Cost], unit: Unit, load: Load | None) -> str:
    if unit.kind != "dense" and (load is None or load.rows <= 0):
        return "no rows seen in backward"
    short = [other.name for other in possible if other.name in costs and other.delivers != "gradients"]
    if route.delivers == "gradients" and not short:
        return f"no cheaper exact form; {route.note}" if route.note else "no cheaper exact form"
    # A full gradient is compared with the short form, and vice versa.
    others = short if route.delivers == "gradients" else [name for name in costs if name != route.name]
    other = min(others, key=lambda name: costs[name].seconds)
    if costs[other].seconds <= 0:
        return "nothing to exchange"
    gain = costs[other].seconds / max(costs[route.name].seconds, 1e-12)
    byte_gain = costs[other].wire_bytes / max(costs[route.name].wire_bytes, 1e-12)
    if byte_gain >= 1:
        return f"{byte_gain:.1f}x fewer bytes than {other}"
    return f"{gain:.1f}x faster than {other}"
