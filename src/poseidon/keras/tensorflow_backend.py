"""Keras on TensorFlow: the exchange is part of the graph of the train step and overlaps backward.

All gradients reach the optimizer's ``apply``, whatever ``train_step`` the model has; there each is replaced by its mean
(``poseidon/tensorflow/exchange.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from poseidon.engine.outside import OutsideFrontEnd
from poseidon.errors import UnsupportedError
from poseidon.keras.backend import Backend, KerasExchange, Setup, check_alone
from poseidon.keras.batches import unpack
from poseidon.keras.tensorflow_moments import Moments
from poseidon.keras.units import describe_variables
from poseidon.planning.planner import Plan
from poseidon.tensorflow.exchange import GraphExchange
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
        check_alone(model)
        if model.jit_compile:
            log.warning("jit_compile is turned off: XLA cannot exchange gradients in the middle of a step")
            model.jit_compile = False

    def attach(self, setup: Setup) -> KerasExchange:
        """Install the exchange in the train step. Collective."""
        return TensorFlowExchange(setup)


class TensorFlowExchange:
    """The exchange of one model's gradients, in its train step and its optimizer."""

    def __init__(self, setup: Setup) -> None:
        self._model = setup.model
        self._optimizer = setup.model.optimizer
        self._variables = list(setup.variables)
        self._front = OutsideFrontEnd(setup.team, describe_variables(setup.variables), setup.units, setup.options)
        self._graph = GraphExchange(self._front, setup.units)
        self._moments = Moments(setup, self._front)
        self._token: Any = None
        self._is_averaged = False
        self._train_step: Callable[..., Any] = setup.model.train_step
        self._has_own_step = "train_step" in vars(setup.model)
        self._apply: Callable[..., Any] = self._optimizer.apply
        setup.model.train_step = self._step
        self._optimizer.apply = self._average_and_apply
        # Keras may have traced a step without us.
        setup.model.train_function = None

    @property
    def plan(self) -> Plan | None:
        """The routes in force; None before the end of the first step."""
        return self._front.plan

    @property
    def error(self) -> BaseException | None:
        """The first error in a callback."""
        return self._graph.error or self._moments.error

    def detach(self) -> None:
        """Restore model, layers and optimizer."""
        self._moments.detach()
        del self._optimizer.apply
        if self._has_own_step:
            self._model.train_step = self._train_step
        else:
            del self._model.train_step
        self._model.train_function = None
        self._front.detach()

    def _step(self, data: Any) -> Any:
        """Stand in for ``model.train_step``; in graph mode it runs once per kind of batch, for tracing."""
        data, samples = unpack(data)
        rows = _rows(data)
        samples = rows if samples is None else tf.reshape(samples, ())
        self._token = self._graph.begin(samples)
        self._moments.begin(tf.cast(samples, tf.float64) / tf.cast(rows, tf.float64), self._token)
        self._is_averaged = False
        before = [tf.identity(variable.value) for variable in self._model.metrics_variables]
        logs = self._train_step(data)
        self._token = None
        if not self._is_averaged:
            raise UnsupportedError(
                f"the train_step of {type(self._model).__name__} did not call self.optimizer.apply or apply_gradients, "
                "so its gradients cannot be intercepted; let it update the model through self.optimizer"
            )
        self._forget(before, samples)
        return logs

    def _forget(self, before: Sequence[Any], samples: Any) -> None:
        """Undo the effect on the metrics of a batch that does not count."""
        # Metrics created in this step have no earlier state; they come after the others.
        for variable, value in zip(self._model.metrics_variables, before, strict=False):
            variable.assign(tf.where(samples > 0, variable.value, value))

    def _average_and_apply(self, gradients: Any, trainable_variables: Any = None) -> Any:
        """Stand in for ``optimizer.apply``."""
        variables = self._variables if trainable_variables is None else list(trainable_variables)
        by_variable = {id(variable): gradient for variable, gradient in zip(variables, gradients, strict=True)}
        means = self._graph.average([by_variable.get(id(variable)) for variable in self._variables], self._token)
        self._is_averaged = True
        mean_of = {id(variable): mean for variable, mean in zip(self._variables, means, strict=True)}
        return self._apply([mean_of.get(id(variable)) for variable in variables], variables)


def _rows(data: Any) -> Any:
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    return tf.shape(next(leaf for leaf in keras.tree.flatten(x) if leaf is not None))[0]
