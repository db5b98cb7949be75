"""Crop: a part of one blob, as large as another."""

from __future__ import annotations

from collections.abc import Sequence

from poseidon.caffe.blob import Shape
from poseidon.caffe.layers.base import Blobs, Layer, Tensors, exactly
from poseidon.caffe.layers.registry import register


@register("Crop")
class Crop(Layer):
    """Cuts bottom 0 to the shape of bottom 1 from ``axis`` on, starting at the offsets."""

    bottom_count = exactly(2)

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        settings = self.param.crop_param
        axes = len(bottoms[0].shape)
        self._axis = self.axis(settings.axis, axes)
        offsets = list(settings.offset)
        cropped = axes - self._axis
        if len(offsets) not in (0, 1, cropped):
            raise self.error(f"crop_param.offset must be given at most once, or {cropped} times; got {len(offsets)}")
        self._offsets = offsets if len(offsets) == cropped else (offsets or [0]) * cropped

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        values, reference = bottoms
        if len(reference) < len(values):
            raise self.error(
                f"bottom {self.param.bottom[1]!r} of shape {reference} must have at least the axes of bottom "
                f"{self.param.bottom[0]!r} of shape {values}"
            )
        for axis, offset in enumerate(self._offsets, self._axis):
            if values[axis] - offset < reference[axis]:
                raise self.error(
                    f"on axis {axis}, {reference[axis]} values (as in {self.param.bottom[1]!r} of shape {reference}) "
                    f"from offset {offset} exceed the {values[axis]} of {self.param.bottom[0]!r} of shape {values}"
                )
        return [(*values[: self._axis], *reference[self._axis : len(values)])]

    def compute(self, inputs: Tensors, params: Tensors) -> Tensors:
        values, reference = inputs
        for axis, offset in enumerate(self._offsets, self._axis):
            values = values.narrow(axis, offset, reference.shape[axis])
        return (values,)
