"""Reduction: reduces all axes from a given one on to a single value."""

from __future__ import annotations

import math
from collections.abc import Sequence

from poseidon.caffe.blob import Shape
from poseidon.caffe.layers.base import Layer, Tensors
from poseidon.caffe.layers.registry import register
from poseidon.caffe.schema.messages import ReductionParameter


@register("Reduction")
class Reduction(Layer):
    """The sum, sum of magnitudes, sum of squares or mean over ``axis`` and all axes after it, times ``coeff``."""

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        (shape,) = bottoms
        self._axis = self.axis(self.param.reduction_param.axis, len(shape))
        return [shape[: self._axis]]

    def compute(self, inputs: Tensors, params: Tensors) -> Tensors:
        settings = self.param.reduction_param
        shape = inputs[0].shape
        values = inputs[0].reshape(*shape[: self._axis], math.prod(shape[self._axis :]))
        if settings.operation == ReductionParameter.ASUM:
            values = values.abs()
        elif settings.operation == ReductionParameter.SUMSQ:
            values = values.square()
        result = values.mean(-1) if settings.operation == ReductionParameter.MEAN else values.sum(-1)
        return (result if settings.coeff == 1 else result * settings.coeff,)
