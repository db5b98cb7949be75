"""PReLU: a rectifier whose slope below zero is learned."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F

from poseidon.caffe.blob import Shape
from poseidon.caffe.layers.base import Blobs, Layer, Tensors
from poseidon.caffe.layers.registry import register
from poseidon.caffe.schema import FillerParameter


@register("PReLU")
class PReLU(Layer):
    """x above zero, slope * x below, with one slope per channel or one for all; may work in place."""

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        self._check_axes(bottoms[0].shape)
        settings = self.param.prelu_param
        is_given = settings.HasField("filler")
        filler = settings.filler if is_given else FillerParameter(type="constant", value=0.25)
        self.make_param(0, () if settings.channel_shared else (bottoms[0].shape[1],), filler)

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        (shape,) = bottoms
        self._check_axes(shape)
        if self.blobs[0].shape and self.blobs[0].shape != shape[1:2]:
            raise self.error(
                f"bottom {self.param.bottom[0]!r} of shape {shape} has {shape[1]} channels; "
                f"the slopes have shape {self.blobs[0].shape}"
            )
        return bottoms

    def compute(self, inputs: Tensors, params: Tensors) -> Tensors:
        return (F.prelu(inputs[0], params[0].reshape(-1)),)

    def _check_axes(self, shape: Shape) -> None:
        if len(shape) < 2:
            raise self.error(f"bottom {self.param.bottom[0]!r} of shape {shape} must have at least 2 axes")
