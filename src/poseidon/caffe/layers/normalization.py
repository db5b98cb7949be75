"""Normalising by mean and variance: of each sample (MVN), or of each channel over the batch (BatchNorm)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from poseidon.caffe.blob import Shape
from poseidon.caffe.layers.base import Blobs, Layer
from poseidon.caffe.layers.registry import register


@register("MVN")
class MVN(Layer):
    """Subtracts the mean of each channel (or sample) and divides by its standard deviation plus eps."""

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        settings = self.param.mvn_param
        self._scales: bool = settings.normalize_variance
        self._across: bool = settings.across_channels
        self._eps: float = settings.eps

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        (shape,) = bottoms
        if len(shape) > 4:
            raise self.error(f"bottom {self.param.bottom[0]!r} must have at most 4 axes, its shape is {shape}")
        return [shape + (1,) * (4 - len(shape))]

    def forward(self, bottoms: Blobs, tops: Blobs) -> None:
        values = bottoms[0].data_tensor
        rows = self._rows(values)
        centred = rows - rows.mean(1, keepdim=True)
        if self._scales:
            self._spread = centred.square().mean(1, keepdim=True).sqrt_().add_(self._eps)
            centred /= self._spread
            self._normal = centred
        tops[0].put_data(centred.reshape(tops[0].shape))

    def backward(self, tops: Blobs, propagate_down: Sequence[bool], bottoms: Blobs) -> None:
        if not propagate_down[0]:
            return
        diff = self._rows(tops[0].diff_tensor)
        result = diff - diff.mean(1, keepdim=True)
        if self._scales:
            # Caffe differentiates as if eps were part of the variance, which is exact only for eps 0.
            result -= self._normal * (diff * self._normal).mean(1, keepdim=True)
            result /= self._spread
        bottoms[0].put_diff(result.reshape(bottoms[0].shape))

    def _rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return one row per mean."""
        return values.reshape(math.prod(values.shape[: 1 if self._across else 2]), -1)


@register("BatchNorm")
class BatchNorm(Layer):
    """Normalises each channel, by the batch while training or by stored statistics.

    The parameters are decaying sums of means and of variances, and the sum of their weights, which divides them on use.
    The forward pass updates them, never a solver.
    """

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        settings = self.param.batch_norm_param
        has_choice = settings.HasField("use_global_stats")
        self._uses_stored: bool = settings.use_global_stats if has_choice else not self.is_training
        self._fraction: float = settings.moving_average_fraction
        self._eps: float = settings.eps
        self._channels = _channels(bottoms[0].shape)
        for index, size in enumerate((self._channels, self._channels, 1)):
            self.make_param(index, (size,))
        self._forbid_learning()

    def _forbid_learning(self) -> None:
        specs = self.param.param
        for index, spec in enumerate(specs):
            if spec.lr_mult != 0:
                raise self.error(f"parameter {index} is a statistic: its lr_mult must be 0, it is {spec.lr_mult}")
        while len(specs) < len(self.blobs):
            specs.add().lr_mult = 0

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        (shape,) = bottoms
        if _channels(shape) != self._channels:
            raise self.error(
                f"bottom {self.param.bottom[0]!r} has shape {shape}; the statistics are for {self._channels} channels"
            )
        return [shape]

    def forward(self, bottoms: Blobs, tops: Blobs) -> None:
        (values,) = self.input_tensors(bottoms, tops)
        rows = values.unsqueeze(1) if values.dim() == 1 else values
        result = self._by_stored(rows) if self._uses_stored else self._by_batch(rows)
        tops[0].put_data(result.reshape(values.shape))

    def _by_stored(self, rows: torch.Tensor) -> torch.Tensor:
        means, variances, weight = [blob.data_tensor for blob in self.blobs]
        factor = torch.where(weight == 0, 0, 1 / weight)
        variance = variances * factor
        self._deviation = (variance + self._eps).sqrt()
        return F.batch_norm(rows, means * factor, variance, eps=self._eps)

    def _by_batch(self, rows: torch.Tensor) -> torch.Tensor:
        # A momentum of 1 makes PyTorch write this batch's mean and unbiased variance into these two.
        mean, variance = rows.new_zeros(self._channels), rows.new_zeros(self._channels)
        result, *moments = torch.native_batch_norm(rows, None, None, mean, variance, True, 1.0, self._eps)
        self._rows, self._moments = rows, moments
        if rows.numel() == self._channels:
            variance.zero_()
        for blob, statistic in zip(self.blobs, (mean, variance, rows.new_ones(1)), strict=True):
            blob.data_tensor.mul_(self._fraction).add_(statistic)
        return result

    def backward(self, tops: Blobs, propagate_down: Sequence[bool], bottoms: Blobs) -> None:
        if not propagate_down[0]:
            return
        diff = tops[0].diff_tensor
        if self._uses_stored:
            shape = (-1,) + (1,) * (diff.dim() - 2)
            bottoms[0].put_diff(diff / self._deviation.reshape(shape))
            return
        gradient, _, _ = torch.ops.aten.native_batch_norm_backward(
            diff.reshape(self._rows.shape),
            self._rows,
            None,
            None,
            None,
            *self._moments,
            True,
            self._eps,
            [True, False, False],
        )
        bottoms[0].put_diff(gradient.reshape(bottoms[0].shape))


def _channels(shape: Shape) -> int:
    return shape[1] if len(shape) > 1 else 1
