"""Keras on JAX: gradients are exchanged between backward and the optimizer, inside the jitted train step.

The host takes part through callbacks, which JAX runs in program order: begin the step, moments of synchronized layers,
factors and rows as backward computes them, and one that hands over everything and waits for the means. A compiled step
leaves no room for overlap, but the factors of a Dense kernel and the rows of an Embedding still travel in short form:
their backward passes them to a callback and leaves the local gradient zero.

Tracing fixes which layers do so. The first step taps all of them, because the plan needs their loads; then the step is
retraced for the plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras

from poseidon.engine.moments import MomentsExchange
from poseidon.engine.outside import OutsideFrontEnd, OutsideUnit
from poseidon.errors import UnsupportedError
from poseidon.jax.callbacks import HostCallbacks
from poseidon.keras.backend import Backend, KerasExchange, Setup, check_alone, refuse_own_loop
from poseidon.keras.batches import count_rows, unpack
from poseidon.keras.moments import replace_moments
from poseidon.keras.step_share import weighing_means
from poseidon.keras.taps import Tap, find_short_layers, tap
from poseidon.keras.units import describe_variables
from poseidon.planning.planner import Plan
from poseidon.units import Kind


def make_backend(model: Any) -> Backend:
    """Return the backend for a compiled model."""
    return JaxBackend(is_eager=bool(model.run_eagerly))


class JaxBackend:
    """Keras' JAX backend, jitted or eagerly."""

    forms: frozenset[Kind] = frozenset(("linear", "embedding"))
    has_sparse_means = False

    def __init__(self, is_eager: bool) -> None:
        why = "run_eagerly leaves" if is_eager else "a jitted step leaves"
        self.timing = f"after backward: {why} no room for overlap"

    def check(self, model: Any) -> None:
        """Raise if something else already distributes the model, or trains it without its optimizer."""
        check_alone()
        _check_optimizers(model)
        if keras.config.is_nnx_enabled():
            raise UnsupportedError(
                f"{model.name} uses Flax NNX variables, which are not supported; unset KERAS_NNX_ENABLED"
            )

    def build(self, model: Any, batch: Any) -> None:
        """Create a model's variables, as Keras does it."""
        model._symbolic_build(data_batch=batch)

    def attach(self, setup: Setup) -> KerasExchange:
        """Install the exchange in the train step. Collective."""
        return JaxExchange(setup)


class JaxExchange:
    """The exchange of one model's gradients, in its train step and its optimizer."""

    def __init__(self, setup: Setup) -> None:
        self._model = setup.model
        self._optimizer = setup.model.optimizer
        self._host = _make_host(setup)
        self._units = list(setup.units)
        self._position_of = {id(variable): position for position, variable in enumerate(setup.variables)}
        # A step of one's own may do anything with gradients, and factors would pass it by.
        kind = type(setup.model)
        has_keras_step = "train_step" not in vars(setup.model) and kind.train_step is keras.Model.train_step
        self._layers = find_short_layers(setup) if has_keras_step else {}
        self._tapped = {setup.units[number].positions[0] for number in self._layers}
        self._followed: Plan | None = None
        """The plan for which the step was traced; None: the first step, which taps all layers it can."""
        for number, layer in self._layers.items():
            tap(layer, self._tap(layer, setup.units[number]))
        self._synchronized = setup.synchronized
        self._row_weight: Any = None
        """How many samples one row of the batch counts for; None outside a step."""
        for layer in self._synchronized:
            replace_moments(layer, self._combined)
        self._is_averaged = False
        self._train_step: Callable[..., Any] = setup.model.train_step
        self._has_own_step = "train_step" in vars(setup.model)
        self._make_train_function: Callable[..., Any] = setup.model.make_train_function
        self._stateless_apply: Callable[..., Any] = self._optimizer.stateless_apply
        self._optimizer.stateless_apply = self._average_and_apply
        setup.model.make_train_function = self._make_ours
        self._trace_anew()

    @property
    def plan(self) -> Plan | None:
        """The routes in force; None before the end of the first step."""
        return self._host.front.plan

    @property
    def error(self) -> BaseException | None:
        """The first error of a callback."""
        return self._host.error

    @property
    def share(self) -> float:
        """The part of this worker in the samples of the last step."""
        return self._host.front.weight / self._host.front.team.size

    def detach(self) -> None:
        """Restore model, layers and optimizer."""
        for layer in self._layers.values():
            del layer.call
        for layer in self._synchronized:
            del layer._moments
        del self._optimizer.stateless_apply
        del self._model.make_train_function
        if self._has_own_step:
            self._model.train_step = self._train_step
        else:
            del self._model.train_step
        self._model.train_function = None
        self._host.front.detach()

    # Between steps.

    def _trace_anew(self) -> None:
        """Drop the traced step."""
        # JAX caches functions by equality, and a bound method equals itself.
        self._model.train_step = functools.partial(self._step)
        self._model.train_function = None

    def _make_ours(self, force: bool = False) -> None:
        """Stand in for ``model.make_train_function``."""
        if self._model.train_function is not None and not force:
            return
        self._make_train_function(force=True)
        train = self._model.train_function

        def train_function(state: Any, iterator: Any) -> Any:
            logs_and_state = train(state, iterator)
            if self._followed is None:
                jax.block_until_ready(logs_and_state)
            if self.plan is not self._followed:
                self._follow_plan()
            return logs_and_state

        self._model.train_function = train_function

    def _follow_plan(self) -> None:
        """Untap the layers whose gradients travel in full, and retrace the step if that changes it."""
        is_first, self._followed = self._followed is None, self.plan
        names = self._host.front.engine.short_units
        short = {unit.positions[0] for unit in self._units if unit.name in names} - self._host.tied
        if short != self._tapped or (is_first and self._tapped):
            self._tapped = short
            self._trace_anew()
            self._make_ours()

    # Inside a step, while it is traced, or run eagerly.

    def _step(self, state: Any, data: Any) -> Any:
        """Stand in for ``model.train_step``."""
        data, samples = unpack(data)
        rows = count_rows(data)
        samples = jnp.full((1,), rows, jnp.int32) if samples is None else samples
        self._host.begin(samples)
        self._is_averaged = False
        self._row_weight = samples[0] / rows
        with weighing_means(self._host.share):
            logs, after = self._train_step(state, data)
        self._row_weight = None
        if not self._is_averaged:
            raise UnsupportedError(
                f"the train_step of {type(self._model).__name__} did not call self.optimizer.stateless_apply, so its "
                "gradients cannot be intercepted; let it update the model through self.optimizer"
            )
        # A batch that does not count must leave no trace in the metrics.
        *others, metrics = after
        metrics = [jnp.where(samples[0] > 0, new, old) for new, old in zip(metrics, state[-1], strict=True)]
        return logs, (*others, metrics)

    def _average_and_apply(self, optimizer_variables: Any, gradients: Any, trainable_variables: Any) -> Any:
        """Stand in for ``optimizer.stateless_apply``."""
        if self._row_weight is None:
            refuse_own_loop(self._model)
        self._is_averaged = True
        positions = [self._position_of[id(variable)] for variable in self._optimizer._trainable_variables]
        means = self._host.average(positions, gradients, frozenset(self._tapped), is_first=self._followed is None)
        return self._stateless_apply(optimizer_variables, means, trainable_variables)

    def _tap(self, layer: Any, unit: OutsideUnit) -> Tap:
        position = unit.positions[0]

        def multiply(inputs: Any) -> Any:
            kernel = keras.ops.convert_to_tensor(layer._kernel)
            if position not in self._tapped or not isinstance(inputs, jax.Array) or inputs.dtype != kernel.dtype:
                return None
            return self._host.multiply(position, inputs, kernel)

        def look_up(inputs: Any) -> Any:
            if position not in self._tapped or not isinstance(inputs, jax.Array):
                return None
            table = keras.ops.convert_to_tensor(layer._embeddings)
            return self._host.look_up(position, table, keras.ops.cast(inputs, "int32"), layer.variable_dtype)

        return multiply if unit.kind == "linear" else look_up

    def _combined(self, mean: Any, variance: Any, count: Any, name: str) -> Any:
        if self._row_weight is None:  # a call of the user's own, which the other workers may not make
            return mean, variance
        return self._host.combine(mean, variance, jnp.asarray(count * self._row_weight, mean.dtype), name)


def _check_optimizers(model: Any) -> None:
    """Raise if the model has optimizers besides its compiled one: Keras keeps no state of theirs in a jitted step."""
    others = [
        name
        for name, value in vars(model).items()
        if isinstance(value, keras.optimizers.Optimizer) and value is not model.optimizer
    ]
    if others:
        raise UnsupportedError(
            f"{model.name} has optimizers besides its compiled one: {', '.join(sorted(others))}. On JAX only "
            "gradients of model.optimizer are averaged; train each part as a model of its own and distribute each"
        )


def _make_host(setup: Setup) -> HostCallbacks:
    front = OutsideFrontEnd(setup.team, describe_variables(setup.variables), setup.units, setup.options)
    moments = None
    if setup.moments is not None:
        moments = MomentsExchange(setup.team, setup.moments, lambda: front.weight)
    return HostCallbacks(front, setup.units, moments)
