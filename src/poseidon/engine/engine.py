"""Runs one backward after another: holds units, plan, exchangers and schedules, and the step under way.

A front end calls :meth:`Engine.arm` before a forward, :meth:`Engine.begin_backward` when the first gradient is due,
:meth:`Engine.parameter_ready` as each parameter's gradient becomes final, :meth:`Engine.give` with factors where
:meth:`Engine.collects` asks for them instead of a gradient, and :meth:`Engine.end_backward`. There are three front
ends: ``hooks.py`` for PyTorch's autograd, ``caffe/distributed.py`` for Caffe nets, and ``outside.py`` for frameworks
that hand over arrays.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from poseidon.engine.backward import Backward, Flight, LiveSchedule
from poseidon.engine.options import Options
from poseidon.engine.rollcall import RollCall
from poseidon.engine.schedules import Schedules
from poseidon.engine.step import Phase, Step
from poseidon.errors import UnsupportedError
from poseidon.job.closing import Stage, at_exit
from poseidon.planning.cluster import Cluster
from poseidon.planning.planner import Plan
from poseidon.planning.route import Routes
from poseidon.routes.base import Brought, LiveUnit
from poseidon.team.team import Team
from poseidon.units import Load


@dataclass(frozen=True)
class Landing:
    """A closed backward, whose gradients may still be under way."""

    flights: Sequence[Flight]
    must_land: bool
    """Some landing is collective, so all workers must land everything now, in this order."""


@dataclass(frozen=True)
class _StaticGraph:
    """What the first backward of a static graph showed."""

    additions: tuple[int, ...]
    """By parameter: how often its gradient accumulates."""
    used: tuple[bool, ...]
    """By parameter: whether any worker uses it."""


class Engine:
    """Exchanges the gradients of a model's units, backward by backward.

    ``routes`` defaults to those that suit the team and its devices. Construction is collective.
    """

    def __init__(
        self,
        units: Sequence[LiveUnit],
        team: Team,
        cluster: Cluster,
        options: Options,
        routes: Routes | None = None,
    ) -> None:
        self.units = units
        self.team = team
        self.cluster = cluster
        self.options = options
        self.step = 0
        self.batch = 0
        self.is_armed = False
        """Whether the next backward exchanges gradients (false under no_sync and before any forward)."""
        self.divide_by_active = False
        """Under join(): average over the workers that still have input, not over all."""
        self.parameters: tuple[nn.Parameter, ...] = tuple(p for unit in units for p in unit.parameters)
        """All parameters, in the order of the units."""
        self._number_of = {parameter: number for number, parameter in enumerate(self.parameters)}
        self._schedules = Schedules(units, team, cluster, options, routes)
        self._static: _StaticGraph | None = None
        self._has_local_gradients = False
        self._factor_dtypes: dict[int, torch.dtype | None] = {}
        """By unit: dtype of the last factors seen."""
        self._backward: Backward | None = None
        """The current backward, or the last one."""
        self._failure: BaseException | None = None
        self._lock = threading.RLock()
        self._keep_open = at_exit(Stage.EXCHANGES, self.detach)

    # What a front end calls.

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before the end of the first backward."""
        return self._schedules.plan

    @property
    def planned(self) -> LiveSchedule | None:
        """The schedule of that plan."""
        return self._schedules.planned

    def mark_rounded(self, parameters: Collection[nn.Parameter]) -> None:
        """Let these parameters, whose rounded values suffice, travel apart. Equal on all workers, before the plan."""
        self._schedules.mark_rounded(parameters)

    @property
    def short_units(self) -> frozenset[str]:
        """Names of the units whose planned route carries factors or rows instead of full gradients."""
        planned = self._schedules.planned
        if planned is None:
            return frozenset()
        return frozenset(unit.name for unit in self.units if self._schedules.delivers(planned, unit) != "gradients")

    @property
    def phase(self) -> Phase:
        """Phase of the last backward; ``LANDED`` before the first one."""
        return Phase.LANDED if self._backward is None else self._backward.step.phase

    @property
    def unused(self) -> list[nn.Parameter]:
        """Parameters for which no worker has a gradient in the last backward, once that is settled."""
        verdict = None if self._backward is None else self._backward.step.verdict
        if verdict is None:
            return []
        return [parameter for number, parameter in enumerate(self.parameters) if not verdict.is_used(number)]

    @property
    def failure(self) -> BaseException | None:
        """The error that broke the exchange; the replicas may differ after it."""
        return self._failure

    def fail(self, error: BaseException) -> None:
        """Record that the exchange is broken; keeps the first error."""
        self._failure = self._failure or error
        if self._backward is not None:
            self._backward.step.fail(error)

    @property
    def in_backward(self) -> bool:
        """Whether a backward that exchanges gradients is under way."""
        return self.phase is Phase.OPEN

    @property
    def is_observing(self) -> bool:
        """Whether the front end should record the load of linear and embedding units, for the first plan."""
        return self.plan is None

    def observe(self, unit: LiveUnit, load: Load, factor_dtype: torch.dtype | None = None) -> None:
        """Record load on a unit in this backward, and the dtype its factors would have."""
        self._schedules.observe(unit, load)
        if factor_dtype is not None:
            self._factor_dtypes[unit.index] = factor_dtype

    def local_gradient(self) -> None:
        """Record that a backward without an exchange accumulated local gradients."""
        self._has_local_gradients = True

    def collects(self, unit: LiveUnit) -> bool:
        """Whether this backward wants the unit's factors instead of its gradient."""
        backward = self._backward
        if backward is None or backward.step.phase is not Phase.OPEN:
            return False
        return self._schedules.delivers(backward.live, unit) == "factors"

    def makes_rows(self, unit: LiveUnit) -> bool:
        """Whether the next backward wants the unit's gradient in sparse form."""
        planned = None if self.will_be_dense() else self._schedules.planned
        return self.is_armed and planned is not None and self._schedules.delivers(planned, unit) == "rows"

    def give(self, unit: LiveUnit, x: Tensor, g: Tensor) -> None:
        """Add the factors of one call of a linear unit to the backward under way. Thread-safe."""
        assert self._backward is not None
        self._backward.brought[unit.index].give(x, g)

    def arm(self, is_armed: bool, batch: int) -> None:
        """Set, before a forward, whether its backward exchanges gradients, and the size of its batch."""
        phase = self.phase
        if phase is Phase.OPEN or (phase is not Phase.LANDED and not self.options.defers):
            raise UnsupportedError(
                f"rank {self.team.rank}: backward {self.step} was interrupted by an error, so the replicas may differ; "
                "restart from a checkpoint"
            )
        self.is_armed, self.batch = is_armed, batch
        self.team.watch.note(self.step, "in forward")

    def will_be_dense(self) -> bool:
        """Whether the next backward sends full gradients only: before the first plan, and after no_sync."""
        return self._schedules.planned is None or self._has_local_gradients

    def begin_backward(
        self, unused: Collection[nn.Parameter] = (), is_dense: bool | None = None, is_joined: bool = False
    ) -> bool:
        """Start an exchange unless one is under way; return whether it started. ``unused`` get no gradient here."""
        with self._lock:
            if self.in_backward:
                return False
            is_dense = self.will_be_dense() if is_dense is None else is_dense
            live = self._schedules.dense if is_dense or self._schedules.planned is None else self._schedules.planned
            left_out = {self._number_of[parameter] for parameter in unused}
            tells_used = self.options.allow_unused and not self.options.static_graph
            used = tuple(number not in left_out for number in range(len(self.parameters))) if tells_used else ()
            call = RollCall(self.step, is_dense, self.batch, is_joined, used)
            stopwatch = self._schedules.make_stopwatch(live)
            expected = None if self._static is None else self._static.additions
            step = Step(live.schedule, call, self.options.static_graph, expected, takes_times=stopwatch is not None)
            brought = [self._prepare(unit, live) for unit in self.units]
            backward = Backward(live, step, self.team, brought, stopwatch)
            # Not earlier: once it is visible, another autograd thread gives its factors without taking the lock.
            self._backward = backward
            self.team.watch.note(self.step, "in backward")
            backward.begin(left_out)
            return True

    def parameter_ready(self, parameter: nn.Parameter, is_dense: bool = False) -> None:
        """Record that a parameter's gradient is final; ``is_dense``: a full gradient is in ``.grad``."""
        with self._lock:
            assert self._backward is not None
            self._backward.gradient(self._number_of[parameter], is_dense)

    def end_backward(self) -> None:
        """Complete the exchange; on return every ``.grad`` is the mean over all workers."""
        forgotten = self.close_backward()
        landing = self.settle()
        for flight in landing.flights:
            flight.land()
        self._rescale()
        self.check_forgotten(forgotten)

    def close_backward(self) -> list[nn.Parameter]:
        """Start all remaining items; return the parameters that received no gradient.

        The exchange continues in the background; call :meth:`settle` before the next backward begins.
        """
        backward = self._backward
        assert backward is not None
        self.team.watch.note(self.step, "at the end of backward")
        with self._lock:
            forgotten = backward.close()
        for unit, brought in zip(self.units, backward.brought, strict=True):
            self._factor_dtypes[unit.index] = brought.factor_dtype
        self._has_local_gradients = False
        return [self.parameters[number] for number in forgotten]

    def settle(self) -> Landing:
        """Read the others' roll calls for the closed backward, replan if due, and return what is under way.

        The means are in ``.grad`` once every flight has landed.
        """
        backward = self._backward
        assert backward is not None
        verdict = backward.hear(self._complete_calls)
        flights = backward.flights()
        self._schedules.settle(backward)
        self.team.watch.note(self.step, "finished backward")
        self.step += 1
        return Landing(flights, verdict.must_land)

    def check_forgotten(self, forgotten: Sequence[nn.Parameter]) -> None:
        """Raise if some parameters got no gradient in a closed backward although they should have."""
        assert self._backward is not None
        if forgotten and not (self._backward.step.call.is_joined or self.options.static_graph):
            raise self._forgotten_error(forgotten)

    def shadow_backward(self, is_dense: bool) -> None:
        """Take part in a backward for which this worker has no input, so that the others can proceed."""
        for parameter in self.parameters:
            parameter.grad = None
        self.begin_backward(unused=self.parameters, is_dense=is_dense, is_joined=True)
        self.end_backward()

    def close(self) -> None:
        """Stop the background threads of this engine and its team."""
        self.detach()
        self.team.close()

    def detach(self) -> None:
        """Flush what is queued for other workers and stop this engine's background threads; the team stays open."""
        self._keep_open()
        self._schedules.close()

    # One step.

    def _prepare(self, unit: LiveUnit, live: LiveSchedule) -> Brought:
        brought = Brought(self._factor_dtypes.get(unit.index))
        if self._schedules.delivers(live, unit) == "rows" and not unit.spec.is_sparse:
            brought.kept, unit.weight.grad = unit.weight.grad, None
        return brought

    def _complete_calls(self, calls: Sequence[RollCall]) -> Sequence[RollCall]:
        """Fill in which parameters are used, if a static graph's first backward recorded them. Collective then."""
        if not self.options.static_graph:
            return calls
        if self._static is None:
            assert self._backward is not None
            counted = self._backward.step.additions
            additions = tuple(counted[number] for number in range(len(self.parameters)))
            everybody = self.team.gather_ints([int(count > 0) for count in additions])
            used = tuple(any(column) for column in zip(*everybody, strict=True))
            self._static = _StaticGraph(additions, used)
        return [replace(call, used=self._static.used) for call in calls]

    def _rescale(self) -> None:
        assert self._backward is not None
        verdict = self._backward.step.verdict
        assert verdict is not None
        if self.divide_by_active and 0 < verdict.active < len(verdict.calls):
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(len(verdict.calls) / verdict.active)

    def _forgotten_error(self, parameters: Sequence[nn.Parameter]) -> UnsupportedError:
        names = [self._schedules.model.parameters[self._number_of[parameter]].name for parameter in parameters]
        some = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        return UnsupportedError(
            f"rank {self.team.rank}: {len(parameters)} parameter(s) got no gradient in step {self.step - 1}: {some}. "
            "Do all outputs of forward() take part in the loss? If some parameters are unused on purpose, pass "
            "find_unused_parameters=True, or freeze them with requires_grad_(False) before wrapping"
        )
