"""Runs one backward after another: holds units, plan, exchangers and schedules, and the step under way.

A front end calls :meth:`Engine.arm` before a forward, :meth:`Engine.begin_backward` when the first gradient is due,
:meth:`Engine.parameter_ready` as each parameter's gradient becomes final, :meth:`Engine.give` with factors where
:meth:`Engine.collects` asks for them instead of a gradient, and :meth:`Engine.end_backward`. There are three front
ends: ``hooks.py`` for PyTorch's autograd, ``caffe/distributed.py`` for Caffe nets, and ``outside.py`` for frameworks
that hand over arrays.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from poseidon.engine.backward import Backward, Landing, LiveSchedule
from poseidon.engine.options import Options
from poseidon.engine.replicas import ReplicaCheck
from poseidon.engine.rollcall import RollCall
from poseidon.engine.scaling import Gradients, copy_gradients, gradients_aside, scale_to_active
from poseidon.engine.schedules import Schedules
from poseidon.engine.shortfalls import Shortfalls
from poseidon.engine.static_graph import StaticGraph
from poseidon.engine.step import Phase, Step, Verdict
from poseidon.engine.telling import PlanTelling
from poseidon.errors import MismatchError, UnsupportedError
from poseidon.job.closing import Stage, at_exit
from poseidon.planning.cluster import Cluster
from poseidon.planning.planner import Plan
from poseidon.planning.route import Delivery, Route, Routes
from poseidon.routes.base import Brought, LiveUnit
from poseidon.team.team import Team
from poseidon.team.verify import difference_text, find_differences
from poseidon.units import Load

_NOTHING: frozenset[int] = frozenset()


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
        # From each worker's own environment, but only equal parts of the model can be compared.
        agreed = team.gather_ints([options.check_interval], "how often to compare replicas")[0][0]
        self.options = options = replace(options, check_interval=agreed)
        self.step = 0
        self.batch = 0
        self.samples = 0
        """Samples of all forwards so far, as far as they are known."""
        self.taken = 0
        """A sum of the optimizer's steps so far, where a policy takes them; compared in the next roll call."""
        self.is_armed = False
        """Whether the next backward exchanges gradients (false under no_sync and before any forward)."""
        self._is_passing = False
        """Whether the last step exchanged no gradients, as local steps do; then there is nothing to plan."""
        self.divide_by_active = False
        """Under join(): average over the workers that still have input, not over all."""
        self._before: Gradients = {}
        """Then: what gradients were when the backward began."""
        self._is_scaled = True
        """Whether the routes divide by the number of workers; a user's hook decides by itself."""
        self.parameters: tuple[nn.Parameter, ...] = tuple(p for unit in units for p in unit.parameters)
        """All parameters, in the order of the units."""
        self._number_of = {parameter: number for number, parameter in enumerate(self.parameters)}
        self._schedules = Schedules(units, team, cluster, options, routes)
        self._compared: Sequence[nn.Parameter] = self.parameters
        """Parameters of which all workers hold the same bits."""
        self._replicas = ReplicaCheck(self._compared, options.check_interval)
        self._static = StaticGraph()
        self.local: set[int] = set()
        """Parameters into whose gradients a backward without an exchange has accumulated since the last exchange."""
        self._early: frozenset[int] = _NOTHING
        """Parameters whose gradients of the backward that is about to begin are in ``.grad`` already."""
        self.is_bypassed = False
        """Whether somebody took gradients of the model by torch.autograd.grad() since the last exchange."""
        self._backward: Backward | None = None
        """The current backward, or the last one."""
        self.compares_flags = False
        """Whether workers compare flags of the last closed backward, so that landing it may be collective."""
        self._shortfalls = Shortfalls(team.rank, [one.name for one in self._schedules.model.parameters])
        self.last_error = ""
        """Text of the last error that this engine raised for the user's doing."""
        self._failure: BaseException | None = None
        self._lock = threading.RLock()
        self._keep_open = at_exit(Stage.EXCHANGES, self.detach)
        self.has_cuda = any(parameter.is_cuda for parameter in self.parameters)
        self._telling = PlanTelling(team, cluster, self.has_cuda)

    # What a front end calls.

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before the end of the first backward."""
        return self._schedules.plan

    @property
    def planned(self) -> LiveSchedule | None:
        """The schedule of that plan."""
        return self._schedules.planned

    def mark_rounded(self, parameters: Collection[nn.Parameter], tables: Collection[nn.Parameter]) -> None:
        """Let these parameters, whose rounded values suffice, travel apart, and ``tables`` among them each alone.

        Equal on all workers, before the plan.
        """
        self._schedules.mark_rounded(parameters, tables)
        # One worker may hold exact values where another one holds rounded ones.
        self._compared = [parameter for parameter in self.parameters if parameter not in parameters]
        self._replicas = ReplicaCheck(self._compared, self.options.check_interval)

    @property
    def is_choosing(self) -> bool:
        """Whether the first plan is still to be made, or other plans to be tried."""
        return self._schedules.is_choosing

    def keep_forms(self) -> None:
        """Try no plan in which other layers travel in a short form than in the first: the model is compiled."""
        self._schedules.keeps_forms = True

    @property
    def lands_at_once(self) -> bool:
        """Whether the backward under way must land at its end, although the policy could defer that."""
        return self._schedules.plan is None or self._schedules.lands_at_once

    @property
    def short_units(self) -> frozenset[str]:
        """Names of the units whose planned route carries factors or rows instead of full gradients."""
        planned = self._schedules.planned
        if planned is None:
            return frozenset()
        return frozenset(unit.name for unit in self.units if planned.deliveries[unit.index] != "gradients")

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
        backward = self._backward  # asked for every gradient
        return backward is not None and backward.step.phase is Phase.OPEN

    @property
    def is_observing(self) -> bool:
        """Whether the front end should record the load of linear and embedding units, for the first plan."""
        return self.plan is None and not self._is_passing

    def observe(self, unit: LiveUnit, load: Load) -> None:
        """Record load on a unit in this backward."""
        self._schedules.observe(unit, load)

    def ask_for_comparison(self) -> None:
        """Have all workers compare their parameters soon: something but an update has changed them here."""
        self._replicas.ask()

    def local_gradient(self, parameter: nn.Parameter) -> None:
        """Record that a backward without an exchange accumulated into a parameter's gradient."""
        self.local.add(self._number_of[parameter])

    def is_local(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter's gradient holds that of a backward without an exchange."""
        return self._number_of[parameter] in self.local

    def forget_cleared(self) -> None:
        """Forget gradients of backwards without an exchange that somebody has cleared since."""
        with torch._C.DisableTorchFunctionSubclass():  # parameters may be pending
            self.local = {number for number in self.local if self.parameters[number].grad is not None}

    def expect_early(self, parameters: Iterable[nn.Parameter]) -> None:
        """Record, before a backward begins, whose ``.grad`` holds what it has brought: that is to be averaged, too."""
        if not self.in_backward:
            self._early = frozenset(self._number_of[parameter] for parameter in parameters)

    def forget_local(self, parameters: Iterable[nn.Parameter]) -> None:
        """Record that the gradients of these parameters were cleared; others than the engine's do not matter."""
        self.local.difference_update(self._number_of.get(parameter, -1) for parameter in parameters)

    def collects(self, unit: LiveUnit) -> bool:
        """Whether this backward wants the unit's factors instead of its gradient."""
        backward = self._backward
        if backward is None or backward.step.phase is not Phase.OPEN:
            return False
        return "factors" in backward.live.deliveries[unit.index]

    def collects_head(self, unit: LiveUnit) -> bool:
        """Whether this backward wants the full gradient of a tied unit's head apart; not once that has left."""
        backward = self._backward
        if backward is None or backward.step.phase is not Phase.OPEN:
            return False
        return "head" in backward.live.deliveries[unit.index] and backward.brought[unit.index].early is None

    def makes_head(self, unit: LiveUnit) -> bool:
        """Whether the next backward wants that; :meth:`collects_head` tells for sure, once it is under way."""
        return "head" in self._will_deliver(unit)

    def makes_rows(self, unit: LiveUnit) -> bool:
        """Whether the next backward wants the unit's gradient in sparse form."""
        return "rows" in self._will_deliver(unit)

    def makes_factors(self, unit: LiveUnit) -> bool:
        """Whether the next backward wants the unit's factors; :meth:`collects` tells for sure, once it is under way."""
        return "factors" in self._will_deliver(unit)

    def _will_deliver(self, unit: LiveUnit) -> Delivery:
        planned = None if self.will_be_dense() else self._schedules.planned
        return planned.deliveries[unit.index] if self.is_armed and planned is not None else "gradients"

    def give(self, unit: LiveUnit, x: Tensor, g: Tensor) -> None:
        """Add the factors of one call of a linear unit to the backward under way. Thread-safe."""
        assert self._backward is not None
        self._backward.brought[unit.index].give(x, g)

    def give_head(self, unit: LiveUnit, gradient: Tensor, is_last: bool) -> None:
        """Add the full gradient of one call of a tied unit's head, which leaves if no other call can follow."""
        with self._lock:
            assert self._backward is not None
            self._backward.head(unit.index, gradient, is_last)

    def arm(self, is_armed: bool, batch: int, samples: int = 0) -> None:
        """Set, before a forward, whether its backward exchanges gradients, and the size of its batch.

        ``batch`` is any number that grows with it; ``samples`` is how many there are, for whoever watches the job.
        """
        if self._shortfalls.forgotten:
            self._complain(self._shortfalls.take_error(self.options.static_graph, self.step - 1))
        self._shortfalls.forgotten = None
        if self.local:
            self.forget_cleared()
        phase = self.phase
        if phase is Phase.OPEN or (phase is not Phase.LANDED and not self.options.defers):
            assert self._backward is not None
            self._complain(self._shortfalls.interrupted(self._backward.step, self.options.static_graph))
        self.is_armed, self.batch = is_armed, batch
        self.samples += samples
        self.team.watch.note(self.step, "in forward", samples)

    def will_be_dense(self) -> bool:
        """Whether the next backward sends full gradients only: before the first plan, and after no_sync."""
        return self._schedules.planned is None or bool(self.local)

    def begin_backward(
        self, unused: Collection[nn.Parameter] = (), is_dense: bool | None = None, is_joined: bool = False
    ) -> bool:
        """Start an exchange unless one is under way; return whether it started. ``unused`` get no gradient here."""
        with self._lock:
            if self.in_backward:
                return False
            if self.has_cuda and torch.cuda.is_current_stream_capturing():
                raise UnsupportedError(
                    f"rank {self.team.rank}: a backward is being captured as a CUDA graph; a replay would compute "
                    "gradients and exchange none of them; torch.compile saves the same launches"
                )
            self._is_passing = False
            is_dense = self.will_be_dense() if is_dense is None else is_dense
            if self._schedules.warm_up is not None:
                self._schedules.agree_on_warm_up()
            live = self._schedules.dense if is_dense or self._schedules.planned is None else self._schedules.planned
            left_out = {self._number_of[parameter] for parameter in unused}
            is_static = self.options.static_graph
            stopwatch = self._schedules.begin(live)
            step = Step(
                live.schedule,
                RollCall(
                    self.step,
                    is_dense,
                    self.batch,
                    is_joined,
                    *self._replicas.words(self.step, is_joined),
                    taken=self.taken,
                ),
                is_static,
                None if is_joined else self._static.additions,
                takes_times=stopwatch is not None,
                tells_used=not self._static.used if is_static else self.options.allow_unused,
                kept=self.local,
            )
            if self.divide_by_active:
                self._before = copy_gradients(self.parameters)
            # What travels as a gradient brings nothing else, so those units share an empty object.
            nothing = Brought()
            brought = [
                nothing if delivery == "gradients" else self._prepare(unit, live)
                for unit, delivery in zip(self.units, live.deliveries, strict=True)
            ]
            self._early = _NOTHING
            backward = Backward(live, step, self.team, brought, stopwatch)
            # Not earlier: once it is visible, another autograd thread gives its factors without taking the lock.
            self._backward = backward
            self.team.watch.note(self.step, "in backward")
            backward.begin(left_out)
            return True

    def parameter_ready(self, parameter: nn.Parameter, is_dense: bool = False) -> None:
        """Record that a parameter's gradient is final; ``is_dense``: a full gradient is in ``.grad``."""
        is_taken = self.gradient_ready(self._number_of[parameter], is_dense)
        assert is_taken, "a gradient came outside a backward"

    def number_of(self, parameter: nn.Parameter) -> int:
        """Return a parameter's number, for :meth:`gradient_ready`."""
        return self._number_of[parameter]

    def gradient_ready(self, number: int, is_dense: bool) -> bool:
        """Do what :meth:`parameter_ready` does, given the parameter's number; return false if no backward is open."""
        with self._lock:
            backward = self._backward
            if backward is None or backward.step.phase is not Phase.OPEN:
                return False
            try:
                backward.gradient(number, is_dense)
            except UnsupportedError as error:
                self.last_error = str(error)
                raise
            return True

    def end_backward(self) -> None:
        """Complete the exchange; on return every ``.grad`` is the mean over all workers."""
        self.close_backward()
        landing = self.settle()
        for flight in landing.flights:
            flight.land()
        self._rescale()

    def close_backward(self) -> bool:
        """Start all remaining items; return whether a parameter got no gradient although it should have.

        The next forward complains of that. Not this backward: the replicas will be equal when it has landed, and
        torch's class does not complain earlier. The exchange continues in the background; call :meth:`settle` before
        the next backward begins.
        """
        backward = self._backward
        assert backward is not None
        self.team.watch.note(self.step, "at the end of backward")
        with self._lock:
            forgotten = backward.close()
        self.compares_flags = bool(backward.live.schedule.flagged)
        self.local.clear()
        self.is_bypassed = False
        is_excused = self.options.static_graph and self._static.additions is None
        if backward.step.call.is_joined or is_excused or (self.options.allow_unused and not self.options.static_graph):
            forgotten = []
        if forgotten:
            self._shortfalls.note(forgotten)
            return True
        self._shortfalls.forgotten = _NOTHING  # in line: nearly all backwards are so
        return False

    def must_land(self) -> bool:
        """Wait for the others' flags of the closed backward; return whether landing it is collective."""
        assert self._backward is not None
        return self._backward.must_land()

    def settle(self) -> Landing:
        """Read the others' roll calls for the closed backward, replan if due, and return what is under way.

        The means are in ``.grad`` once every flight has landed.
        """
        backward = self._backward
        assert backward is not None
        verdict = backward.hear(self._static.used)
        if self.options.static_graph:
            self._static.learn(backward.step)
        if verdict.differing:
            self._explain(verdict)
        if not verdict.is_unanimous or verdict.calls[0].asks:
            active = [call for call in verdict.calls if not call.is_joined]
            self._replicas.hear(self.step, [call.changes for call in active], [call.asks for call in active])
        flights = backward.flights()
        self._schedules.settle(backward)
        if self.team.watch.recorder is not None and self._telling.told is not self.plan:
            self._telling.tell(self.plan, self.planned, self.step)
        self.team.watch.note(self.step, "finished backward")
        self.step += 1
        return Landing(flights, verdict.must_land)

    def pass_step(self) -> None:
        """Count a step that has used the worker's own gradients."""
        self._is_passing = True
        self.local.clear()
        self.team.watch.note(self.step, "finished backward")
        self.step += 1

    def shadow_backward(self, is_dense: bool) -> None:
        """Take part in a backward for which this worker has no input, so that the others can proceed.

        Its own gradients stay what they were: the others' means are for the others' next update.
        """
        local = set(self.local)
        self.local.clear()
        # The exchange writes into the buckets that views are parts of.
        with gradients_aside(self.parameters, clones=self.options.keep_views):
            self.begin_backward(unused=self.parameters, is_dense=is_dense, is_joined=True)
            self.end_backward()
        self.local = local

    def use_only(self, route: Route) -> None:
        """Exchange everything by one route from now on, which divides by itself. Collective, between steps."""
        if self.options.serves:
            raise UnsupportedError(f'{route.name!r} brings gradients back; with update="server" weights come back')
        if self.team.encrypts and not route.uses_wire:
            raise UnsupportedError(
                f"{route.name!r} sends by torch.distributed, which does not encrypt, but this job must be encrypted "
                "(POSEIDON_WIRE_ENCRYPT); train without it"
            )
        self._check_at_rest(f"the route {route.name!r}")
        self._schedules.close()
        options = replace(self.options, routes=None, tries=False)
        self._schedules = Schedules(self.units, self.team, self.cluster, options, Routes([route]))
        self._is_scaled = False
        # What a hook returns need not be equal on all workers: local SGD lets them drift apart.
        self._replicas = ReplicaCheck(self.parameters, 0)

    def set_static(self) -> None:
        """Declare before the first step that all will be alike."""
        self._check_at_rest("static_graph")
        self.options = replace(self.options, static_graph=True)

    def _check_at_rest(self, what: str) -> None:
        if self.step > 0 or self._backward is not None:
            self.last_error = (
                f"rank {self.team.rank}: {what} was set in step {self.step}; it should be called before training loop "
                "starts, right after the model is wrapped"
            )
            raise UnsupportedError(self.last_error)

    def close(self) -> None:
        """Stop the background threads of this engine and its team."""
        self.detach()
        self.team.close(self._failure)

    def detach(self) -> None:
        """Flush what is queued for other workers and stop this engine's background threads; the team stays open."""
        self._keep_open()
        self._schedules.close()

    # One step.

    def _prepare(self, unit: LiveUnit, live: LiveSchedule) -> Brought:
        brought = Brought()
        # Where a full gradient travels anyway, what it was before is averaged with it, as torch's class does.
        delivery = live.deliveries[unit.index]
        is_apart = delivery in ("rows", "rows and factors") and not (unit.spec.is_sparse or self.options.serves)
        if is_apart and self._number_of[unit.weight] in self._early:
            brought.holds_before = True
        elif is_apart:
            brought.kept, unit.weight.grad = unit.weight.grad, None
        return brought

    def _rescale(self) -> None:
        assert self._backward is not None
        verdict = self._backward.step.verdict
        assert verdict is not None
        if self._is_scaled and self.divide_by_active and 0 < verdict.active < len(verdict.calls):
            deliveries = self._backward.live.deliveries
            scale_to_active(self.units, deliveries, self._number_of, verdict, self._before)
        self._before = {}

    def _explain(self, verdict: Verdict) -> None:
        """Raise the error for replicas that differ, with the parameters' names. Collective."""
        active = [rank for rank, call in enumerate(verdict.calls) if not call.is_joined]
        specs = self._schedules.model.parameters
        named = [(specs[self._number_of[parameter]].name, parameter) for parameter in self._compared]
        with torch._C.DisableTorchFunctionSubclass():  # to look at parameters whose update is due, as they are
            odd = find_differences(self.team, named, active)
        raise MismatchError(difference_text(self.team, odd, verdict.differing, self.step))

    def _complain(self, error: UnsupportedError) -> None:
        self.last_error = str(error)
        raise error
