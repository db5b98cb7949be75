"""Scale and Bias: a factor, a summand or both along some axes, learned or given as a second bottom."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from poseidon.caffe.blob import Shape
from poseidon.caffe.layers.base import Blobs, Count, Layer, Tensors
from poseidon.caffe.layers.registry import register
from poseidon.caffe.schema import FillerParameter
from poseidon.caffe.schema.messages import BiasParameter, ScaleParameter


class _Broadcast(Layer):
    """Base of layers whose operand covers some axes of bottom 0 and is broadcast along the others."""

    bottom_count = Count(1, 2)

    def find_operand(self, bottoms: Blobs, settings: ScaleParameter | BiasParameter, filler: FillerParameter) -> Shape:
        """Create the operand as parameter 0 unless it is bottom 1; return its shape."""
        shape = bottoms[0].shape
        self._first = self.axis(settings.axis, len(shape))
        if len(bottoms) > 1:
            return bottoms[1].shape
        count: int = settings.num_axes
        if count < -1 or self._first + count > len(shape):
            raise self.error(
                f"num_axes {count} from axis {self._first} does not fit bottom {self.param.bottom[0]!r} of shape "
                f"{shape}; -1 means up to the end"
            )
        operand = shape[self._first :] if count == -1 else shape[self._first : self._first + count]
        self.make_param(0, operand, filler)
        return operand

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        values = bottoms[0]
        operand = bottoms[1] if len(bottoms) > 1 else self.blobs[0].shape
        if operand and operand != values[self._first : self._first + len(operand)]:
            raise self.error(
                f"an operand of shape {operand} does not match bottom {self.param.bottom[0]!r} of shape {values} "
                f"from axis {self._first} on"
            )
        return [values]

    def widened(self, operand: torch.Tensor, axes: int) -> torch.Tensor:
        """Return the operand with size 1 on the axes along which it is broadcast."""
        if operand.dim() == 0:
            return operand
        return operand.reshape(operand.shape + (1,) * (axes - self._first - operand.dim()))


@register("Bias")
class Bias(_Broadcast):
    """Adds parameter 0 or bottom 1."""

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        self.find_operand(bottoms, self.param.bias_param, self.param.bias_param.filler)

    def compute(self, inputs: Tensors, params: Tensors) -> Tensors:
        bias = inputs[1] if len(inputs) > 1 else params[0]
        return (inputs[0] + self.widened(bias, inputs[0].dim()),)


@register("Scale")
class Scale(_Broadcast):
    """Multiplies by parameter 0 or bottom 1, then adds the last parameter if ``bias_term`` is set."""

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        settings = self.param.scale_param
        filler = settings.filler if settings.HasField("filler") else FillerParameter(type="constant", value=1)
        shape = self.find_operand(bottoms, settings, filler)
        self._has_bias: bool = settings.bias_term
        if self._has_bias:
            self.make_param(2 - len(bottoms), shape, settings.bias_filler)

    def compute(self, inputs: Tensors, params: Tensors) -> Tensors:
        values = inputs[0]
        factor = self.widened(inputs[1] if len(inputs) > 1 else params[0], values.dim())
        if not self._has_bias:
            return (values * factor,)
        return (torch.addcmul(self.widened(params[-1], values.dim()), values, factor),)
