"""Moments over all workers as a function in a TensorFlow graph, with its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from poseidon.engine.moments import differentiate

Forward = Callable[[Any, Any], Sequence[Any]]
"""From a worker's own mean and variance to those over all workers, and the share of its rows in them."""
Backward = Callable[[Any, Any, Any], Sequence[Any]]
"""From the gradients by mean and variance over all workers, and the share, to the sums of all workers' gradients."""


def combine_moments(mean: Any, variance: Any, forward: Forward, backward: Backward) -> tuple[Any, Any]:
    """Return mean and variance over all workers, as tensors that can be differentiated.

    ``forward`` and ``backward`` add to the graph the exchange of moments and the exchange of their gradients.
    """

    @tf.custom_gradient
    def combine(mean: Any, variance: Any) -> Any:
        whole_mean, whole_variance, share = forward(mean, variance)

        def gradient(by_mean: Any, by_variance: Any) -> Any:
            by_mean, by_variance = backward(by_mean, by_variance, share)
            return differentiate(by_mean, by_variance, mean, whole_mean, share)

        return (whole_mean, whole_variance), gradient

    whole: tuple[Any, Any] = combine(mean, variance)
    return whole
