"""One engine per optimizer, created before the first forward of its parameters and ready for any backward.

Every collective call here happens at the same point of the script on all workers: when an optimizer is created, when a
forward or backward begins, when a step is taken.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from poseidon.auto.accumulation import Group
from poseidon.auto.averaging import take_over
from poseidon.auto.buffers import Buffers
from poseidon.auto.front_ends import AutoFrontEnd, GradientOwner
from poseidon.auto.local import LocalSteps
from poseidon.auto.owners import Census, find_holding, find_roots, holding_tensors
from poseidon.auto.step import ScriptStep
from poseidon.engine.assemble import assemble_engine
from poseidon.engine.options import Options
from poseidon.following.script_report import ScriptReport
from poseidon.following.streams import Streams
from poseidon.planning.cluster import Cluster
from poseidon.planning.lossy import LossyChoice
from poseidon.planning.planner import Plan
from poseidon.team.agree import check_same_model, describe
from poseidon.team.team import Team
from poseidon.team.verify import check_same_bits

_COMPARED_STEPS = (1, 10, 100, 1000)
"""Replicas are compared bit by bit before these steps of an optimizer, then before every thousandth."""


class Engines:
    """The engines of all optimizers, in order of creation."""

    def __init__(
        self,
        team: Team,
        census: Census,
        step: ScriptStep,
        streams: Streams,
        report: ScriptReport,
        local: LocalSteps | None = None,
        lossy: LossyChoice | None = None,
        accumulates: bool = False,
    ) -> None:
        self._team = team
        self._local = local
        self._lossy = lossy
        self._accumulates = accumulates
        self._census = census
        self._step = step
        self._streams = streams
        self._report = report
        self.adopted = 0
        """How many optimizers the script has made so far; the same on all workers."""
        self._owners: list[GradientOwner] = []
        self._owner_of: weakref.WeakKeyDictionary[Optimizer, GradientOwner] = weakref.WeakKeyDictionary()
        self._unowned: GradientOwner | None = None
        self._pending: list[GradientOwner] = []
        self._buffers = Buffers(team, report)
        self._cluster: Cluster | None = None
        self._waiting_for_forward: RemovableHandle | None = None

    def watch_again(self) -> None:
        """Watch parameters again that were moved, to a processor and back, say."""
        for owner in self._owners:
            for front_end in owner.front_ends:
                front_end.watch_again()

    @property
    def has_optimizer(self) -> bool:
        """Whether the script has an optimizer."""
        return any(owner.optimizer is not None for owner in self.living())

    @property
    def roots(self) -> list[nn.Module]:
        """The outermost modules in training, as known from optimizers and backward passes."""
        if len(self._owners) > 1:
            gc.collect()  # an unreachable optimizer may already be freed on one worker and not yet on another
        return list({id(root): root for owner in self.living() for root in owner.roots()}.values())

    def living(self) -> list[GradientOwner]:
        """Close the owners of optimizers that were freed, and return the others."""
        gone = [owner for owner in self._owners if owner.is_gone]
        if gone:
            self._owners = [owner for owner in self._owners if owner not in gone]
            for owner in gone:
                self._retire(owner)
        return self._owners

    def is_ours(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer is none of the script's."""
        return self._local is not None and self._local.owns(optimizer)

    def owner_of(self, optimizer: Optimizer) -> GradientOwner:
        """Return the owner that represents an optimizer. Collective the first time, when it is created."""
        if optimizer not in self._owner_of:
            self._owner_of[optimizer] = self._adopt(optimizer)
        return self._owner_of[optimizer]

    def train_without_optimizer(self, parameters: Sequence[nn.Parameter]) -> None:
        """Put parameters that no optimizer owns under an engine."""
        if self._unowned is None and parameters:
            self._unowned = GradientOwner("no optimizer", list)
            self._owners.append(self._unowned)
        if self._unowned is None:
            return
        everything = {id(p): p for p in [*self._unowned.parameters(), *parameters]}
        self._unowned.parameters = lambda: list(everything.values())

    def expect(self, owner: GradientOwner) -> None:
        """Create an engine for an owner's new parameters before the next forward."""
        if owner not in self._pending:
            self._pending.append(owner)
        if self._waiting_for_forward is None:
            self._waiting_for_forward = register_module_forward_pre_hook(self._before_forward)

    def look_for_strangers(self) -> None:
        """Find newly trainable parameters: layers that were frozen, parameter groups that were added."""
        for owner in self.living():
            if owner.strangers():
                self.expect(owner)

    def begin_backward(self) -> None:
        """Prepare for a backward. Collective if engines have yet to be created."""
        self.look_for_strangers()
        if self._pending:
            self._attach_pending(has_graph=True)
        for owner in self.living():
            for front_end in owner.front_ends:
                if self._is_local(owner):
                    front_end.engine.arm(False, self._step.values)
                elif front_end.prepare(self._step.values, owner.label):
                    self._say_each(owner)

    def flush(self, optimizer: Optimizer | None = None) -> None:
        """Exchange gradients of backwards that were not exchanged: an optimizer's, or all. Collective."""
        flushed = []
        for owner in self._asked(optimizer):
            for front_end in (*owner.front_ends, *owner.borrowed):
                if front_end.find_changes(owner.label):
                    self._say_each(owner)
                if front_end.flush(self._step.values):
                    flushed.append(front_end)
        if flushed:  # asked in every step, where there is rarely anything
            self._note_exchanged(flushed)

    def settle(self, optimizer: Optimizer | None = None) -> None:
        """Note that who asked for an optimizer's gradients, or for all, may have changed them."""
        for owner in self._asked(optimizer):
            for front_end in (*owner.front_ends, *owner.borrowed):
                front_end.settle()

    def _asked(self, optimizer: Optimizer | None) -> Sequence[GradientOwner]:
        return self.living() if optimizer is None else [self.owner_of(optimizer)]

    def _say_each(self, owner: GradientOwner) -> None:
        if self._accumulates:
            self._report.say(
                f"{owner.label}: gradients change between the backwards of a step, or before the step, so each "
                "backward is exchanged, as without --accumulate"
            )

    def exchange_each(self, owner: GradientOwner) -> None:
        """Exchange every backward of an owner from now on: its steps look at all of them (a closure)."""
        for front_end in (*owner.front_ends, *owner.borrowed):
            front_end.group.goes_each = True

    def note_step(self, owner: GradientOwner) -> None:
        """Note a step, or one that was skipped, and say what was learned of the backwards of each."""
        for front_end in (*owner.front_ends, *owner.borrowed):
            count = front_end.note_step()
            if count > 1 and self._accumulates:
                self._report.say(f"{owner.label}: a step has {count} backwards; the last one is exchanged")
            elif count > 1:
                self._report.say(
                    f"{owner.label}: each of the {count} backwards of a step is exchanged, so that .grad is the mean "
                    "after every one; if the script only adds them up, --accumulate exchanges once per step"
                )

    def _is_local(self, owner: GradientOwner) -> bool:
        """Whether the gradients of an owner stay with their worker."""
        return self._local is not None and owner.optimizer is not None

    def end_backward(self) -> bool:
        """Complete the running exchanges, copy worker 0's buffers, return whether gradients are fresh. Collective."""
        finished: list[AutoFrontEnd] = []
        for owner in self.living():
            for front_end in owner.front_ends:
                had_plan = front_end.engine.plan is not None
                if not front_end.finish():
                    continue
                finished.append(front_end)
                if front_end.engine.plan is not None and not had_plan:
                    self._report.say(f"{owner.label}: {_say_routes(front_end.engine.plan)}")
        for owner in self._owners:
            owner.is_fresh |= self._is_local(owner)
        self._note_exchanged(finished)
        return bool(finished) or any(owner.is_fresh for owner in self._owners)

    def _note_exchanged(self, finished: Sequence[AutoFrontEnd]) -> None:
        """Note whose gradients are means now, and copy worker 0's buffers. Collective."""
        for owner in self._owners:
            owner.is_fresh |= any(front_end in finished for front_end in (*owner.front_ends, *owner.borrowed))
        self._buffers.take_over([root for front_end in finished for root in front_end.holding.roots])

    def count_step(self, owner: GradientOwner) -> None:
        """Count a step and, now and then, compare the replicas before it. Collective."""
        owner.is_fresh = False
        owner.steps += 1
        self.note_step(owner)
        if self._is_local(owner):
            for front_end in owner.front_ends:
                front_end.engine.pass_step()
            return
        if owner.steps in _COMPARED_STEPS or owner.steps % max(_COMPARED_STEPS) == 0:
            self._compare(owner.named())

    def verify(self) -> None:
        """Raise :class:`~poseidon.errors.MismatchError` unless all workers hold the same parameters. Collective."""
        gc.collect()
        if self._local is not None:
            self._local.synchronize()
        self._compare([pair for owner in self.living() for pair in owner.named()])

    def close(self) -> None:
        """Restore all models."""
        for owner in self._owners:
            owner.close()
        self._owners.clear()
        self._stop_waiting()

    # Inside.

    def _retire(self, gone: GradientOwner) -> None:
        """Close an owner; a front end of which another optimizer trains parameters, too, goes on under that one.

        Handed over and not made anew: an optimizer in a cycle of references is not freed everywhere at the same time.
        """
        for front_end in [] if self._local is not None else list(gone.front_ends):
            heir = next((owner for owner in self._owners if front_end in owner.borrowed), None)
            if heir is not None:
                heir.borrowed.remove(front_end)
                heir.front_ends.append(front_end)
                gone.front_ends.remove(front_end)
        if gone.front_ends and self._local is not None:
            # Rounds of local steps end with their optimizer, so that others begin new ones for what they share.
            for owner in self._owners:
                owner.known = WeakIdKeyDictionary()
                owner.learn(parameter for other in self._owners for _, parameter in other.named())
        gone.close()

    def _compare(self, named: Sequence[tuple[str, Tensor]]) -> None:
        if named:
            check_same_bits(self._team, named)

    def _adopt(self, optimizer: Optimizer) -> GradientOwner:
        if self._local is not None:
            # Otherwise what is taken over below would be worker 0's part of a round that another optimizer began.
            self._local.synchronize()
        reference = weakref.ref(optimizer)

        def parameters() -> list[Tensor]:
            living = reference()
            groups = [] if living is None else living.param_groups
            return [parameter for group in groups for parameter in group["params"]]

        owner = GradientOwner(type(optimizer).__name__, parameters, reference)
        self.adopted += 1
        self._owners.append(owner)
        # Copy now, and again before the first forward: the model may still change in between.
        owner.guessed_roots = find_roots(parameters(), self._census.living())
        with self._aside():
            take_over(self._team, holding_tensors(parameters(), owner.guessed_roots))
        self.expect(owner)
        return owner

    def _before_forward(self, *_: Any) -> None:
        # A forward that torch.compile is tracing must not trace our work: the engine then comes before backward.
        # Asked first: what cannot be traced ends the trace, and then all below is compiled by itself.
        if torch.compiler.is_compiling():
            return
        # Inside torch.func's transformations modules hold tensors without data, in the place of their parameters.
        if torch.is_grad_enabled() and not self._step.is_forked and not torch._C._functorch.peek_interpreter_stack():
            self._attach_pending()

    def _stop_waiting(self) -> None:
        if self._waiting_for_forward is not None:
            self._waiting_for_forward.remove()
            self._waiting_for_forward = None

    def _attach_pending(self, has_graph: bool = False) -> None:
        self._stop_waiting()
        if len(self._owners) > 1:
            gc.collect()  # an unreachable optimizer may already be freed on one worker and not yet on another
        living = self.living()
        pending, self._pending = [owner for owner in self._pending if owner in living], []
        for owner in pending:
            owner.known.clear()
            owner.learn(parameter for other in living for _, parameter in other.named())
            owner.borrow(living)
            strangers = owner.strangers()
            owner.learn(strangers)
            if strangers:
                with self._aside():
                    self._attach(owner, strangers)
                if has_graph:
                    owner.front_ends[-1].leave_layers_plain()

    def _attach(self, owner: GradientOwner, parameters: Sequence[Tensor]) -> None:
        holding = find_holding(parameters, self._census.living())
        owner.guessed_roots = ()
        # Engines run concurrently, so each has its own channels: nothing orders the messages of one against another's.
        team = Team(dist.new_group(), self._team.timeout_s)
        check_same_model(team, describe(holding.named()))
        take_over(team, holding_tensors(holding.loose, holding.roots))
        device = parameters[0].device
        options = Options(allow_unused=True, lossy=self._lossy)
        engine = assemble_engine(holding.units, team, device, options, self._cluster)
        if self._cluster is None and engine.cluster.source == "measured":
            self._cluster = engine.cluster
        optimizer = None if owner.optimizer is None else owner.optimizer()
        is_local = self._local is not None and optimizer is not None
        group = Group(self._accumulates)
        group.goes_each = is_local or optimizer is None  # its backwards are no parts of steps
        owner.front_ends.append(AutoFrontEnd(engine, holding, group))
        engine.arm(not is_local, self._step.values)
        fate = "each worker takes steps of its own" if is_local else "gradients are averaged during backward"
        self._report.say(f"{owner.label}: {holding.describe()}, taken from worker 0; {fate}")
        if self._local is not None and optimizer is not None:
            owner.front_ends[-1].rounds = self._local.attach(optimizer, engine, holding)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Do work of our own during the script's forward, isolated from its autocast modes and random numbers."""
        with (
            self._streams.untouched(),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False) if torch.cuda.is_available() else contextlib.nullcontext(),
            torch.device("cpu"),
        ):
            yield


def _say_routes(plan: Plan) -> str:
    counts = Counter(plan.routes.values())
    lossy = {entry.route for entry in plan.entries if entry.is_lossy}
    said = [f"{route} ({count}{', lossy' if route in lossy else ''})" for route, count in sorted(counts.items())]
    return "layers travel by " + ", ".join(said)
