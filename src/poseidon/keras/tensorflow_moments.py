"""BatchNormalization over the samples of all workers, on TensorFlow.

The callbacks that exchange moments block, so all workers must run them in the same order: they are stateful operations,
which TensorFlow runs in program order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from poseidon.engine.moments import MomentsExchange
from poseidon.engine.outside import Array
from poseidon.keras.backend import Setup
from poseidon.keras.step_share import StepWeight
from poseidon.tensorflow.moments import combine_moments


class Moments:
    """Replaces the moments of some layers by those over all workers."""

    def __init__(self, setup: Setup, weight: StepWeight) -> None:
        self._layers = setup.synchronized
        self._row_weight: Any = 1.0
        self.error: BaseException | None = None
        """The first error of a callback."""
        if setup.moments is not None:
            self._exchange = MomentsExchange(setup.team, setup.moments, weight.get)
        for layer in self._layers:
            layer._moments = self._moments_of(layer)

    def begin(self, row_weight: Any, token: Any) -> None:
        """Record, in each step, how many samples a row of the batch counts for; ``token`` marks its beginning."""
        if not tf.executing_eagerly():
            with tf.control_dependencies([token]):
                row_weight = tf.identity(row_weight)
        self._row_weight = row_weight

    def detach(self) -> None:
        """Restore the layers."""
        for layer in self._layers:
            del layer._moments

    def _moments_of(self, layer: Any) -> Callable[..., Any]:
        plain = type(layer)._moments

        def moments(inputs: Any, mask: Any) -> Any:
            if mask is None:
                mean, variance = tf.nn.moments(inputs, layer._reduction_axes)
                rows = tf.reduce_prod(tf.gather(tf.shape(inputs), layer._reduction_axes))
            else:
                was, layer.synchronized = layer.synchronized, False
                mean, variance = plain(layer, inputs, mask)
                layer.synchronized = was
                rows = tf.math.count_nonzero(mask)
            return self._combined(mean, variance, tf.cast(rows, tf.float64) * self._row_weight, layer.name)

        return moments

    def _combined(self, mean: Any, variance: Any, count: Any, name: str) -> Any:
        def exchange(mean: Array, variance: Array, count: Array) -> list[Array]:
            whole = self._exchange.forward(mean, variance, float(count), name)
            return [np.asarray(value, mean.dtype) for value in whole]

        def exchange_back(by_mean: Array, by_variance: Array) -> tuple[Array, Array]:
            return self._exchange.backward(by_mean, by_variance, name)

        def forward(mean: Any, variance: Any) -> Any:
            return self._call(exchange, [mean, variance, count], 3, mean)

        def backward(by_mean: Any, by_variance: Any, _: Any) -> Any:
            return self._call(exchange_back, [by_mean, by_variance], 2, mean)

        return combine_moments(mean, variance, forward, backward)

    def _call(self, function: Callable[..., Any], inputs: list[Any], results: int, like: Any) -> Any:
        """Return the results of a Python function in the graph; the first two have the shape of ``like``."""

        def guarded(*arrays: Any) -> Any:
            try:
                return function(*arrays)
            except BaseException as error:
                self.error = self.error or error
                raise

        outputs = tf.numpy_function(guarded, inputs, [like.dtype] * results, stateful=True)
        for tensor in outputs[:2]:
            tensor.set_shape(like.shape)
        return outputs
