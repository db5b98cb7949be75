"""A plan made concrete: which gradients travel together, by which route, and what must keep an order. Pure.

The engine runs it (``engine/step.py``), the simulator simulates it (``sim/``). Parameters are numbered across the whole
model, in the order of the units, and everything here is the same on all workers.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from poseidon.planning.cluster import Cluster
from poseidon.planning.packing import assign_buckets, even_buckets
from poseidon.planning.route import Route, Routes
from poseidon.planning.shipments import Sending, share_messages
from poseidon.units import Load, ParameterSpec, Unit


@dataclass(frozen=True)
class Item:
    """What travels as one message or collective; it starts when the gradients of all its parameters are final."""

    number: int
    """Position in the schedule."""
    route: str
    name: str
    parameters: tuple[int, ...]
    """Numbers of the parameters, in the order in which they become ready."""
    units: tuple[int, ...]
    """Numbers of the units they belong to."""
    specs: tuple[Unit, ...]
    """Specs of those units."""
    numel: int
    itemsize: int
    """Bytes per value."""
    priority: int = 0
    """Lower is more urgent: what becomes ready last in backward is needed first by the next forward."""
    is_packed: bool = True
    """Full gradients in a bucket; otherwise one unit in a short form."""
    load: Load | None = None
    """The planned load of a unit that travels alone."""
    shipment: tuple[int, ...] = ()
    """Units in a short form that share messages with this one, itself included; empty: it has its own."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the full gradients."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Model:
    """The units of a model and the numbers of their parameters."""

    units: tuple[Unit, ...]
    kinds: tuple[Hashable, ...]
    """By parameter: only parameters of one kind (such as dtype and device) share an item."""

    @classmethod
    def of(cls, units: Sequence[Unit], kinds: Sequence[Hashable] | None = None) -> Model:
        """Return the model of these units; without ``kinds``, the element size is a parameter's kind."""
        if kinds is None:
            kinds = [parameter.itemsize for unit in units for parameter in unit.parameters]
        return cls(tuple(units), tuple(kinds))

    @cached_property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """All parameters, by number."""
        return tuple(parameter for unit in self.units for parameter in unit.parameters)

    @cached_property
    def unit_of(self) -> tuple[int, ...]:
        """By parameter: the number of its unit."""
        return tuple(number for number, unit in enumerate(self.units) for _ in unit.parameters)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """By unit: how many parameters it has."""
        return tuple(len(unit.parameters) for unit in self.units)

    @cached_property
    def parameters_of(self) -> tuple[range, ...]:
        """By unit: the numbers of its parameters."""
        ranges, start = [], 0
        for unit in self.units:
            ranges.append(range(start, start + len(unit.parameters)))
            start += len(unit.parameters)
        return tuple(ranges)


@dataclass(frozen=True)
class Schedule:
    """A fixed assignment of units to routes and items; used for many steps."""

    model: Model
    route_of: tuple[str, ...]
    """By unit."""
    items: tuple[Item, ...]
    """In the order in which they are expected to become ready."""
    queues: Mapping[str, tuple[int, ...]]
    """By queue: items that start in this order on all workers; any other item starts when it is ready."""
    flagged: tuple[int, ...]
    """Items whose flags the workers compare, in the order in which the flags are sent."""

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """By item: how many parameters it has."""
        return tuple(len(item.parameters) for item in self.items)

    @cached_property
    def queue_of(self) -> dict[int, str]:
        """Item to queue, for those that have one."""
        return {number: queue for queue, numbers in self.queues.items() for number in numbers}

    @cached_property
    def item_of(self) -> dict[int, int]:
        """Parameter to item."""
        return {parameter: item.number for item in self.items for parameter in item.parameters}

    @cached_property
    def landing_order(self) -> tuple[int, ...]:
        """Items in an order in which all workers can land them.

        Units that travel alone come first: most left early, and their gradients are rebuilt while the last bucket
        travels. Among them, messages come before collectives, which complete one after the other. They are ordered by
        unit and not by departure, because a full gradient beside the short form makes landing collective.
        """
        by_unit = sorted(self.items, key=lambda item: (item.number in self.queue_of, item.units))
        alone = [item.number for item in by_unit if not item.is_packed]
        queued = [number for queue in self.queues.values() for number in queue]
        return tuple(dict.fromkeys([*alone, *queued, *range(len(self.items))]))

    def reordered(self, queue: str, order: Sequence[int]) -> Schedule:
        """Return the schedule with one queue reordered; ``order`` holds current positions in that queue."""
        present = self.queues[queue]
        return replace(self, queues={**self.queues, queue: tuple(present[position] for position in order)})


@dataclass(frozen=True)
class Packing:
    """How to group parameters into items."""

    cluster: Cluster
    asked_bytes: int | None = None
    """The user's limit; None: each route's default."""
    defers: bool = False
    """Landing may wait until the next forward needs it."""
    is_even: bool = False
    """Buckets are equally large, as in torch's class; otherwise they shrink towards the end of backward."""

    def pack(self, route: Route, sizes: Sequence[tuple[Hashable, int]], units: Sequence[int]) -> list[list[int]]:
        """Return which of a route's parameters, given as (kind, bytes) and by unit, share an item."""
        if not route.is_packed:
            return _by_unit(units)
        limit_bytes = route.limit_bytes(self.asked_bytes, self.defers, self.cluster)
        is_even = self.is_even and not route.is_lossy
        return even_buckets(sizes, limit_bytes) if is_even else assign_buckets(sizes, limit_bytes)


def make_schedule(
    model: Model,
    route_of: Sequence[str],
    order: Sequence[int],
    routes: Routes,
    packing: Packing,
    loads: Mapping[str, Load] | None = None,
    always_compares: bool = False,
) -> Schedule:
    """Pack the units of each route into items; ``order`` holds unit numbers in the order expected to become ready.

    Flags are compared for items whose route has them, if ``always_compares`` or if one of those routes has a queue: an
    item sent as separate messages carries its flags along, a collective cannot.
    """
    loads = loads or {}
    place = {unit: position for position, unit in enumerate(order)}
    found: list[tuple[int, Item]] = []
    for route in (routes[name] for name in dict.fromkeys(route_of)):
        mine = [unit for unit in _packed_order(route, order) if route_of[unit] == route.name]
        members = [p for unit in mine for p in model.parameters_of[unit]]
        units = [model.unit_of[p] for p in members]
        sizes = [(model.kinds[p], model.parameters[p].size_bytes) for p in members]
        groups = packing.pack(route, sizes, units)
        for position, group in enumerate(groups):
            item = _make_item(model, route, [members[i] for i in group], loads)
            last = max(place[units[member]] for member in group)
            found.append((last, replace(item, priority=len(groups) - position)))
    found.sort(key=lambda pair: pair[0])
    items = tuple(replace(item, number=number) for number, (_, item) in enumerate(found))
    items = _with_shipments(items, place, routes, packing.cluster)
    queues: dict[str, list[int]] = {}
    for item in items:
        queue = routes[item.route].queue
        if queue is not None:
            queues.setdefault(queue, []).append(item.number)
    flagged = _flagged(items, routes, always_compares)
    return Schedule(model, tuple(route_of), items, {name: tuple(queue) for name, queue in queues.items()}, flagged)


def _packed_order(route: Route, order: Sequence[int]) -> Sequence[int]:
    """Return the order in which units share items: as they become ready, or one that never changes."""
    return sorted(order, reverse=True) if route.is_lossy else order


def _flagged(items: Sequence[Item], routes: Routes, always_compares: bool) -> tuple[int, ...]:
    carrying = [item for item in items if routes[item.route].has_flags]
    if not always_compares and all(routes[item.route].queue is None for item in carrying):
        return ()
    # By unit: the same order on all workers, whatever becomes ready first.
    return tuple(item.number for item in sorted(carrying, key=lambda item: item.units))


def _with_shipments(
    items: tuple[Item, ...], place: Mapping[int, int], routes: Routes, cluster: Cluster
) -> tuple[Item, ...]:
    """Note which items share messages."""
    sent = [item for item in items if routes[item.route].shares_messages]
    sendings = [_sending(item, place[item.units[0]], routes[item.route], cluster) for item in sent]
    shipment_of = {}
    for group in share_messages(sendings, cluster.crossing.bytes_per_s):
        units = tuple(unit for index in group for unit in sent[index].units)
        shipment_of.update({sent[index].number: units for index in group if len(group) > 1})
    return tuple(replace(item, shipment=shipment_of.get(item.number, ())) for item in items)


def _sending(item: Item, place: int, route: Route, cluster: Cluster) -> Sending:
    cost = route.cost(item.specs[0], item.load, cluster)
    return Sending(place, route.name, 0.0 if cost is None else cost.wire_bytes, route.delivers == "rows")


def _make_item(model: Model, route: Route, parameters: Sequence[int], loads: Mapping[str, Load]) -> Item:
    units = tuple(dict.fromkeys(model.unit_of[p] for p in parameters))
    first, last = model.units[units[0]].name, model.units[units[-1]].name
    specs = [model.parameters[p] for p in parameters]
    return Item(
        number=-1,
        route=route.name,
        name=first if first == last else f"{first} ... {last}",
        parameters=tuple(parameters),
        units=units,
        specs=tuple(model.units[unit] for unit in units),
        numel=sum(spec.numel for spec in specs),
        itemsize=specs[0].itemsize,
        is_packed=route.is_packed,
        load=loads.get(first) if len(units) == 1 else None,
    )


def _by_unit(units: Sequence[int]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for position, unit in enumerate(units):
        groups.setdefault(unit, []).append(position)
    return list(groups.values())
