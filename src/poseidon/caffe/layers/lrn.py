"""LRN: divides each value by the energy around it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from poseidon.caffe.blob import Shape
from poseidon.caffe.layers.base import Blobs, Layer
from poseidon.caffe.layers.registry import register
from poseidon.caffe.schema.messages import LRNParameter


@register("LRN")
class LRN(Layer):
    """x * (shift + alpha * mean of squares around x) ** -beta, averaged across channels or within one.

    Across channels the shift is ``k``; within a channel Caffe always takes 1.
    """

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        settings = self.param.lrn_param
        self._size: int = settings.local_size
        if self._size % 2 == 0:
            raise self.error(f"lrn_param.local_size must be odd, it is {self._size}")
        self._alpha: float = settings.alpha
        self._beta: float = settings.beta
        self._is_across: bool = settings.norm_region == LRNParameter.ACROSS_CHANNELS
        self._shift: float = settings.k if self._is_across else 1.0

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        (shape,) = bottoms
        if len(shape) != 4:
            raise self.error(f"bottom {self.param.bottom[0]!r} must have 4 axes, its shape is {shape}")
        return [shape]

    def forward(self, bottoms: Blobs, tops: Blobs) -> None:
        (values,) = self.input_tensors(bottoms, tops)
        self._values = values
        self._energy = self._around(values.square()).mul_(self._alpha).add_(self._shift)
        self._factor = inverse_power(self._energy, self._beta)
        tops[0].put_data(values * self._factor)

    def backward(self, tops: Blobs, propagate_down: Sequence[bool], bottoms: Blobs) -> None:
        if not propagate_down[0]:
            return
        direct = tops[0].diff_tensor * self._factor
        # Windows are centred, so the gradient sums over the same neighbours as the forward pass.
        ratio = (direct * self._values).div_(self._energy)
        spill = self._around(ratio).mul_(self._values)
        bottoms[0].put_diff(direct.sub_(spill, alpha=2 * self._alpha * self._beta))

    def _around(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean over the window around each position, with zeros outside."""
        reach = (self._size - 1) // 2
        if not self._is_across:
            return F.avg_pool2d(values, self._size, 1, reach)
        total = values.clone()
        channels = values.shape[1]
        for shift in range(1, min(reach, channels - 1) + 1):
            total[:, shift:] += values[:, : channels - shift]
            total[:, : channels - shift] += values[:, shift:]
        return total.div_(self._size)


def inverse_power(values: torch.Tensor, beta: float) -> torch.Tensor:
    """Return ``values ** -beta``; the usual 0.75 by square roots, several times faster than powers."""
    if beta != 0.75:
        return values.pow(-beta)
    root = values.rsqrt()
    return root.mul_(root.sqrt())
