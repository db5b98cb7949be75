"""Parameter: a learned blob that other layers read."""

from __future__ import annotations

from collections.abc import Sequence

from poseidon.caffe.blob import Shape
from poseidon.caffe.layers.base import Blobs, Layer, exactly
from poseidon.caffe.layers.registry import register


@register("Parameter")
class Parameter(Layer):
    """Its top is its only parameter, initially zero."""

    bottom_count = exactly(0)

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        self.make_param(0, self.param.parameter_param.shape.dim)

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        return [self.blobs[0].shape]

    def forward(self, bottoms: Blobs, tops: Blobs) -> None:
        tops[0].put_data(self.blobs[0].data_tensor, borrowed=True)

    def backward(self, tops: Blobs, propagate_down: Sequence[bool], bottoms: Blobs) -> None:
        if self.param_propagate_down[0]:
            # A parameter's gradient is later changed in place, so it must not share memory with the top's.
            self.blobs[0].add_diff(tops[0].diff_tensor.clone())
