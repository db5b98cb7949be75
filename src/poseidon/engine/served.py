"""Step 6 of the journey, on the server: the owners of the chunks take the optimizer's step and send weights.

Before: ``routes/served.py`` has sent a backward's gradients to the owners. :class:`ServedUpdates` sits between the
user's optimizer and the engine. ``step()`` gives the *order* to step, with the current learning rates; an owner's own
user gives it for the chunks owned there. The first touch of a parameter (``watched.py``) waits for its weights.

What the user looks at is put in place, and is taken from there afterwards. A ``.grad`` that somebody reads is fetched
from the owners, and the owner on this worker then steps with that, changed or not; the same goes for the weights, and
for the optimizer's state. All workers run the same program, so all change them alike.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from poseidon.engine.aside import in_order, in_private, is_seen, unseen
from poseidon.engine.claims import claim_memory
from poseidon.engine.compiled import has_compiled_parts, has_scripted_parts
from poseidon.engine.engine import Engine
from poseidon.engine.optimizers import (
    check_elementwise,
    freeze_options,
    parameters_of,
    step_groups,
    unscale_as_steps_do,
)
from poseidon.engine.orders import (
    agree_on_clipping,
    gradients_in_hand,
    make_update,
    sum_of_squares,
    with_own_gradients,
)
from poseidon.engine.rounding import Rounding
from poseidon.engine.step import Phase
from poseidon.engine.taken import TakenSteps
from poseidon.engine.watched import Touch, unwatch, watch
from poseidon.errors import UnsupportedError
from poseidon.routes.base import LiveItem, can_be_served
from poseidon.routes.served import ServedExchanger
from poseidon.routes.shard import Order, Piece, State, check_state, has_no_gaps, layout_of


class ServedUpdates(TakenSteps):
    """Lets the owners step one optimizer; any thread may touch parameters."""

    serves = True

    def __init__(self, optimizer: Optimizer, max_grad_norm: float | None = None) -> None:
        super().__init__(optimizer, max_grad_norm)
        check_elementwise(optimizer)
        self._exchanger: ServedExchanger | None = None
        """None before the first plan."""
        self._item_of: dict[nn.Parameter, LiveItem] = {}
        self._layout_of: dict[nn.Parameter, Any] = {}
        """As the owners cut them."""
        self._lock = threading.RLock()
        self._lazy: dict[nn.Parameter, None] = {}
        """Parameters whose mean gradient is at its owners only."""
        self._coefficient: Tensor | None = None
        """What the step multiplied the mean gradients by, to clip them; None before it."""
        self._sent: dict[nn.Parameter, Tensor | None] = {}
        """What ``.grad`` was on this worker, as long as it may turn out that nobody used the parameter."""
        self._due: set[LiveItem] = set()
        """Items whose new weights are under way."""
        self._rounding = Rounding()
        self._is_scripted = False
        """Whether a part of the model may read weights at any time, unseen."""
        self._in_private: Callable[[], contextlib.AbstractContextManager[None]] = in_private
        """As that, and in the order in which steps are taken."""
        self._has_state = True
        """The user's optimizer has its whole state, as the user may have changed it."""

    # What the wrapper and the front end call.

    def connect(self, module: nn.Module, engine: Engine | None) -> None:
        """Take over the optimizer's steps, if the server can take them."""
        for unit in () if engine is None else engine.units:
            for spec, parameter in zip(unit.spec.parameters, unit.parameters, strict=True):
                if not can_be_served(parameter):
                    raise UnsupportedError(f'{spec.name} is {parameter.dtype}, which update="server" cannot sum')
                if not has_no_gaps(parameter):
                    raise UnsupportedError(
                        f"{spec.name}, of shape {tuple(parameter.shape)}, has strides {parameter.stride()}, with gaps "
                        'in memory; with update="server" parameters must have none: make it contiguous'
                    )
        if engine is not None:
            self._undo.append(claim_memory(self, engine.units, is_served=True))
        super().connect(module, engine)
        self._is_scripted = has_scripted_parts(module)
        if self._streams:
            self._in_private = partial(in_order, self._streams, in_private)

    @property
    def exchanger(self) -> ServedExchanger:
        """What moves gradients and weights."""
        assert self._exchanger is not None
        return self._exchanger

    def before_forward(self, module: nn.Module, asks: bool, is_joining: bool) -> None:
        """Put everything in place if the forward does not touch parameters one by one."""
        if is_joining:
            raise UnsupportedError(
                'join() with update="server": a worker without input takes no steps, but owns chunks; leave update out'
            )
        is_opaque = has_compiled_parts(module)
        if is_opaque and asks:
            self._compiled.take_over(module)  # for whoever calls a part of the model by itself
        if self._rounding.is_open and asks and not is_opaque:
            watch(self.engine.parameters, self)
        if not asks or is_opaque:
            self.finish()
            with self._lock, self._broken_by_errors():
                self._fetch_exact(self._rounding.rounded)
                self._show_gradients()

    def begin_backward(self, unused: Collection[nn.Parameter] = ()) -> None:
        """Finish the previous step, then begin this one's exchange unless it has begun."""
        if not self.engine.in_backward:  # called for every gradient
            with self.guard():
                self._end_step()
                with in_private():
                    self._rounding.round_rows()
                with torch._C.DisableTorchFunctionSubclass():  # it compares replicas, which is no use of them
                    self.engine.begin_backward(unused)

    def end_backward(self) -> None:
        """Leave the means with their owners; in the first backward, let everybody have them."""
        self._note_streams()
        if self.engine.plan is None:
            self._rounding.agree(self.engine)
            self._release_parameters()
            self._land_at_once()
            self._follow_plan()
            return
        falls_short = self.engine.close_backward()
        with self._lock:
            self._lazy, self._coefficient = dict.fromkeys(self.engine.parameters), None
            watch(self.engine.parameters, self)
            with in_private():
                for parameter in self.engine.parameters:
                    # Sent, so its memory is free. What is here later was added by a backward without an exchange.
                    self._sent[parameter], parameter.grad = parameter.grad, None
            if not (self.engine.options.allow_unused or self.engine.options.static_graph):
                self._sent.clear()
        if falls_short:
            self._settle()

    def finish(self) -> None:
        """Wait for all weights that are under way."""
        if self._engine is None:
            return
        with self._lock, self._broken_by_errors():
            for item in list(self._due):
                self._land(item)

    def _release_parameters(self) -> None:
        for parameter in self.engine.parameters:
            unwatch(parameter)

    # How parameters are touched.

    def touch(self, parameter: nn.Parameter, touch: Touch) -> None:
        """Put in place what an operation needs."""
        if is_seen():
            with unseen():
                self.touch(parameter, touch)
            return
        with self._lock, self._broken_by_errors():
            self._rounding.observe(parameter, touch)
            if touch is Touch.NEW_GRADIENT:
                self._lazy.pop(parameter, None)
            elif touch is Touch.GRADIENT:
                self._show_gradient(parameter)
            else:
                self._land(self._item_of.get(parameter))
                if touch is Touch.VALUES and parameter in self._rounding.rounded:
                    self._fetch_exact({parameter})
            self._unwatch_if_plain(parameter)

    def look_up(self, parameter: nn.Parameter, numbers: Tensor) -> None:
        """Put rows in place: exact ones, where the rest is rounded."""
        if is_seen():
            with unseen():
                self.look_up(parameter, numbers)
            return
        with self._lock, self._broken_by_errors():
            item = self._item_of.get(parameter)
            self._rounding.observe_rows(parameter, numbers)
            is_rounded = parameter in self._rounding.rounded or (
                item in self._due and self._rounding.comes_rounded(item)
            )
            if item is not None and is_rounded and numbers.numel():
                self._fetch_rows(item, numbers)
            else:
                self._land(item)
            self._unwatch_if_plain(parameter)

    def _fetch_rows(self, item: LiveItem, numbers: Tensor) -> None:
        (parameter,) = item.parameters
        with in_private():
            distinct = numbers.detach().reshape(-1).unique().to(torch.int64)
            wait = self.exchanger.ask_rows(item, distinct.cpu().numpy())
        # Before they are written: what lands is made from what was here.
        self._land(item)
        with self._in_private():
            self._rounding.put_rows(parameter, distinct, wait().to(parameter.device))

    def open(self, parameter: nn.Parameter) -> None:
        """Put everything in place."""
        with self._lock:
            for touch in (Touch.VALUES, Touch.GRADIENT):
                self.touch(parameter, touch)
            unwatch(parameter)

    def _unwatch_if_plain(self, parameter: nn.Parameter) -> None:
        is_due = self._item_of.get(parameter) in self._due
        is_rounded = parameter in self._rounding.rounded
        if not (is_due or parameter in self._lazy or is_rounded or self._rounding.is_open):
            unwatch(parameter)

    # Gradients.

    def _settle(self) -> None:
        """Hear the others' roll calls, once in a step."""
        if self.engine.phase is not Phase.CLOSED:
            return
        self.engine.settle()
        with in_private():
            for parameter in self.engine.unused:
                # No worker has a gradient of it, so what its .grad was counts.
                if parameter in self._lazy:
                    del self._lazy[parameter]
                    _add_gradient(parameter, self._sent[parameter])
        self._sent.clear()

    def _show_gradient(self, parameter: nn.Parameter) -> None:
        """Put the means of all that travels with a parameter into ``.grad``, except where it was replaced."""
        if parameter not in self._lazy:
            return
        self._settle()
        if parameter not in self._lazy:
            return
        item = self._item_of[parameter]
        assert item.bucket is not None
        with self._in_private():
            flat = self.exchanger.fetch_means(item)
            if self._coefficient is not None:
                flat *= self._coefficient.to(flat.device)
            means = item.bucket.views_of(flat)
            for other, mean in zip(item.parameters, means, strict=True):
                if other in self._lazy:
                    _add_gradient(other, mean)
        for other in item.parameters:
            self._lazy.pop(other, None)
            self._unwatch_if_plain(other)

    def _show_gradients(self) -> None:
        while self._lazy:
            self._show_gradient(next(iter(self._lazy)))

    def _show_empty_gradients(self) -> None:
        """Put gradients without values in place: no owner has a piece of such a parameter, so it is stepped here."""
        for parameter in [p for p in self._lazy if not p.numel()]:
            _add_gradient(parameter, torch.zeros_like(parameter))
            del self._lazy[parameter]

    # Weights.

    def _land(self, item: LiveItem | None) -> None:
        """Wait for the weights of an item and put them in place."""
        if item is None or item not in self._due:
            return
        with self._in_private():
            self.exchanger.under_way.pop(item).finish(is_used=True)
            assert item.bucket is not None
            self._write(item, item.bucket.flat)
        self._due.remove(item)
        self._rounding.note_landed(item)
        for parameter in item.parameters:
            self._unwatch_if_plain(parameter)

    def _write(self, item: LiveItem, flat: Tensor) -> None:
        assert item.bucket is not None
        torch._foreach_copy_([parameter.detach() for parameter in item.parameters], item.bucket.views_of(flat))

    def _fetch_exact(self, parameters: Collection[nn.Parameter]) -> None:
        """Replace rounded values, of all parameters that travel with these, by the exact ones."""
        for item in {self._item_of[parameter]: None for parameter in parameters}:
            with self._in_private():
                flat, is_exact_later = self.exchanger.fetch_weights(item)
                assert item.bucket is not None
                # Not counted as a change: what was computed from the rounded values would have been the same.
                torch._foreach_copy_([parameter.data for parameter in item.parameters], item.bucket.views_of(flat))
            self._rounding.note_exact(item, is_exact_later)
            for parameter in item.parameters:
                self._unwatch_if_plain(parameter)

    # Replacements for the optimizer's own methods.

    def step(self) -> None:
        """Order the owners to step."""
        with self._lock:
            self._note_step(self.engine, self.engine.phase)
            self._note_streams()
        with self._lock, self._broken_by_errors():
            self.finish()  # step() was called twice in a row
            self._settle()
            groups = self.optimizer.param_groups
            group_of = {p: number for number, group in enumerate(groups) for p in group["params"]}
            options = [freeze_options(group) for group in groups]
            if self._exchanger is None:
                self._step_here(list(group_of), options, group_of)
                return
            with in_private():
                self._order(options, group_of)
                self._show_empty_gradients()
            here = [p for p in group_of if p not in self._item_of or not p.numel()]
            self._step_here(here, options, group_of)
            if self._is_scripted:
                self.finish()

    def zero_grad(self, set_to_none: bool = True, parameters: Sequence[nn.Parameter] | None = None) -> bool:
        """Clear gradients, the optimizer's or these, without waiting for them."""
        if self._engine is None:
            return False
        with self._lock, self._broken_by_errors():
            members = parameters_of(self.optimizer) if parameters is None else parameters
            if self._engine.local:
                self._engine.forget_local(members)
            if not set_to_none:
                self._settle()  # of what nobody used there is no gradient to be filled with zeros
            with in_private():
                for parameter in members:
                    if set_to_none:
                        parameter.grad = None
                    elif parameter.grad is not None or parameter in self._lazy:
                        # Not in place: it may be under way.
                        parameter.grad = torch.zeros_like(parameter)
            for parameter in members:
                self._lazy.pop(parameter, None)
                self._unwatch_if_plain(parameter)
            return True

    def show_state(self) -> None:
        """Put the whole state of the optimizer in place; it is taken from there at the next step."""
        with self._lock, self._broken_by_errors():
            if self._has_state or self._exchanger is None:
                return
            self.finish()
            full: State = defaultdict(dict)
            with in_private():
                for item in self.exchanger.items:
                    self.exchanger.fetch_state(item, full)
            # In the order of the groups, as a plain optimizer would have made it.
            mine = self.optimizer.__dict__["state"]
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter in full or parameter in mine:
                        mine[parameter] = full[parameter] if parameter in full else mine.pop(parameter)
            self._has_state = True

    def take_state(self) -> None:
        """Note that the state was replaced."""
        self._has_state = True

    # Inside.

    def _order(self, options: list[dict[str, Any]], group_of: Mapping[nn.Parameter, int]) -> None:
        exchanger, shard = self.exchanger, self.exchanger.shard
        self._check_layouts()
        for parameter in [p for p in self._lazy if p.grad is not None]:
            self._show_gradient(parameter)
        if not exchanger.under_way:
            # Nothing was sent since the last step: the gradients are those in hand.
            self._show_gradients()
            for item in exchanger.items:
                exchanger.start(item, (), 0)
        if self.engine.local:
            self.engine.taken = with_own_gradients(self.engine)
        weights = shard.weights_in_hand(set(self._item_of) - self._rounding.rounded)
        state = self._take_state() if self._has_state else None
        self._coefficient = self._clip()
        in_hand = gradients_in_hand(shard, self._lazy)
        update = make_update(self.optimizer, self.plain, options, group_of)
        exchanger.order(Order(update, in_hand, self._coefficient, weights, state))
        unscale_as_steps_do(self.optimizer, self._item_of)
        self._due = set(exchanger.items)
        self._rounding.rounded.clear()
        watch(self._item_of, self)

    def _check_layouts(self) -> None:
        for parameter, layout in self._layout_of.items():
            if layout_of(parameter) != layout:
                raise UnsupportedError(
                    f"a parameter of {self._item_of[parameter].name}, of shape {tuple(parameter.shape)}, was given "
                    f"another type, device or order in memory after the first step: {layout_of(parameter)} instead of "
                    f'{layout}. With update="server" its owners keep parts of it as it was; use model.to() before '
                    "the first step"
                )

    def _take_state(self) -> dict[Piece, dict[str, Any]]:
        """Return what the user's optimizer holds of the state of pieces owned here, and drop all of it there."""
        state = self.optimizer.__dict__["state"]
        check_state((parameter, state[parameter]) for parameter in self._item_of if parameter in state)
        taken = self.exchanger.shard.state_in_hand(state)
        for parameter in self._item_of:
            if parameter.numel():
                state.pop(parameter, None)
        self._has_state = False
        return taken

    def _clip(self) -> Tensor | None:
        """Clip gradients in hand; return what to multiply the others by. Collective."""
        if self._max_grad_norm is None:
            return None
        exchanger, team = self.exchanger, self.engine.team
        square = sum_of_squares(exchanger.means(), exchanger.shard, self._lazy)
        # A GradScaler leaves it to a fused optimizer to unscale gradients.
        scale = getattr(self.optimizer, "grad_scale", None)
        is_double = any(parameter.dtype is torch.float64 for parameter in self._item_of)
        coefficient = agree_on_clipping(team, square, self._max_grad_norm, scale, is_double)
        for parameter in self._item_of:
            if parameter not in self._lazy and parameter.grad is not None:
                parameter.grad.detach().mul_(coefficient.to(parameter.grad.device))
        return coefficient

    def _step_here(
        self, parameters: Sequence[nn.Parameter], options: list[dict[str, Any]], group_of: Mapping[nn.Parameter, int]
    ) -> None:
        """Step, on every worker alike, parameters that are not served."""
        members: list[list[nn.Parameter]] = [[] for _ in options]
        for parameter in parameters:
            members[group_of[parameter]].append(parameter)
        self.is_updating = True
        try:
            with in_private():
                step_groups(self.optimizer, self.plain, options, members)
        finally:
            self.is_updating = False

    def _end_step(self) -> None:
        """Before a backward: nothing may be under way, and gradients that were not cleared must be in place."""
        if self._exchanger is None:
            return
        with self._lock, self._broken_by_errors():
            self.finish()
            self._settle()
            self._show_gradients()
            if self.exchanger.under_way:
                # There was no step(): the owners send the weights as they are.
                with in_private():
                    self.exchanger.order(Order(None, {}))
                    for item in list(self.exchanger.under_way):
                        self.exchanger.under_way.pop(item).finish(is_used=True)

    def _follow_plan(self) -> None:
        planned = self.engine.planned
        if planned is None:
            return
        exchanger = next(iter(planned.exchangers.values()))  # whatever the routes, it is one
        assert isinstance(exchanger, ServedExchanger)
        self._exchanger = exchanger
        self._item_of = {parameter: item for item in planned.items for parameter in item.parameters}
        self._layout_of = {parameter: layout_of(parameter) for parameter in self._item_of}

    def _give_everything_back(self) -> None:
        with self._lock, self._broken_by_errors():
            if self._exchanger is None:
                return
            self._end_step()
            self._fetch_exact(self._rounding.rounded)
            self.show_state()
            self.exchanger.leave()

    def _leave(self) -> None:
        """Finish the step, and answer the others as long as they may ask."""
        is_failing = getattr(sys, "last_value", None) is not None  # the launcher waits for this worker to end
        if self._exchanger is not None and not is_failing:
            self._end_step()
            self.exchanger.leave()

    @contextlib.contextmanager
    def _broken_by_errors(self) -> Iterator[None]:
        """After an error in the middle of an exchange, replicas may differ: nothing goes on."""
        self._check_failure()
        try:
            yield
        except BaseException as error:
            self.engine.fail(error)
            raise


def _add_gradient(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    """Add to what a backward without an exchange has left in ``.grad``."""
    if parameter.grad is None:
        parameter.grad = gradient
    elif gradient is not None:
        parameter.grad += gradient
