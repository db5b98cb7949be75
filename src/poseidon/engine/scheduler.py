"""Step 2 of the journey: ready units leave at once, by their route, in one order on all workers where it matters.

Before: ``hooks.py`` says that a unit's gradient (or its factors) is complete. After: a route under
``poseidon/routes`` carries it. Factors and rows that travel as addressed messages may leave in any order. Buckets,
and on GPUs factors too, travel by collectives, which must be issued in the same order everywhere: what is complete
early waits for what comes before it.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from poseidon.engine.buckets import Bucket
from poseidon.engine.schedule import Box, Gather, Item, Schedule
from poseidon.engine.stopwatch import Stopwatch
from poseidon.planning.cluster import Link
from poseidon.routes.allreduce import AllreduceRoute
from poseidon.routes.base import Exchange, LiveUnit
from poseidon.routes.factors import FactorsRoute
from poseidon.routes.gather import GatherExchange, GatherRoute
from poseidon.routes.pairs import Pairs
from poseidon.routes.rows import RowsRoute
from poseidon.team.team import PendingGather, Team

if TYPE_CHECKING:
    from poseidon.routes.sharded import ShardedRoute


class Routes:
    """One instance of each route, for one team; ``link`` is the one between machines."""

    def __init__(self, team: Team, is_cuda: bool, gather_factors: bool | None, link: Link) -> None:
        self.team = team
        self._link = link
        pairs = Pairs(team, pin_memory=is_cuda)
        self._pairs = pairs
        self.allreduce = AllreduceRoute(team)
        self.factors = FactorsRoute(team, pairs)
        self.rows = RowsRoute(team, pairs)
        use_gather = is_cuda and team.is_nccl if gather_factors is None else gather_factors
        self.gather = GatherRoute(team, self.factors) if use_gather else None
        self._is_cuda = is_cuda
        self._sharded: ShardedRoute | None = None
        # A script may end right after its last step: others may still wait for what is queued here, and a thread that
        # is inside PyTorch while the interpreter is torn down would abort the process.
        atexit.register(self.close)

    @property
    def sharded(self) -> ShardedRoute:
        """The parameter server. Its connections are made when it is first asked for, which is collective."""
        if self._sharded is None:
            # Imported here: plans without a server can do without the wire.
            from poseidon.routes.sharded import ShardedRoute

            self._sharded = ShardedRoute(self.team, self._is_cuda, self._link)
        return self._sharded

    def close(self) -> None:
        """Let what is queued for others leave, and end the background threads; runs at the interpreter's exit too."""
        atexit.unregister(self.close)
        self._pairs.close()
        self.allreduce.close()
        if self._sharded is not None:
            self._sharded.close()


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

    def __init__(
        self,
        schedule: Schedule,
        routes: Routes,
        step: int,
        compares_flags: bool = False,
        stopwatch: Stopwatch[Item] | None = None,
    ) -> None:
        self._schedule = schedule
        self.stopwatch = stopwatch
        """Takes the times at which items become complete, if they are wanted."""
        self._routes = routes
        self._step = step
        self._missing = {item: len(item.parameters) for item in [*schedule.collectives, *schedule.boxes]}
        self._queues = [schedule.collectives]
        if schedule.boxes and routes.sharded.needs_order:
            self._queues.append(schedule.boxes)
        self._nexts = [0 for _ in self._queues]
        self._in_order = {item for queue in self._queues for item in queue}
        self._messages: dict[int, Flight] = {}
        self._items: dict[Item, Flight] = {}
        gathers = sum(isinstance(item, Gather) for item in schedule.collectives)
        messages = sum(route in ("factors", "rows") for route in schedule.route_of.values()) - gathers
        self._unflagged = gathers + messages if compares_flags or gathers else 0
        """Flights still to leave before the workers can tell each other what is out of the ordinary about them."""
        self._flags: PendingGather | None = None

    def ready(self, unit: LiveUnit) -> None:
        """Take note that every gradient of the unit is final, and start whatever that completes."""
        if unit.parameters[0] in self._schedule.item_of:
            for parameter in unit.parameters:
                item = self._schedule.item_of[parameter]
                self._missing[item] -= 1
                if self._missing[item] == 0:
                    self._complete(item)
            self._start_in_order()
            return
        is_factors = self._schedule.route_of[unit.index] == "factors"
        route = self._routes.factors if is_factors else self._routes.rows
        flags = int(unit.has_dense)
        self._messages[unit.index] = Flight(unit.parameters, route.start(unit, self._step), flags=flags)
        self._count_flags()

    def close(self) -> None:
        """Nothing more will leave in this backward."""
        assert not any(self._missing.values()), "a unit was never reported ready"

    def hear_flags(self) -> bool:
        """Learn what all workers said about their flights; true if anything was out of the ordinary."""
        if self._flags is None:
            return False
        by_flight = list(zip(*self._flags("the others' flags"), strict=True))
        for flight, flags in zip(self._flagged(), by_flight, strict=True):
            if isinstance(flight.exchange, GatherExchange):
                flight.exchange.heed(flags)
        return any(any(flags) for flags in by_flight)

    def flights(self) -> list[Flight]:
        """Return everything under way, in an order in which all workers may let it land.

        Messages first: most left early, and what they bring is worked on while the last bucket travels. By number and
        not as they left, because a part that came another way makes landing one collective.
        """
        items = [*self._schedule.collectives, *self._schedule.boxes]
        return [flight for _, flight in sorted(self._messages.items())] + [self._items[item] for item in items]

    def _complete(self, item: Item) -> None:
        if self.stopwatch is not None:
            self.stopwatch.mark_ready(item)
        if item not in self._in_order:
            self._items[item] = self._start(item)

    def _start_in_order(self) -> None:
        for number, queue in enumerate(self._queues):
            while self._nexts[number] < len(queue) and self._missing[queue[self._nexts[number]]] == 0:
                item = queue[self._nexts[number]]
                flight = self._items[item] = self._start(item)
                self._nexts[number] += 1
                if isinstance(item, Gather):
                    self._count_flags()
                if self.stopwatch is not None:
                    self.stopwatch.mark_landed(item, flight.exchange.join_stream)

    def _start(self, item: Item) -> Flight:
        if isinstance(item, Bucket):
            return Flight(item.parameters, self._routes.allreduce.start(item.pack(), item.name), item)
        if isinstance(item, Box):
            bucket = item.bucket
            exchange: Exchange = self._routes.sharded.start(bucket.pack(), item.slot, self._step, bucket.name)
            return Flight(bucket.parameters, exchange, bucket)
        assert self._routes.gather is not None
        gather = self._routes.gather.start(item.unit, self._step, item.capacity, item.value_bytes)
        return Flight(item.unit.parameters, gather, flags=int(gather.flags))

    def _count_flags(self) -> None:
        """Once the last flight that has flags has left, tell the others, long before anybody needs to know.

        At the end of backward a message would queue behind all the gradients that are still under way.
        """
        self._unflagged -= 1
        if self._unflagged == 0:
            self._flags = self._routes.team.start_gather([flight.flags for flight in self._flagged()])

    def _flagged(self) -> list[Flight]:
        gathers = [self._items[item] for item in self._schedule.collectives if isinstance(item, Gather)]
        return [flight for _, flight in sorted(self._messages.items())] + gathers
