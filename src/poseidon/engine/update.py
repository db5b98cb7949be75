"""Step 6 of the journey, deferred: each unit is updated when its mean gradient has arrived and the unit is needed.

Before: a route has delivered the mean (``routes/``). After: the unit's next forward runs. :class:`DeferredUpdates` sits
between the user's optimizer and the engine: ``step()`` only records that an update is due, with the current learning
rates. The first touch of a parameter (``pending.py``) lands the flight that carries its gradient and steps the user's
optimizer for just that flight's parameters. What the next forward needs late arrives while it runs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.optim import Optimizer
from torch.overrides import has_torch_function

from poseidon.engine.aside import aside, in_order, unseen
from poseidon.engine.backward import Flight
from poseidon.engine.claims import claim_memory
from poseidon.engine.compiled import has_scripted_parts
from poseidon.engine.engine import Engine
from poseidon.engine.optimizers import (
    check_unchanged,
    clear_gradients,
    clip,
    freeze_options,
    parameters_of,
    step_groups,
    steps_one_by_one,
)
from poseidon.engine.pending import make_pending, make_plain
from poseidon.engine.step import Phase
from poseidon.engine.taken import TakenSteps


class DeferredUpdates(TakenSteps):
    """Defers the updates of one optimizer; any thread may touch parameters."""

    steps_later = True

    def __init__(self, optimizer: Optimizer, max_grad_norm: float | None = None) -> None:
        super().__init__(optimizer, max_grad_norm)
        self._is_paused = False
        """Under join(): finish every backward before it returns."""
        self._lock = threading.RLock()
        # By id(), because the hash of a tensor is a Python function, and these are asked for each parameter and step.
        self._pending: dict[int, Flight | None] = {}
        """Parameters that have not landed, each with its flight once known."""
        self._sent: dict[int, Tensor | None] = {}
        """What ``.grad`` of these was when it left. Until they land it is None, or what a later backward has added."""
        self._due: list[dict[str, Any]] | None = None
        """Options of the parameter groups at the time of ``step()``; None before that."""
        self._group_of: dict[int, int] = {}
        """Each parameter's group at that time."""
        self._clears: bool | None = None
        """Set if ``zero_grad()`` was called since: true to drop gradients, false to fill them with zeros."""
        self._clears_all = False
        """Whether that concerns the whole model, and not just the optimizer's parameters."""
        self._steps_now = False
        """Whether ``step()`` waits for all gradients: the optimizer may read what changes then, or a scripted part the
        parameters."""
        self._is_own = not steps_one_by_one(self.plain)
        """Whether the optimizer is the user's own, which gets whole groups: it may look at all, or at their order."""
        self._counts = not self._is_own and not self.plain.__module__.startswith("torch.optim.")
        """Whether it is, but says that it steps every value by itself: then it must not count its steps."""
        self._steps_all = max_grad_norm is not None or self._is_own
        """Whether all parameters are updated together: their norm or the optimizer needs all gradients."""
        self._is_settling = False
        """Whether the thread with the lock hears what the others said."""
        self._landing: set[int] = set()
        """Parameters that the thread with the lock is landing."""
        self._unseen: Callable[[], contextlib.AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass
        """Lets that thread use parameters that are still pending."""

    def connect(self, module: nn.Module, engine: Engine | None) -> None:
        """Take over the optimizer's steps."""
        if engine is not None:
            self._undo.append(claim_memory(self, engine.units, is_served=False))
        super().connect(module, engine)
        if self._is_own or any(has_torch_function((p,)) for p in (() if engine is None else engine.parameters)):
            # Their classes must see what the optimizer does, and it may read other models; ours lets that pass.
            self._unseen = contextlib.nullcontext
        self._steps_now = self._is_own or has_scripted_parts(module)
        if self._streams:
            self._unseen = partial(in_order, self._streams, self._unseen)

    # What the wrapper and the front end call.

    def renewed(self) -> DeferredUpdates:
        """Return updates of the same optimizer, among other workers."""
        return DeferredUpdates(self.optimizer, self._max_grad_norm)

    def before_forward(self, module: nn.Module, asks: bool, is_joining: bool) -> None:
        """Finish the step if the forward does not touch parameters one by one."""
        self._is_paused = is_joining
        if is_joining or not asks:
            self.finish()
        else:
            self._compiled.take_over(module)

    def begin_backward(self, unused: Collection[nn.Parameter] = ()) -> None:
        """Finish the previous step, then begin this one's exchange unless it has begun."""
        engine = self.engine
        if not engine.in_backward:  # called for every gradient
            with self._guard:
                self.finish()
                engine.begin_backward(unused)

    def end_backward(self) -> None:
        """Let this backward's exchange continue in the background."""
        engine = self.engine
        if self._streams:
            self._note_streams()
        if engine.lands_at_once or self._is_paused:
            self._land_at_once()
            _own_gradients(engine.parameters)
            return
        falls_short = engine.close_backward()
        with self._lock:
            self._pending = dict.fromkeys(map(id, engine.parameters))
            with torch._C.DisableTorchFunctionSubclass():
                for parameter in engine.parameters:
                    # A later backward that exchanges nothing, as of a penalty, must not add to what is under way.
                    self._sent[id(parameter)], parameter.grad = parameter.grad, None
            make_pending(engine.parameters, self._touch)
        if falls_short or (engine.compares_flags and self._must_land()):
            # If some landing needs all workers, one of them may be the only one to read the model.
            self.finish()

    def _must_land(self) -> bool:
        try:
            return self.engine.must_land()
        except BaseException as error:
            self.engine.fail(error)
            raise

    def finish(self) -> None:
        """Finish the step under way: land every gradient and run every due update."""
        if self._engine is None:
            return
        with self._lock:
            self._check_failure()
            if not self._pending:
                return
            for parameter in self._engine.parameters:
                if id(parameter) in self._pending:
                    self._touch(parameter)

    def _touch(self, parameter: nn.Parameter) -> None:
        # is_seen(), in line: it is asked for each parameter and step.
        if (
            peek_interpreter_stack() is not None
            or torch._C._get_tracing_state() is not None
            or torch._C._len_torch_dispatch_stack() > 0
        ):
            with unseen():
                self._touch(parameter)
            return
        with self._lock:
            if self._is_settling or id(parameter) in self._landing:
                return  # which is this thread's doing: the others wait here, as long as the class tells them to
            self._check_failure()
            try:
                with self._unseen():
                    if self.engine.phase is Phase.CLOSED:
                        self._settle()
                    flight = self._pending.get(id(parameter))
                    if flight is not None:
                        self._land([flight])
                    else:  # it has landed with others
                        make_plain((parameter,))
            except BaseException as error:
                self.engine.fail(error)
                raise

    def _settle(self) -> None:
        engine = self.engine
        self._is_settling = True
        try:
            landing = engine.settle()
        finally:
            self._is_settling = False
        self._pending = {id(p): flight for flight in landing.flights for p in flight.parameters}
        if landing.must_land or (self._steps_all and self._due is not None):
            # Everything lands before any update, in one order on all workers.
            self._land(landing.flights)

    def _land(self, flights: Sequence[Flight]) -> None:
        parameters = [p for flight in flights for p in flight.parameters]
        numbers = set(map(id, parameters))
        self._landing |= numbers
        try:
            added = []
            for parameter in parameters:  # in line, since every call counts here
                if parameter.grad is not None:
                    added.append((parameter, parameter.grad))
                parameter.grad = self._sent.pop(id(parameter))
            for flight in flights:
                flight.land()
            for parameter in parameters:
                del self._pending[id(parameter)]
            if self._due is None:
                with aside():
                    _own_gradients(parameters)
            else:
                self._update(parameters, self._due)
                if self._clears is not None:
                    some = parameters if self._clears_all else [p for p in parameters if id(p) in self._group_of]
                    clear_gradients(some, self._clears)
            if added:
                _add_later(added)
        finally:
            self._landing -= numbers
        # Not before: from now on any thread may read them without asking.
        make_plain(parameters)
        if not self._pending:
            self._due = self._clears = None

    # Replacements for the optimizer's own methods.

    def step(self) -> None:
        """Record that an update is due; update at once the parameters with nothing under way."""
        with self._lock:
            self._check_failure()
            engine = self.engine
            phase = engine.phase
            self._note_step(engine, phase)
            if self._streams:
                self._note_streams()
            is_read = phase is Phase.SETTLED
            groups = self.optimizer.param_groups
            is_apart = self._steps_all and any(
                id(p) not in self._pending and p.grad is not None for p in parameters_of(self.optimizer)
            )
            if self._due is not None or (self._steps_all and is_read) or is_apart or engine.local:
                # step() was called twice in a row; or some gradients are here already, and all are needed together; or
                # what has been added to them counts, and what comes after this step does not.
                self.finish()
            options = [freeze_options(group) for group in groups]
            self._group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
            pending = self._pending
            self._due = options if pending else None
            self._clears = None
            self._clears_all = False
            here = [p for group in groups for p in group["params"] if id(p) not in pending]
            if here and not (self._is_own and pending):
                self._update(here, options)
            if self._steps_now or getattr(self.optimizer, "found_inf", None) is not None:
                self.finish()  # a GradScaler's verdict and scale are valid only in this call

    def zero_grad(self, set_to_none: bool = True, parameters: Sequence[nn.Parameter] | None = None) -> bool:
        """Clear gradients, the optimizer's or these; those that a due update needs are cleared after it."""
        if self._engine is None:
            return False
        with self._lock:
            self._check_failure()
            if self._due is None:
                self.finish()
            else:
                self._clears = set_to_none
                self._clears_all |= parameters is not None
            members = parameters_of(self.optimizer) if parameters is None else parameters
            if self._engine.local:
                self._engine.forget_local(members)
            here = [p for p in members if id(p) not in self._pending]
            if here:
                clear_gradients(here, set_to_none)
            return True

    def show_state(self) -> None:
        """Finish the step under way: the state is here."""
        self.finish()

    def take_state(self) -> None:
        """No-op: the optimizer uses its state where it is."""

    def _leave(self) -> None:
        self.finish()

    def _give_everything_back(self) -> None:
        self.finish()

    def _release_parameters(self) -> None:
        make_plain(self.engine.parameters)

    def _update(self, parameters: Sequence[nn.Parameter], options: Sequence[dict[str, Any]]) -> None:
        """Step the user's optimizer for some parameters, with the options from the time of ``step()``."""
        if self._max_grad_norm is not None and not self._pending:
            with aside():
                clip(self.optimizer, self.engine.parameters, self._max_grad_norm)
        members: list[list[nn.Parameter]] = [[] for _ in options]
        if self._is_own:
            members = [list(group["params"]) for group in self.optimizer.param_groups]
            parameters = ()
        for parameter in parameters:
            number = self._group_of.get(id(parameter))
            if number is not None:
                members[number].append(parameter)
        deferring = type(self.optimizer)
        self.is_updating = True
        before = freeze_options(self.optimizer.__dict__) if self._counts else {}
        # With its own class, which reads its state without asking us, several times for each parameter.
        self.optimizer.__class__ = self.plain
        try:
            with aside():
                step_groups(self.optimizer, self.plain, options, members)
            check_unchanged(
                self.plain, before, self.optimizer.__dict__, "steps are taken for some parameters at a time"
            )
        finally:
            self.optimizer.__class__ = deferring
            self.is_updating = False


def _own_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Give parameters whose gradients may be looked at their own memory: the next backward writes into the buckets."""
    shared = [
        (parameter, gradient)
        for parameter in parameters
        if (gradient := parameter.grad) is not None and gradient._base is not None
    ]
    if not shared:
        return
    # All in one kernel on a device: of a small net's step a clone of each would be a tenth.
    copies = [torch.empty_like(gradient) for _, gradient in shared]
    torch._foreach_copy_(copies, [gradient for _, gradient in shared])
    for (parameter, _), copy in zip(shared, copies, strict=True):
        parameter.grad = copy


def _add_later(added: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    """Add to ``.grad`` what a backward without an exchange has made while the means were under way."""
    with aside():
        for parameter, gradient in added:
            if parameter.grad is None:
                parameter.grad = gradient
            else:  # a full gradient first: torch adds a sparse one to it, and not the other way round
                both = sorted((parameter.grad, gradient), key=lambda one: one.is_sparse)
                parameter.grad = both[0] + both[1]
