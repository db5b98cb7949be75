"""SPP: pooling over successively finer grids, for images of any size."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from poseidon.caffe.blob import Shape
from poseidon.caffe.layers.base import Blobs, Layer, Tensors
from poseidon.caffe.layers.pooling import Windows, pool, pooled_sizes
from poseidon.caffe.layers.registry import register
from poseidon.caffe.layers.windows import AxisWindow, channels_inside
from poseidon.caffe.schema.messages import PoolingParameter, SPPParameter


@register("SPP")
class SPP(Layer):
    """Pools into 1, 2x2, 4x4 ... windows and concatenates the results; a single level keeps its four axes."""

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        settings = self.param.spp_param
        self._height: int = settings.pyramid_height
        self._method: int = PoolingParameter.PoolMethod.Value(SPPParameter.PoolMethod.Name(settings.pool))
        if self._height < 1:
            raise self.error("spp_param.pyramid_height must be given and positive")

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        (shape,) = bottoms
        if len(shape) != 4 or min(shape[2:]) < 1:
            raise self.error(f"bottom {self.param.bottom[0]!r} must have 4 axes and hold values, its shape is {shape}")
        sizes = [pooled_sizes(shape[2:], windows, True) for windows in self._levels(shape)]
        if self._height == 1:
            return [(*shape[:2], *sizes[0])]
        return [(shape[0], shape[1] * sum(high * wide for high, wide in sizes))]

    def compute(self, inputs: Tensors, params: Tensors) -> Tensors:
        values = channels_inside(inputs[0])
        levels = self._levels(tuple(values.shape))
        parts = [pool(values, windows, self._method, True, self.is_training) for windows in levels]
        return (parts[0] if self._height == 1 else torch.cat([part.flatten(1) for part in parts], 1),)

    def _levels(self, shape: Shape) -> list[Windows]:
        return [(self._window(level, shape[2]), self._window(level, shape[3])) for level in range(self._height)]

    def _window(self, level: int, size: int) -> AxisWindow:
        bins = 2**level
        kernel = -(-size // bins)
        pad = (kernel * bins - size + 1) // 2
        if pad >= kernel:
            raise self.error(f"pyramid_height {self._height} is too much: level {level} cannot cut {size} into {bins}")
        if pad and self._method == PoolingParameter.STOCHASTIC:
            raise self.error(f"STOCHASTIC pooling cannot be padded, but level {level} cuts {size} into {bins}")
        return AxisWindow(kernel, kernel, pad, dilation=1)
