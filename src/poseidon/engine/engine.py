"""One backward after the other: holds units, plan and schedule together, and keeps all workers in step.

What a front end must tell the engine is small: :meth:`Engine.arm` before a forward, :meth:`Engine.begin_backward` when
the first gradient is due, :meth:`Engine.parameter_ready` as each parameter's gradient becomes final, factors
(``unit.give``) where :meth:`Engine.collects` says that they are wanted instead of a gradient, and
:meth:`Engine.end_backward`. Three do so: PyTorch's autograd in ``hooks.py``, Caffe nets in ``caffe/distributed.py``,
and ``outside.py`` for frameworks that hand over arrays.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from poseidon.engine.schedule import Gather, Item, Schedule
from poseidon.engine.scheduler import Flight, Routes, Scheduler
from poseidon.engine.stopwatch import Stopwatch
from poseidon.errors import MismatchError, UnsupportedError
from poseidon.planning.cluster import Cluster
from poseidon.planning.ordering import order_by_need
from poseidon.planning.packing import limit_collective
from poseidon.planning.planner import Plan, make_plan, server_beats_nccl
from poseidon.routes.base import LiveUnit, can_be_served
from poseidon.team.nccl import nccl_uses_sockets
from poseidon.team.team import PendingGather, Team
from poseidon.units import Load

_REPLAN_RATIO = 1.3
"""A batch that grows or shrinks by more than this makes a new plan worth while..."""
_REPLAN_AFTER = 2
"""... if it stays so for this many steps: the last batch of an epoch is often smaller, and the next one is not."""
_TIMED_BACKWARD = 3
"""Which backward of a new plan is timed; the first ones still allocate memory and choose kernels."""


@dataclass(frozen=True)
class Options:
    """How the engine works, as the user chose it."""

    bucket_bytes: int | None = None
    """Most bytes that travel together; None: as suits each route."""
    keep_views: bool = False
    """Leave ``.grad`` as a view into its bucket (torch calls it gradient_as_bucket_view)."""
    allow_unused: bool = False
    """Some parameters may get no gradient in some steps (torch calls it find_unused_parameters)."""
    static_graph: bool = False
    """Every backward is like the first: learn from it which gradients come, and how often each is added to."""
    gather_factors: bool | None = None
    """Factors travel by a collective (True) or by direct messages (False); None: by a collective where NCCL is."""
    routes: Mapping[str, str] | None = None
    """Routes that the user insists on, by unit name or pattern."""
    defers: bool = False
    """Gradients may land after the end of backward, each when it is needed (``update.py``)."""


@dataclass(frozen=True)
class RollCall:
    """What every worker says at the beginning of a backward."""

    step: int
    is_dense: int
    """1 if all units take allreduce in this backward, 0 if they follow the plan."""
    batch: int
    """Values in the inputs of this step, which stand for the size of the batch."""
    is_joined: int
    """1 if this worker has run out of input and only keeps the others company."""

    def check(self, other: RollCall, rank: int, other_rank: int) -> None:
        """Raise :class:`MismatchError` if the two workers are about to exchange different things."""
        if self.step != other.step:
            raise MismatchError(
                f"rank {rank} is in backward {self.step}, rank {other_rank} in backward {other.step}: some worker "
                "skipped or repeated one; give all workers equally many batches, or use join()"
            )
        if self.is_dense != other.is_dense and not (self.is_joined or other.is_joined):
            raise MismatchError(
                f"rank {rank} {self._says()} before backward {self.step}, rank {other_rank} {other._says()}: "
                "use no_sync() on all workers alike"
            )

    def _says(self) -> str:
        return "had gradients from no_sync()" if self.is_dense else "had none from no_sync()"


@dataclass(frozen=True)
class Landing:
    """A closed backward, whose gradients may still be under way."""

    flights: Sequence[Flight]
    calls: Sequence[RollCall]
    must_land: bool
    """Landing something here needs all workers at once, so all must let everything land now, in this order."""


class Engine:
    """Exchanges the gradients of a model's units, backward by backward."""

    def __init__(self, units: Sequence[LiveUnit], team: Team, cluster: Cluster, options: Options) -> None:
        self.units = units
        self.team = team
        self.cluster = cluster
        self.options = options
        self.step = 0
        self.batch = 0
        self.is_armed = False
        """Whether the next backward exchanges gradients (false under no_sync and before any forward)."""
        self.is_joined = False
        self.divide_by_active = False
        """Under join(): average over the workers that still have input, not over all."""
        self.plan: Plan | None = None
        is_cuda = any(p.is_cuda for unit in units for p in unit.parameters)
        self._routes = Routes(team, is_cuda, options.gather_factors, cluster.between)
        self._offers_server = all(can_be_served(p) for unit in units for p in unit.parameters) and (
            not team.is_nccl or (server_beats_nccl(cluster, options.defers) and nccl_uses_sockets(team))
        )
        self._unit_of = {p: unit for unit in units for p in unit.parameters}
        self._has_local_gradients = False
        self._order = list(reversed(range(len(units))))
        self._loads: dict[str, Load] = {}
        self._dense = self._schedule({unit.index: "rows" if unit.spec.is_sparse else "allreduce" for unit in units})
        self._planned: Schedule | None = None
        self._planned_backwards = 0
        self._planned_batch = 0.0
        self._odd_batches = 0
        self._additions: Counter[nn.Parameter] = Counter()
        """How often each parameter's gradient was added to in this backward."""
        self._expected: dict[nn.Parameter, int] | None = None
        """With a static graph: the same for the first backward, once it is over."""
        self.is_used: dict[nn.Parameter, bool] = {}
        """Whether any worker used a parameter in the last settled step; not in it: yes."""
        self._lock = threading.RLock()
        self._current: Schedule | None = None
        self._is_landing = False
        """Closed, but not all means are in ``.grad``; stays so if an error breaks it off."""

    # What a front end calls.

    @property
    def in_backward(self) -> bool:
        """Whether a backward that exchanges gradients is under way."""
        return self._current is not None

    @property
    def is_observing(self) -> bool:
        """Whether the front end should record the load of linear and embedding units, for the first plan."""
        return self.plan is None

    def observe(self, unit: LiveUnit, load: Load) -> None:
        """Record load on a unit in this backward; loads of several calls add up."""
        before = self._loads.get(unit.name, Load(0, load.value_bytes))
        self._loads[unit.name] = Load(before.rows + load.rows, max(before.value_bytes, load.value_bytes))

    def local_gradient(self) -> None:
        """Take note that a backward without exchange has left gradients behind."""
        self._has_local_gradients = True

    def collects(self, unit: LiveUnit) -> bool:
        """Whether this backward wants the unit's factors instead of its gradient."""
        return self._current is not None and self._current.route_of[unit.index] == "factors"

    def makes_rows(self, unit: LiveUnit) -> bool:
        """Whether the next backward wants the unit's gradient in sparse form."""
        planned = None if self.will_be_dense() else self._planned
        return self.is_armed and planned is not None and planned.route_of[unit.index] == "rows"

    def arm(self, is_armed: bool, batch: int) -> None:
        """Say, before a forward, whether the backward to come exchanges gradients, and the size of its batch."""
        if self._current is not None or (self._is_landing and not self.options.defers):
            raise UnsupportedError(
                f"rank {self.team.rank}: backward {self.step} was broken off by an error, so the replicas may differ; "
                "start again from a checkpoint"
            )
        self.is_armed, self.batch = is_armed, batch
        self.team.watch.note(self.step, "in forward")

    def will_be_dense(self) -> bool:
        """Whether the next backward sends all units by allreduce: before there is a plan, and after no_sync."""
        return self._planned is None or self._has_local_gradients

    def begin_backward(self, unused: Collection[nn.Parameter] = (), is_dense: bool | None = None) -> bool:
        """Start an exchange unless one is under way; ``unused`` will get no gradient here. True if it started."""
        with self._lock:
            if self._current is not None:
                return False
            is_dense = self.will_be_dense() if is_dense is None else is_dense
            current = self._dense if is_dense or self._planned is None else self._planned
            for unit in self.units:
                self._prepare(unit, current)
            # Not before: another thread of autograd that sees it gives its factors without waiting for the lock.
            self._current = current
            self.team.watch.note(self.step, "in backward")
            self._my_call = RollCall(self.step, int(is_dense), self.batch, int(self.is_joined))
            self._roll_call = self._start_roll_call(unused)
            stopwatch = self._make_stopwatch()
            self._scheduler = Scheduler(self._current, self._routes, self.step, self.options.defers, stopwatch)
            self._waiting = dict.fromkeys(self._unit_of)
            self._missing_of = {unit.index: len(unit.parameters) for unit in self.units}
            self._ready_order: list[int] = []
            self._additions.clear()
            for parameter in self._never_added() if self._expected is not None else unused:
                self._settle(parameter)
            return True

    def parameter_ready(self, parameter: nn.Parameter, is_dense: bool = False) -> None:
        """Take note that a parameter's gradient is final; ``is_dense``: a full gradient arrived in ``.grad``."""
        with self._lock:
            unit = self._unit_of[parameter]
            unit.has_dense |= is_dense
            self._additions[parameter] += 1
            if self.options.static_graph:
                if self._expected is None or self._additions[parameter] < self._expected[parameter]:
                    return
            elif parameter not in self._waiting:
                raise UnsupportedError(
                    f"{unit.name}: a parameter's gradient was finished twice in one backward. Re-entrant activation "
                    "checkpointing of shared layers does this; use checkpoint(..., use_reentrant=False), or pass "
                    "static_graph=True if every step does the same"
                )
            self._settle(parameter)

    def end_backward(self) -> None:
        """Complete the exchange: afterwards every ``.grad`` is the mean over all workers."""
        forgotten = self.close_backward()
        landing = self.settle()
        for flight in landing.flights:
            flight.land(self.is_used)
        self._rescale(landing.calls)
        self._is_landing = False
        self.check_forgotten(forgotten)

    def close_backward(self) -> list[nn.Parameter]:
        """Send off what has not left yet; return the parameters that no gradient came for.

        The exchange goes on in the background; :meth:`settle` must be called before the next backward begins.
        """
        assert self._current is not None
        self.team.watch.note(self.step, "at the end of backward")
        forgotten = [parameter for parameter in self._waiting if not self._additions[parameter]]
        # In the order in which gradients came, where a static graph is still being learnt.
        for parameter in [*(p for p in self._additions if p in self._waiting), *forgotten]:
            self._settle(parameter)
        self._scheduler.close()
        self._current = None
        self._is_landing = True
        self._has_local_gradients = False
        return forgotten

    def settle(self) -> Landing:
        """Learn what the others said about the closed backward, plan if that is due; return what is under way.

        The means are in ``.grad`` once each flight has landed.
        """
        calls = self._finish_roll_call()
        must_land = self._scheduler.hear_flags()
        flights = self._scheduler.flights()
        self._reorder_if_timed()
        if not any(call.is_joined for call in calls):
            self._plan_if_due(calls)
        self.team.watch.note(self.step, "finished backward")
        self.step += 1
        return Landing(flights, calls, must_land)

    def check_forgotten(self, forgotten: Sequence[nn.Parameter]) -> None:
        """Raise if a closed backward brought nothing for some parameters that should have had a gradient."""
        if forgotten and not (self.is_joined or self.options.static_graph):
            raise self._forgotten_error(forgotten)

    def shadow_backward(self, is_dense: bool) -> None:
        """Keep the others company in a backward for which this worker has no input."""
        for parameter in self._unit_of:
            parameter.grad = None
        self.is_joined = True
        try:
            self.begin_backward(unused=list(self._unit_of), is_dense=is_dense)
            self.end_backward()
        finally:
            self.is_joined = False

    def close(self) -> None:
        """End the background threads of this engine and its team."""
        self.detach()
        self.team.close()

    def detach(self) -> None:
        """End the background threads of this engine; its team goes on."""
        self._routes.close()

    # Inside.

    def _prepare(self, unit: LiveUnit, schedule: Schedule) -> None:
        unit.has_dense = False
        unit.is_used = True
        unit.pieces.clear()
        if schedule.route_of[unit.index] == "rows" and not unit.spec.is_sparse:
            unit.kept, unit.weight.grad = unit.weight.grad, None

    def _settle(self, parameter: nn.Parameter) -> None:
        """Nothing more will come for this parameter; its unit leaves when that holds for all of its parameters."""
        self._waiting.pop(parameter, None)
        unit = self._unit_of[parameter]
        self._missing_of[unit.index] -= 1
        if self._missing_of[unit.index] == 0:
            self._ready_order.append(unit.index)
            self._scheduler.ready(unit)

    def _make_stopwatch(self) -> Stopwatch[Item] | None:
        """Take times in one backward after a plan: where landing is deferred the best order rests on them."""
        if not self.options.defers or self._current is not self._planned:
            return None
        self._planned_backwards += 1
        if self._planned_backwards != _TIMED_BACKWARD:
            return None
        return Stopwatch(self.units[0].parameters[0].device)

    def _reorder_if_timed(self) -> None:
        """Let collectives leave in the order in which the next forward needs them, as far as they are ready."""
        stopwatch, planned = self._scheduler.stopwatch, self._planned
        if stopwatch is None or planned is None:
            return
        items = planned.collectives
        rate, machines = self.cluster.between.bytes_per_s, self.cluster.machines
        guessed_s = [item.wire_bytes(machines) / rate for item in items]
        seconds = [*map(stopwatch.ready_s, items), *(stopwatch.wire_s(items) or guessed_s)]
        everybody = self.team.gather_ints([round(value * 1e6) for value in seconds], "the times of gradients")
        # A collective leaves when the slowest worker is ready for it.
        slowest_s = [max(times) / 1e6 for times in zip(*everybody, strict=True)]
        planned.reorder(order_by_need(slowest_s[: len(items)], slowest_s[len(items) :]))

    def _never_added(self) -> list[nn.Parameter]:
        return [parameter for parameter, count in (self._expected or {}).items() if count == 0]

    def _start_roll_call(self, unused: Collection[nn.Parameter]) -> PendingGather:
        call = self._my_call
        words = [call.step, call.is_dense, call.batch, call.is_joined]
        if self.options.allow_unused and not self.options.static_graph:
            left_out = set(unused)
            words += [int(parameter not in left_out) for parameter in self._unit_of]
        return self.team.start_gather(words)

    def _finish_roll_call(self) -> list[RollCall]:
        """Return what everybody said; learn which parameters anybody uses."""
        rows = self._roll_call("the others to start backward")
        calls = [RollCall(*row[:4]) for row in rows]
        for rank, call in enumerate(calls):
            self._my_call.check(call, self.team.rank, rank)
        used = [row[4:] for row in rows]
        if self.options.static_graph and self._expected is None:
            self._expected = {parameter: self._additions[parameter] for parameter in self._unit_of}
            used = self.team.gather_ints([int(count > 0) for count in self._expected.values()])
        if used[0]:
            anybody = [any(column) for column in zip(*used, strict=True)]
            self.is_used = dict(zip(self._unit_of, anybody, strict=True))
        for unit in self.units:
            unit.is_used = any(self.is_used.get(parameter, True) for parameter in unit.parameters)
        return calls

    def _rescale(self, calls: Sequence[RollCall]) -> None:
        active = sum(not call.is_joined for call in calls)
        if self.divide_by_active and 0 < active < len(calls):
            for parameter in self._unit_of:
                if parameter.grad is not None:
                    parameter.grad.mul_(len(calls) / active)

    def _plan_if_due(self, calls: Sequence[RollCall]) -> None:
        """Make the first plan after the first backward; make a new one when the batch has changed for good.

        Everything this rests on is the same on all workers, so they change over together.
        """
        batch = sum(call.batch for call in calls) / len(calls)
        if self.plan is None:
            self._order = self.team.gather_ints(self._ready_order, "the order of gradients")[0]
            self._loads = self._common_loads()
            self._adopt_plan(batch)
            return
        ratio = batch / self._planned_batch if self._planned_batch else 1.0
        self._odd_batches = self._odd_batches + 1 if not 1 / _REPLAN_RATIO <= ratio <= _REPLAN_RATIO else 0
        if self._odd_batches >= _REPLAN_AFTER:
            self._loads = {name: Load(load.rows * ratio, load.value_bytes) for name, load in self._loads.items()}
            self._adopt_plan(batch)

    def _common_loads(self) -> dict[str, Load]:
        """Return the largest load of any worker for each unit."""
        special = [unit for unit in self.units if unit.spec.kind != "dense"]
        mine = [self._loads.get(unit.name, Load(0)) for unit in special]
        everybody = self.team.gather_ints([word for load in mine for word in (round(load.rows), load.value_bytes)])
        loads = {}
        for i, unit in enumerate(special):
            rows = max(words[2 * i] for words in everybody)
            if rows > 0:
                loads[unit.name] = Load(rows, max(words[2 * i + 1] for words in everybody))
        return loads

    def _adopt_plan(self, batch: float) -> None:
        specs = [unit.spec for unit in self.units]
        self.plan = make_plan(specs, self._loads, self.cluster, self.options.routes, self._offers_server)
        self._planned_batch = batch
        self._odd_batches = 0
        self._planned_backwards = 0
        routes = self.plan.routes
        self._planned = self._schedule({unit.index: routes[unit.name] for unit in self.units})
        # The dense schedule's buffers are only needed again after no_sync; a fresh one allocates them then.
        self._dense = self._schedule(self._dense.route_of)

    def _schedule(self, route_of: Mapping[int, str]) -> Schedule:
        gathers = [
            Gather(
                unit, capacity=math.ceil(self._loads[unit.name].rows), value_bytes=self._loads[unit.name].value_bytes
            )
            for unit in self.units
            if self._routes.gather is not None and route_of[unit.index] == "factors" and unit.name in self._loads
        ]
        options = self.options
        bucket_bytes = limit_collective(options.bucket_bytes, options.defers)
        served_bytes, book = 0, None
        if "sharded" in route_of.values():
            served_bytes = self._routes.sharded.limit_bucket(options.bucket_bytes)
            book = self._routes.sharded.book
        return Schedule(
            self.units, route_of, self._order, bucket_bytes, options.keep_views, gathers, served_bytes, book
        )

    def _forgotten_error(self, parameters: Sequence[nn.Parameter]) -> UnsupportedError:
        names = {
            p: spec.name for unit in self.units for p, spec in zip(unit.parameters, unit.spec.parameters, strict=True)
        }
        some = ", ".join(names[p] for p in parameters[:5]) + (", ..." if len(parameters) > 5 else "")
        return UnsupportedError(
            f"rank {self.team.rank}: {len(parameters)} parameter(s) got no gradient in step {self.step - 1}: {some}. "
            "Do all outputs of forward() take part in the loss? If some parameters are unused on purpose, pass "
            "find_unused_parameters=True, or freeze them with requires_grad_(False) before wrapping"
        )
