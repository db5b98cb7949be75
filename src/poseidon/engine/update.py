"""Step 6 of the journey: each unit is updated when its mean gradient has arrived and somebody needs the unit.

Before: a route has brought the mean (``routes/``). After: the unit's next forward goes on. :class:`Updater` sits
between the user's optimizer and the engine: ``step()`` only writes down that an update is due, with the learning rates
of that moment. The first touch of a parameter (``pending.py``) lets the flight that carries its gradient land and steps
the user's own optimizer for just the parameters of that flight. What the next forward needs late arrives behind it.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from poseidon.engine.backward import Flight
from poseidon.engine.engine import Engine
from poseidon.engine.pending import make_pending, make_plain
from poseidon.errors import ConfigError, UnsupportedError, WorkerLostError


class Updater:
    """Defers the updates of one optimizer; any thread may touch parameters."""

    def __init__(self, engine: Engine, optimizer: Optimizer, max_grad_norm: float | None = None) -> None:
        check_optimizer(optimizer)
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm is {max_grad_norm}; it must be positive")
        self.engine = engine
        self.optimizer = optimizer
        self.is_paused = False
        """Finish every backward before it returns, as without this class."""
        self.is_updating = False
        self._max_grad_norm = max_grad_norm
        self.plain = type(optimizer)
        self._lock = threading.RLock()
        self._parameters = [p for unit in engine.units for p in unit.parameters]
        self._is_open = False
        """A closed backward has not landed wholly."""
        self._is_settled = False
        """Somebody has touched a parameter since it was closed."""
        self._pending: dict[nn.Parameter, Flight | None] = {}
        """What has not landed, with its flight once that is known."""
        self._due: list[dict[str, Any]] | None = None
        """Options of the parameter groups when ``step()`` was called; None before that."""
        self._clears: bool | None = None
        """``zero_grad()`` was called since: true to drop gradients, false to fill them with zeros."""
        self._failure: BaseException | None = None
        # A script may end with a step under way; the others cannot finish theirs without this worker.
        atexit.register(self._finish)

    # What the front end and the wrapper call.

    @contextlib.contextmanager
    def breaking_off(self) -> Iterator[None]:
        """Around a part of backward: if a worker is lost in it, ``.grad`` is not the mean, and no step may use it."""
        try:
            yield
        except WorkerLostError as error:
            with self._lock:
                self._failure = self._failure or error
            raise

    def begin_backward(self, unused: Collection[nn.Parameter] = ()) -> None:
        """Finish the step before, then begin the exchange of this one unless it has begun."""
        if not self.engine.in_backward:  # every gradient asks
            with self.breaking_off():
                self.land_all()
                self.engine.begin_backward(unused)

    def end_backward(self) -> None:
        """Let the exchange of the backward that ends go on in the background."""
        if self.engine.plan is None or self.is_paused:
            self.engine.end_backward()
            return
        forgotten = self.engine.close_backward()
        with self._lock:
            self._is_open, self._is_settled = True, False
            self._pending = dict.fromkeys(self._parameters)
            for parameter in self._parameters:
                make_pending(parameter, self._touch)
        if forgotten:
            self.land_all()
            self.engine.check_forgotten(forgotten)

    def land_all(self) -> None:
        """Finish the step that is under way: every gradient has landed, every due update is done."""
        with self._lock:
            self._check_failure()
            while self._pending:
                self._touch(next(iter(self._pending)))

    def _touch(self, parameter: nn.Parameter) -> None:
        with self._lock:
            self._check_failure()
            make_plain(parameter)
            try:
                if self._is_open and not self._is_settled:
                    self._settle()
                flight = self._pending.get(parameter)
                if flight is not None:
                    self._land([flight])
            except BaseException as error:
                self._failure = error
                raise

    def _settle(self) -> None:
        landing = self.engine.settle()
        self._is_settled = True
        self._pending = {p: flight for flight in landing.flights for p in flight.parameters}
        for parameter in self._parameters:
            if parameter not in self._pending:
                make_plain(parameter)
        if landing.must_land or (self._max_grad_norm is not None and self._due is not None):
            # All before any update, and in one order on all workers.
            self._land(landing.flights)

    def _land(self, flights: Sequence[Flight]) -> None:
        parameters = [p for flight in flights for p in flight.parameters]
        for parameter in parameters:
            make_plain(parameter)
        for flight in flights:
            flight.land()
        for parameter in parameters:
            del self._pending[parameter]
        if self._due is not None:
            self._update(parameters, self._due)
            if self._clears is not None:
                clear_gradients(parameters, self._clears)
        if not self._pending:
            self._is_open = self._is_settled = False
            self._due = self._clears = None

    # What the optimizer's own methods have become.

    def step(self) -> None:
        """Write down that an update is due; update at once what nothing is under way for."""
        with self._lock:
            self._check_failure()
            if self._due is not None or (self._is_settled and self._max_grad_norm is not None):
                # Twice in a row; or gradients have been read, and their norm needs the rest of them as well.
                self.land_all()
            groups = self.optimizer.param_groups
            options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
            self._group_of = {p: number for number, group in enumerate(groups) for p in group["params"]}
            self._due = options if self._is_open else None
            self._clears = None
            self._update([p for p in self._group_of if p not in self._pending], options)
            if getattr(self.optimizer, "grad_scaler", None) is not None:
                self.land_all()  # the scale belongs to this very call

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; those of an update that is due once it is done."""
        with self._lock:
            self._check_failure()
            if self._due is None:
                self.land_all()
            else:
                self._clears = set_to_none
            members = [p for group in self.optimizer.param_groups for p in group["params"]]
            clear_gradients([p for p in members if p not in self._pending], set_to_none)

    def close(self) -> None:
        """Finish what is under way, give the optimizer its own class back, and close the engine."""
        atexit.unregister(self._finish)
        try:
            self._finish()
        finally:
            for parameter in self._pending:
                make_plain(parameter)
            self.optimizer.__dict__.pop("_poseidon_updater", None)
            self.optimizer.__class__ = self.plain
            self.engine.close()

    def _finish(self) -> None:
        if self._failure is None:
            self.land_all()

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise UnsupportedError(
                f"rank {self.engine.team.rank}: an update was broken off by an error, so the replicas may differ; "
                "start again from a checkpoint"
            ) from self._failure

    def _update(self, parameters: Sequence[nn.Parameter], options: Sequence[dict[str, Any]]) -> None:
        """Step the user's optimizer for some parameters, with the options that held when ``step()`` was called."""
        if self._max_grad_norm is not None and not self._pending:
            nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
        members: list[list[nn.Parameter]] = [[] for _ in options]
        for parameter in parameters:
            if parameter in self._group_of:
                members[self._group_of[parameter]].append(parameter)
        shadows = [{**option, "params": some} for option, some in zip(options, members, strict=True) if some]
        if not shadows:
            return
        before = [dict(shadow) for shadow in shadows]
        optimizer = self.optimizer
        real, optimizer.param_groups = optimizer.param_groups, shadows
        self.is_updating = True
        try:
            plain_step(self.plain)(optimizer)
        finally:
            self.is_updating = False
            optimizer.param_groups = real
        for shadow, old in zip(shadows, before, strict=True):
            for key in shadow:
                if shadow[key] is not old.get(key):
                    raise UnsupportedError(
                        f"{self.plain.__name__} changes its own option {key!r} in step(), so its parameters cannot be "
                        "updated one by one; use poseidon.DistributedDataParallel with it"
                    )


def clear_gradients(parameters: Iterable[nn.Parameter], set_to_none: bool) -> None:
    """Drop gradients, or fill them with zeros."""
    for parameter in parameters:
        if set_to_none:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad = parameter.grad.detach()
            parameter.grad.zero_()


def check_optimizer(optimizer: Any) -> None:
    """Raise unless the optimizer's parameters can be updated one by one."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"distribute() wants a torch.optim.Optimizer; this is a {type(optimizer).__name__}")
    if isinstance(optimizer, Deferring):
        raise ConfigError("this optimizer belongs to a distributed model already; make one per model")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedError(
            f"{type(optimizer).__name__} evaluates the model several times per step (a closure), so updates cannot "
            "wait for the next forward; use poseidon.DistributedDataParallel with it"
        )


def plain_step(plain: type[Optimizer]) -> Any:
    """Return the class's step without PyTorch's profiling wrapper, which would call the user's step hooks each time."""
    return getattr(plain.step, "__wrapped__", plain.step)


class StepTaker(Protocol):
    """Who takes an optimizer's steps in its stead."""

    plain: type[Optimizer]
    """The optimizer's own class."""
    is_updating: bool
    """Whether the optimizer's state may be read as it is."""

    def step(self) -> None:
        """Take a step, or write down that it is due."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients."""

    def land_all(self) -> None:
        """Finish the step under way."""


class Deferring:
    """Mixed into an optimizer's class: same object, same state, but steps are deferred."""

    _poseidon_updater: StepTaker

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's own."""
        self._poseidon_updater.zero_grad(set_to_none)

    @property
    def state(self) -> Any:
        """As the optimizer's own, once the step under way is finished."""
        if not self._poseidon_updater.is_updating:
            self._poseidon_updater.land_all()
        return self.__dict__["state"]

    @state.setter
    def state(self, value: Any) -> None:
        self.__dict__["state"] = value

    def state_dict(self) -> Any:
        """As the optimizer's own, once the step under way is finished."""
        self._poseidon_updater.land_all()
        return super().state_dict()  # type: ignore[misc]

    def load_state_dict(self, state_dict: Any) -> None:
        """As the optimizer's own, once the step under way is finished."""
        self._poseidon_updater.land_all()
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's own, once the step under way is finished."""
        self._poseidon_updater.land_all()
        super().add_param_group(param_group)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Copies are plain optimizers: they have no model to wait for.
        self._poseidon_updater.land_all()
        state = {key: value for key, value in self.__dict__.items() if key not in ("_poseidon_updater", "step")}
        return object.__new__, (self._poseidon_updater.plain,), state


def _deferred_step(self: Any, closure: Any = None) -> None:
    if closure is not None:
        raise UnsupportedError(
            "step(closure) evaluates the model inside the step; call backward() yourself and step() without a closure"
        )
    self._opt_called = True  # what learning-rate schedulers look for
    self._poseidon_updater.step()


@cache
def _deferring_class(plain: type) -> type:
    # Wrapped by PyTorch's own wrapper, so that the user's step hooks run once per step().
    step: Any = Optimizer.profile_hook_step(_deferred_step)
    step.hooked = True
    step._wrapped_by_lr_sched = True
    return type(plain.__name__, (Deferring, plain), {"step": step})


def defer(optimizer: Optimizer, updater: StepTaker) -> None:
    """Let ``updater`` take the optimizer's steps. Schedulers and references to it go on working."""
    optimizer.__dict__.pop("step", None)  # a scheduler's wrapper around the plain step
    optimizer._poseidon_updater = updater  # type: ignore[attr-defined]
    plain: type = type(optimizer)
    optimizer.__class__ = _deferring_class(plain)
