"""The plan of a model, and schedules bound to tensors and exchangers.

Everything a plan depends on is the same on all workers, so they all switch plans in the same step. Methods are
collective where they say so.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from poseidon.engine.backward import Backward, LiveSchedule
from poseidon.engine.options import Options
from poseidon.engine.replanning import Replanning
from poseidon.engine.stopwatch import Stopwatch
from poseidon.planning.cluster import Cluster
from poseidon.planning.ordering import order_by_need
from poseidon.planning.planner import Plan, server_beats_nccl
from poseidon.planning.route import Delivery, Routes
from poseidon.planning.schedule import Model, Packing, Schedule, make_schedule
from poseidon.planning.transfers import Conditions
from poseidon.routes.base import Context, Exchanger, LiveItem, LiveUnit, can_be_served
from poseidon.routes.buckets import Bucket
from poseidon.routes.catalogue import COLLECTIVES, standard_routes
from poseidon.team.nccl import nccl_uses_sockets
from poseidon.team.team import Team
from poseidon.units import Load

_TIMED_BACKWARD = 3
"""Which backward of a new plan is timed; the earlier ones still allocate memory and select kernels."""


class Schedules:
    """How the units of one model travel, before and after the first plan.

    ``routes`` defaults to those that suit the team and its devices. Construction is collective.
    """

    def __init__(
        self, units: Sequence[LiveUnit], team: Team, cluster: Cluster, options: Options, routes: Routes | None
    ) -> None:
        self._units = units
        self._team = team
        self._cluster = cluster
        self._options = options
        self._parameters: tuple[nn.Parameter, ...] = tuple(p for unit in units for p in unit.parameters)
        is_cuda = any(parameter.is_cuda for parameter in self._parameters)
        self._context = Context(team, cluster, is_cuda)
        self._exchangers: dict[str, Exchanger] = {}
        self.routes = self._choose_routes(is_cuda) if routes is None else routes
        specs = [unit.spec for unit in units]
        # A sparse gradient shares no bucket with others.
        lone = [unit.index if unit.spec.is_sparse else -1 for unit in units for _ in unit.parameters]
        kinds = [(str(p.dtype), str(p.device), place) for p, place in zip(self._parameters, lone, strict=True)]
        self.model = Model.of(specs, kinds)
        self._planning = Replanning(specs, cluster, self.routes, options.routes)
        self._order = list(reversed(range(len(units))))
        """Units in the order in which their gradients are expected to become final."""
        self.dense = self._make_live([self.routes.first_for(spec).name for spec in specs])
        """Full gradients only."""
        self.planned: LiveSchedule | None = None
        self._backwards = 0
        """Number of backwards run with the planned schedule."""

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before the end of the first backward."""
        return self._planning.plan

    def observe(self, unit: LiveUnit, load: Load) -> None:
        """Record load on a unit, for the first plan."""
        self._planning.observe(unit.name, load)

    def delivers(self, live: LiveSchedule, unit: LiveUnit) -> Delivery:
        """Return what a schedule needs from a unit: its gradient, factors or rows."""
        return self.routes[live.schedule.route_of[unit.index]].delivers

    def settle(self, backward: Backward) -> None:
        """Learn from a closed backward, and replan if due. Collective."""
        assert backward.step.verdict is not None
        self._reorder_if_timed(backward)
        if not any(call.is_joined for call in backward.step.verdict.calls):
            self._plan_if_due(backward)

    def close(self) -> None:
        """Flush queued data, and stop the threads of all routes."""
        self._context.close()
        for exchanger in self._exchangers.values():
            exchanger.close()

    def _choose_routes(self, is_cuda: bool) -> Routes:
        topology, gathers = self._team.topology, self._options.gather_factors
        return standard_routes(
            offers_server=self._offers_server(),
            gathers_factors=is_cuda and self._team.is_nccl if gathers is None else gathers,
            combines_first=topology.has_levels and topology.is_even and not is_cuda,
        )

    def _offers_server(self) -> bool:
        if not all(map(can_be_served, self._parameters)):
            return False
        beats = server_beats_nccl(self._cluster, self._options.defers)
        return not self._team.is_nccl or (beats and nccl_uses_sockets(self._team))

    def _plan_if_due(self, backward: Backward) -> None:
        """Make the first plan after the first backward, and a new one when the batch has changed permanently."""
        assert backward.step.verdict is not None
        calls = backward.step.verdict.calls
        batch = sum(call.batch for call in calls) / len(calls)
        if self.plan is None:
            self._order = self._team.gather_ints(backward.step.ready_order, "the order of gradients")[0]
            self._adopt(self._planning.make(self._common_loads(), batch))
        elif self._planning.is_due(batch):
            self._adopt(self._planning.make(self._planning.scaled_loads(batch), batch))

    def _common_loads(self) -> dict[str, Load]:
        """Return the largest load of any worker for each unit. Collective."""
        special = [unit for unit in self._units if unit.spec.kind != "dense"]
        mine = [self._planning.loads.get(unit.name, Load(0)) for unit in special]
        everybody = self._team.gather_ints([word for load in mine for word in (round(load.rows), load.value_bytes)])
        loads = {}
        for i, unit in enumerate(special):
            rows = max(words[2 * i] for words in everybody)
            if rows > 0:
                loads[unit.name] = Load(rows, max(words[2 * i + 1] for words in everybody))
        return loads

    def _adopt(self, plan: Plan) -> None:
        self._backwards = 0
        self.planned = self._make_live([entry.route for entry in plan.entries])
        # The dense schedule's buffers are needed again only after no_sync; a new one allocates them then.
        self.dense = self._make_live(self.dense.schedule.route_of)

    def _make_live(self, route_of: Sequence[str]) -> LiveSchedule:
        """Make a schedule and bind it to tensors and exchangers. Collective."""
        options = self._options
        packing = Packing(self._cluster, options.bucket_bytes, options.defers)
        schedule = make_schedule(
            self.model, route_of, self._order, self.routes, packing, self._planning.loads, options.defers
        )
        items = tuple(self._make_item(schedule, number) for number in range(len(schedule.items)))
        exchangers = {}
        for name in self.routes:
            mine = [item for item in items if item.item.route == name]
            if mine:
                exchangers[name] = self._exchanger(name)
                exchangers[name].prepare(mine)
        return LiveSchedule(schedule, items, exchangers)

    def _make_item(self, schedule: Schedule, number: int) -> LiveItem:
        item = schedule.items[number]
        parameters = tuple(self._parameters[p] for p in item.parameters)
        bucket = Bucket(parameters, self._options.keep_views) if item.is_packed else None
        return LiveItem(item, tuple(self._units[unit] for unit in item.units), parameters, bucket)

    def _exchanger(self, name: str) -> Exchanger:
        """Return the open exchanger of a route. Collective the first time, when it connects."""
        if name not in self._exchangers:
            self._exchangers[name] = self.routes[name].open(self._context)
        return self._exchangers[name]

    def make_stopwatch(self, live: LiveSchedule) -> Stopwatch[int] | None:
        """Time one backward after a plan: with deferred landing, the best order depends on these times."""
        if not self._options.defers or live is not self.planned:
            return None
        self._backwards += 1
        if self._backwards != _TIMED_BACKWARD:
            return None
        return Stopwatch(self._parameters[0].device)

    def _reorder_if_timed(self, backward: Backward) -> None:
        """Order collectives by when the next forward needs them, as far as they are ready."""
        stopwatch, planned = backward.stopwatch, self.planned
        if stopwatch is None or planned is None:
            return
        schedule = planned.schedule
        queue = schedule.queues.get(COLLECTIVES, ())
        conditions, rate = Conditions(self._cluster), self._cluster.between.bytes_per_s
        items = [schedule.items[number] for number in queue]
        transfers = [self.routes[item.route].transfers(item, conditions) for item in items]
        guessed_s = [sum(transfer.out_bytes for transfer in each) / rate for each in transfers]
        seconds = [*map(stopwatch.ready_s, queue), *(stopwatch.wire_s(queue) or guessed_s)]
        everybody = self._team.gather_ints([round(value * 1e6) for value in seconds], "the times of gradients")
        # A collective starts when the slowest worker is ready for it.
        slowest_s = [max(times) / 1e6 for times in zip(*everybody, strict=True)]
        order = order_by_need(slowest_s[: len(queue)], slowest_s[len(queue) :])
        if queue:
            self.planned = planned.reordered(COLLECTIVES, order)
