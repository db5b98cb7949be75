"""Keras on TensorFlow: the exchange is part of the graph of the train step and overlaps backward.

All gradients reach an optimizer's ``apply``, whatever ``train_step`` the model has; there each is replaced by its mean
(``poseidon/tensorflow/exchange.py``).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import torch.distributed as dist

from poseidon.engine.assemble import ExchangeOptions
from poseidon.engine.outside import OutsideFrontEnd, OutsideUnit, check_alike
from poseidon.errors import UnsupportedError
from poseidon.following.nesting import APPLYING
from poseidon.following.patches import Patches
from poseidon.keras.backend import Backend, KerasExchange, Setup, check_alone, refuse_own_loop
from poseidon.keras.batches import unpack
from poseidon.keras.sharing import share
from poseidon.keras.step_share import StepWeight, weighing_means
from poseidon.keras.tensorflow_moments import Moments
from poseidon.keras.units import describe_variables, select_units
from poseidon.planning.planner import Plan
from poseidon.team.team import Team
from poseidon.tensorflow.eager import wrap_optimizers
from poseidon.tensorflow.exchange import GraphExchange, check_no_strategy
from poseidon.units import Kind

log = logging.getLogger("poseidon.keras")


def make_backend(model: Any) -> Backend:
    """Return the backend for a compiled model."""
    return TensorFlowBackend(is_eager=bool(model.run_eagerly))


class TensorFlowBackend:
    """Keras' TensorFlow backend, in graph mode or eagerly."""

    has_sparse_means = True

    def __init__(self, is_eager: bool) -> None:
        # Eager mode has no graph in which to find the factors of a gradient.
        self.forms: frozenset[Kind] = frozenset(("embedding",) if is_eager else ("linear", "embedding"))
        self.timing = "after backward: run_eagerly leaves no room for overlap" if is_eager else "during backward"

    def check(self, model: Any) -> None:
        """Raise if something else already distributes the model, or trains it without its optimizer."""
        strategy = tf.distribute.get_strategy() if tf.distribute.has_strategy() else model._distribute_strategy
        if strategy is not None:
            raise UnsupportedError(
                f"{model.name} was made under tf.distribute's {type(strategy).__name__}; make and compile it outside "
                "of strategy.scope(): Poseidon runs one worker per device"
            )
        check_alone()
        if model.jit_compile:
            log.warning("jit_compile is turned off: XLA cannot exchange gradients in the middle of a step")
            model.jit_compile = False

    def build(self, model: Any, batch: Any) -> None:
        """Create a model's variables, as Keras does it; one without ``call`` shows them only in its train_step."""
        if type(model).call is not keras.Model.call:
            model._symbolic_build(data_batch=batch)
            return
        data = keras.utils.pack_x_y_sample_weight(*keras.utils.unpack_x_y_sample_weight(batch))
        specs = keras.tree.map_structure(lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), data)
        tf.function(model.train_step).get_concrete_function(specs)  # traced, not run

    def attach(self, setup: Setup) -> KerasExchange:
        """Install the exchange in the train step. Collective."""
        return TensorFlowExchange(setup)


class TensorFlowExchange:
    """The exchange of one model's gradients, in its train step and its optimizers.

    A step may use other optimizers than the compiled one, as a GAN does. Each gets its own exchange, over the variables
    of its first update, when it is first used.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._model = setup.model
        self._weight = StepWeight(setup.team)
        self._moments = Moments(setup, self._weight)
        self._samples: Any = None
        """Samples of this worker in the step that is being traced, or run eagerly."""
        self._averaged: list[AveragedOptimizer] = []
        self._has_averaged = False
        self._error: BaseException | None = None
        self._begun: Any = None
        """Marks the beginning of that step in the graph."""
        self._add(setup.model.optimizer, setup.variables, self._make(setup.team, setup.variables, setup.units))
        self._train_step: Callable[..., Any] = setup.model.train_step
        self._has_own_step = "train_step" in vars(setup.model)
        setup.model.train_step = self._step
        # Keras may have traced a step without us.
        setup.model.train_function = None

    @property
    def plan(self) -> Plan | None:
        """The routes in force; None before the end of the first step."""
        plans = [one.exchange.front.plan for one in self._averaged]
        return next((plan for plan in plans if plan is not None), None)

    @property
    def error(self) -> BaseException | None:
        """The first error in a callback."""
        errors = [self._error, *(one.exchange.error for one in self._averaged), self._moments.error]
        return next((error for error in errors if error is not None), None)

    @property
    def share(self) -> float:
        """The part of this worker in the samples of the last step."""
        return self._weight.share

    def detach(self) -> None:
        """Restore model, layers and optimizers."""
        self._moments.detach()
        for one in self._averaged:
            del one.optimizer.apply
        if self._has_own_step:
            self._model.train_step = self._train_step
        else:
            del self._model.train_step
        self._model.train_function = None
        self._averaged[0].exchange.front.detach()
        for one in self._averaged[1:]:  # these have a team of their own
            one.exchange.front.close()

    def _step(self, data: Any) -> Any:
        """Stand in for ``model.train_step``; in graph mode it runs once per kind of batch, for tracing."""
        data, samples = unpack(data)
        rows = _rows(data)
        self._samples = samples = rows if samples is None else tf.reshape(samples, ())
        self._begun = self._call(self._weight.begin, [samples])
        self._moments.begin(tf.cast(samples, tf.float64) / tf.cast(rows, tf.float64), self._begun)
        self._has_averaged = False
        before = [tf.identity(variable.value) for variable in self._model.metrics_variables]
        with weighing_means(self._share_in_graph), using_optimizers(self._adopt):
            logs = self._train_step(data)
        self._samples = None
        if not self._has_averaged:
            raise UnsupportedError(
                f"the train_step of {type(self._model).__name__} did not call self.optimizer.apply or apply_gradients, "
                "so its gradients cannot be intercepted; let it update the model through a Keras optimizer"
            )
        self._forget(before, samples)
        return logs

    def _forget(self, before: Sequence[Any], samples: Any) -> None:
        """Undo the effect on the metrics of a batch that does not count."""
        # Metrics created in this step have no earlier state; they come after the others.
        for variable, value in zip(self._model.metrics_variables, before, strict=False):
            variable.assign(tf.where(samples > 0, variable.value, value))

    def _share_in_graph(self) -> Any:
        return self._call(lambda: np.float64(self._weight.share), [], tf.float64)

    def _call(self, function: Callable[..., Any], inputs: list[Any], result: Any = tf.int32) -> Any:
        """Call a function of the host's in program order; without a result it returns a token."""

        def guarded(*arrays: Any) -> Any:
            try:
                found = function(*arrays)
            except BaseException as error:
                self._error = self._error or error
                raise
            return np.int32(0) if found is None else found

        if tf.executing_eagerly():
            return guarded(*(np.asarray(value) for value in inputs))
        found = tf.numpy_function(guarded, inputs, result, stateful=True)
        found.set_shape(())
        return found

    def _adopt(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Make an optimizer that the step uses for the first time apply means. Collective."""
        if APPLYING.is_inside or "apply" in vars(optimizer):
            return
        check_no_strategy(optimizer)
        with tf.init_scope():
            if not optimizer.built:
                optimizer.build(variables)
            team = Team(dist.new_group(), self._setup.options.timeout_s)
            check_alike(team, describe_variables(variables))
            share(team, [*variables, *optimizer.variables], "an optimizer's state")
            units = select_units(self._setup.units, self._setup.variables, variables)
            self._add(optimizer, variables, self._make(team, variables, units))

    def _make(self, team: Team, variables: Sequence[Any], units: Sequence[OutsideUnit]) -> GraphExchange:
        options = self._setup.options
        if team is not self._setup.team:  # routes were named for all of the model
            options = ExchangeOptions(cluster=options.cluster, timeout_s=options.timeout_s)
        front = OutsideFrontEnd(team, describe_variables(variables), units, options, self._weight.get)
        return GraphExchange(front, units)

    def _add(self, optimizer: Any, variables: Sequence[Any], exchange: GraphExchange) -> None:
        one = AveragedOptimizer(optimizer, list(variables), exchange, optimizer.apply)
        self._averaged.append(one)

        def apply(gradients: Any, trainable_variables: Any = None) -> Any:
            return self._average_and_apply(one, gradients, trainable_variables)

        optimizer.apply = apply

    def _average_and_apply(self, one: AveragedOptimizer, gradients: Any, trainable_variables: Any) -> Any:
        """Stand in for ``optimizer.apply``."""
        if self._samples is None:
            refuse_own_loop(self._model)
        gradients = list(gradients)
        variables = one.variables if trainable_variables is None else list(trainable_variables)
        by_variable = {id(variable): gradient for variable, gradient in zip(variables, gradients, strict=True)}
        known = {id(variable) for variable in one.variables}
        odd = [variable.path for variable in variables if id(variable) not in known]
        if odd:
            raise UnsupportedError(
                f"{type(one.optimizer).__name__} updates {odd[0]}, which was not among the variables of its first "
                "update; give it all of its variables in the first step"
            )
        token = one.exchange.begin(self._samples, self._begun)
        means = one.exchange.average([by_variable.get(id(variable)) for variable in one.variables], token)
        self._has_averaged = True
        mean_of = {id(variable): mean for variable, mean in zip(one.variables, means, strict=True)}
        with APPLYING.enter():
            return one.apply([mean_of.get(id(variable)) for variable in variables], variables)


@dataclass(frozen=True)
class AveragedOptimizer:
    """An optimizer that gets means, with its variables and its own ``apply``."""

    optimizer: Any
    variables: list[Any]
    exchange: GraphExchange
    apply: Callable[..., Any]


@contextlib.contextmanager
def using_optimizers(adopt: Callable[[Any, Sequence[Any]], None]) -> Iterator[None]:
    """Call ``adopt`` with every Keras optimizer, and its variables, before it is applied."""
    patches = Patches()

    def apply(original: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        variables = optimizer._trainable_variables if trainable_variables is None else trainable_variables
        is_new = "apply" not in vars(optimizer)
        adopt(optimizer, list(variables))
        if is_new and "apply" in vars(optimizer):
            return optimizer.apply(grads, trainable_variables)
        return original(optimizer, grads, trainable_variables)

    wrap_optimizers(patches, apply)
    try:
        yield
    finally:
        patches.undo()


def _rows(data: Any) -> Any:
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    return tf.shape(next(leaf for leaf in keras.tree.flatten(x) if leaf is not None))[0]
