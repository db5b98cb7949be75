"""Step 2 of the journey: ready units leave at once, by their route, in one order on all workers where it matters.

Before: ``hooks.py`` says that a unit's gradient (or its factors) is complete. After: a route under
``poseidon/routes`` carries it. Factors and rows that travel as addressed messages may leave in any order. Buckets,
and on GPUs factors too, travel by collectives, which must be issued in the same order everywhere: what is complete
early waits for what comes before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from poseidon.engine.buckets import Bucket, assign_buckets
from poseidon.routes.allreduce import AllreduceRoute
from poseidon.routes.base import Exchange, LiveUnit
from poseidon.routes.factors import FactorsRoute
from poseidon.routes.gather import GatherExchange, GatherRoute
from poseidon.routes.pairs import Pairs
from poseidon.routes.rows import RowsRoute
from poseidon.team.team import PendingGather, Team


class Routes:
    """One instance of each route, for one team."""

    def __init__(self, team: Team, is_cuda: bool, gather_factors: bool | None) -> None:
        self.team = team
        pairs = Pairs(team, pin_memory=is_cuda)
        self._pairs = pairs
        self.allreduce = AllreduceRoute(team)
        self.factors = FactorsRoute(team, pairs)
        self.rows = RowsRoute(team, pairs)
        use_gather = is_cuda and team.is_nccl if gather_factors is None else gather_factors
        self.gather = GatherRoute(team, self.factors) if use_gather else None

    def close(self) -> None:
        """End the background threads."""
        self._pairs.close()
        self.allreduce.close()


@dataclass(frozen=True)
class Gather:
    """A unit whose factors travel by a collective, and the size that was planned for them."""

    unit: LiveUnit
    capacity: int
    value_bytes: int


class Schedule:
    """A fixed assignment of units to routes and collectives; used for many steps.

    ``order`` holds unit numbers as they are expected to become ready. Everything here must be the same on all workers.
    """

    def __init__(
        self,
        units: Sequence[LiveUnit],
        route_of: Mapping[int, str],
        order: Sequence[int],
        bucket_bytes: int,
        keep_views: bool,
        gathers: Sequence[Gather] = (),
    ) -> None:
        self.route_of = dict(route_of)
        place = {unit: i for i, unit in enumerate(order)}
        members = [(i, p) for i in order if route_of[i] == "allreduce" for p in units[i].parameters]
        sizes = [((str(p.dtype), str(p.device)), p.numel() * p.element_size()) for _, p in members]
        collectives: list[tuple[int, Bucket | Gather]] = [(place[gather.unit.index], gather) for gather in gathers]
        for chosen in assign_buckets(sizes, bucket_bytes):
            names = [units[members[i][0]].name for i in chosen]
            bucket = Bucket([members[i][1] for i in chosen], _bucket_name(names), keep_views)
            collectives.append((place[members[chosen[-1]][0]], bucket))
        self.collectives = [item for _, item in sorted(collectives, key=lambda pair: pair[0])]
        self.collective_of: dict[nn.Parameter, int] = {}
        for number, item in enumerate(self.collectives):
            for parameter in item.parameters if isinstance(item, Bucket) else item.unit.parameters:
                self.collective_of[parameter] = number


@dataclass(eq=False)
class Flight:
    """Gradients under way together: what left, and where it goes when it lands."""

    parameters: Sequence[nn.Parameter]
    exchange: Exchange
    bucket: Bucket | None = None
    flags: int = 0
    """Whatever is out of the ordinary about this worker's part; landing may then need all workers at once."""

    def land(self, is_used: Mapping[nn.Parameter, bool]) -> None:
        """Wait for the means and leave them in ``.grad``."""
        self.exchange.finish()
        if self.bucket is not None:
            self.bucket.unpack([is_used.get(p, True) for p in self.parameters])


class Scheduler:
    """Runs one backward of a :class:`Schedule`: counts what is ready and starts what can start.

    Not thread-safe; the engine holds a lock around it.
    """

    def __init__(self, schedule: Schedule, routes: Routes, step: int) -> None:
        self._schedule = schedule
        self._routes = routes
        self._step = step
        self._missing = Counter(schedule.collective_of.values())
        self._next = 0
        self._messages: dict[int, Flight] = {}
        self._collectives: list[Flight] = []
        self._closing: PendingGather | None = None

    def ready(self, unit: LiveUnit) -> None:
        """Take note that every gradient of the unit is final, and start whatever that completes."""
        if unit.parameters[0] in self._schedule.collective_of:
            for parameter in unit.parameters:
                self._missing[self._schedule.collective_of[parameter]] -= 1
            self._start_collectives()
            return
        is_factors = self._schedule.route_of[unit.index] == "factors"
        route = self._routes.factors if is_factors else self._routes.rows
        flags = int(unit.has_dense)
        self._messages[unit.index] = Flight(unit.parameters, route.start(unit, self._step), flags=flags)

    def close(self, compares_flags: bool) -> None:
        """Nothing more will leave in this backward. With ``compares_flags`` the workers tell each other their flags."""
        assert self._next == len(self._schedule.collectives), "a unit was never reported ready"
        flags = [flight.flags for flight in self._flagged()]
        if flags and (compares_flags or self._gathers()):
            # On the host, which is far ahead of the device here.
            self._closing = self._routes.team.start_gather(flags)

    def hear_flags(self) -> bool:
        """Learn what all workers said when they closed; true if anything was out of the ordinary."""
        if self._closing is None:
            return False
        by_flight = list(zip(*self._closing("the end of backward"), strict=True))
        for flight, flags in zip(self._flagged(), by_flight, strict=True):
            if isinstance(flight.exchange, GatherExchange):
                flight.exchange.heed(flags)
        return any(any(flags) for flags in by_flight)

    def flights(self) -> list[Flight]:
        """Return everything under way, in an order in which all workers may let it land.

        Messages first: most left early, and what they bring is worked on while the last bucket travels. By number and
        not as they left, because a part that came another way makes landing one collective.
        """
        return [flight for _, flight in sorted(self._messages.items())] + self._collectives

    def _start_collectives(self) -> None:
        items = self._schedule.collectives
        while self._next < len(items) and self._missing[self._next] == 0:
            self._collectives.append(self._start(items[self._next]))
            self._next += 1

    def _start(self, item: Bucket | Gather) -> Flight:
        if isinstance(item, Bucket):
            return Flight(item.parameters, self._routes.allreduce.start(item.pack(), item.name), item)
        assert self._routes.gather is not None
        exchange = self._routes.gather.start(item.unit, self._step, item.capacity, item.value_bytes)
        return Flight(item.unit.parameters, exchange, flags=int(exchange.flags))

    def _gathers(self) -> list[Flight]:
        return [flight for flight in self._collectives if isinstance(flight.exchange, GatherExchange)]

    def _flagged(self) -> list[Flight]:
        return [flight for _, flight in sorted(self._messages.items())] + self._gathers()


def _bucket_name(units: Sequence[str]) -> str:
    first, last = units[0], units[-1]
    return first if first == last else f"{first} ... {last}"
