"""Im2col: the windows of a convolution, laid out as channels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.nn.functional as F

from poseidon.caffe.blob import Shape
from poseidon.caffe.layers.base import Blobs, Layer, Tensors
from poseidon.caffe.layers.registry import register
from poseidon.caffe.layers.windows import read_windows, swept
from poseidon.errors import ConfigError


@register("Im2col")
class Im2col(Layer):
    """Copies each window's values into the channels at the window's position."""

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        settings = self.param.convolution_param
        axes = len(bottoms[0].shape)
        self._axis = self.axis(settings.axis, axes)
        if self._axis == axes - 1:
            raise self.error(f"bottom {self.param.bottom[0]!r} of shape {bottoms[0].shape} has no spatial axis")
        try:
            self._windows = read_windows(settings, axes - self._axis - 1)
        except ConfigError as error:
            raise self.error(str(error)) from None

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        shape = bottoms[0]
        if len(shape) != self._axis + 1 + len(self._windows):
            raise self.error(f"bottom {self.param.bottom[0]!r} changed its number of axes: its shape is now {shape}")
        sizes = shape[self._axis + 1 :]
        spatial = [window.positions(size) for window, size in zip(self._windows, sizes, strict=True)]
        if any(size < 1 for size in spatial):
            kernel = tuple(window.kernel for window in self._windows)
            raise self.error(f"kernel {kernel} does not fit bottom {self.param.bottom[0]!r} of shape {shape}")
        channels = shape[self._axis] * math.prod(window.kernel for window in self._windows)
        return [(*shape[: self._axis], channels, *spatial)]

    def compute(self, inputs: Tensors, params: Tensors) -> Tensors:
        (values,) = inputs
        rows = values.reshape(-1, *values.shape[self._axis :])
        pads = [pad for window in reversed(self._windows) for pad in (window.pad, window.pad)]
        windows = swept(F.pad(rows, pads), self._windows)
        return (windows.reshape(self.top_shapes([tuple(values.shape)])[0]),)
