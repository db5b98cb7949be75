"""BatchNormalization over the samples of all workers, on TensorFlow.

Each worker computes the moments of its own rows; a callback gathers everybody's and combines them, all workers in the
same way and so to the same bits. The callbacks block, so they must come in one order on all workers: they are stateful
operations, which TensorFlow runs in the order of the program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from poseidon.engine.outside import Array, OutsideFrontEnd
from poseidon.keras.backend import Setup


class Moments:
    """Replaces the moments of some layers by those over all workers."""

    def __init__(self, setup: Setup, front: OutsideFrontEnd) -> None:
        self._channel = setup.moments
        self._front = front
        self._team = setup.team
        self._layers = setup.synchronized
        self._row_weight: Any = None
        self.error: BaseException | None = None
        """The first error of a callback."""
        for layer in self._layers:
            layer._moments = self._moments_of(layer)

    def begin(self, row_weight: Any, token: Any) -> None:
        """Take note, in each step, for how many samples a row of the batch counts; ``token`` says that it has begun."""
        if token is not None:
            with tf.control_dependencies([token]):
                row_weight = tf.identity(row_weight)
        self._row_weight = row_weight

    def detach(self) -> None:
        """Give the layers back as they were."""
        for layer in self._layers:
            del layer._moments

    def _moments_of(self, layer: Any) -> Callable[..., Any]:
        plain = type(layer)._moments

        def moments(inputs: Any, mask: Any) -> Any:
            axes = layer._reduction_axes
            if mask is None:
                mean, variance = tf.nn.moments(inputs, axes)
                rows = tf.reduce_prod(tf.gather(tf.shape(inputs), axes))
            else:
                was, layer.synchronized = layer.synchronized, False
                mean, variance = plain(layer, inputs, mask)
                layer.synchronized = was
                rows = tf.math.count_nonzero(mask)
            weight = 1.0 if self._row_weight is None else self._row_weight
            return self._combined(mean, variance, tf.cast(rows, tf.float64) * weight, layer.name)

        return moments

    def _combined(self, mean: Any, variance: Any, count: Any, name: str) -> Any:
        dtype = mean.dtype

        def forward(local_mean: Array, local_variance: Array, local_count: Array) -> list[Any]:
            whole = combine(self._gather(local_mean, local_variance, local_count, name), self._team.rank)
            return [np.asarray(value, local_mean.dtype) for value in whole]

        def backward(mean_gradient: Array, variance_gradient: Array) -> tuple[Array, Array]:
            return self._sum_gradients(mean_gradient, variance_gradient, name)

        @tf.custom_gradient
        def average(mean: Any, variance: Any) -> Any:
            whole_mean, whole_variance, share = self._call(forward, [mean, variance, count], [dtype] * 3)
            for tensor in (whole_mean, whole_variance):
                tensor.set_shape(mean.shape)

            def gradient(by_mean: Any, by_variance: Any) -> Any:
                by_mean, by_variance = self._call(backward, [by_mean, by_variance], [dtype] * 2)
                for tensor in (by_mean, by_variance):
                    tensor.set_shape(mean.shape)
                from_variance = by_variance * share
                return by_mean * share + 2.0 * from_variance * (mean - whole_mean), from_variance

            return (whole_mean, whole_variance), gradient

        return average(mean, variance)

    def _gather(self, mean: Array, variance: Array, count: Array, name: str) -> Array:
        """Return a row for each worker: its count, then its means, then its variances."""
        assert self._channel is not None
        rows = np.zeros((self._team.size, 1 + 2 * mean.size))
        rows[self._team.rank] = np.concatenate([[count], mean, variance])
        return self._channel.sum(rows, f"the moments of {name}")

    def _sum_gradients(self, by_mean: Array, by_variance: Array, name: str) -> tuple[Array, Array]:
        # This worker's gradients will be multiplied by its weight later on; what comes from the others must be too.
        assert self._channel is not None
        weight = self._front.weight
        both = np.concatenate([by_mean, by_variance]).astype(np.float64) * weight
        total = self._channel.sum(both, f"the gradients of the moments of {name}")
        total = (total / weight if weight else np.zeros_like(total)).astype(by_mean.dtype)
        return total[: by_mean.size], total[by_mean.size :]

    def _call(self, function: Callable[..., Any], inputs: list[Any], types: list[Any]) -> Any:
        def guarded(*arrays: Any) -> Any:
            try:
                return function(*arrays)
            except BaseException as error:
                self.error = self.error or error
                raise

        return tf.numpy_function(guarded, inputs, types, stateful=True)


def combine(parts: Array, rank: int) -> tuple[Array, Array, float]:
    """Return mean and variance over all workers, and the share that ``rank``'s rows have in them. Pure."""
    width = (parts.shape[1] - 1) // 2
    counts, means, variances = parts[:, :1], parts[:, 1 : 1 + width], parts[:, 1 + width :]
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    variance = (counts * (variances + (means - mean) ** 2)).sum(0) / total
    return mean, variance, float(counts[rank, 0] / total)
