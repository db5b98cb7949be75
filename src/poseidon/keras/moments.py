"""BatchNormalization over the samples of all workers: the hook in a Keras layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras

Combined = Callable[[Any, Any, Any, str], tuple[Any, Any]]
"""From mean, variance and number of this worker's rows, and the layer's name, to mean and variance over all workers."""


def replace_moments(layer: Any, combined: Combined) -> None:
    """Make a BatchNormalization layer use combined moments; ``del layer._moments`` undoes it."""
    plain = type(layer)._moments

    def moments(inputs: Any, mask: Any) -> Any:
        mean, variance = plain(layer, inputs, mask)
        rows = math.prod(inputs.shape[axis] for axis in layer._reduction_axes)
        count = rows if mask is None else keras.ops.count_nonzero(mask)
        return combined(mean, variance, count, layer.name)

    layer._moments = moments
