"""Convolution and Deconvolution over any number of spatial axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from poseidon.caffe.blob import Shape
from poseidon.caffe.layers.base import Blobs, Count, Layer, Tensors
from poseidon.caffe.layers.registry import register
from poseidon.caffe.layers.windows import AxisWindow, channels_inside, read_windows
from poseidon.errors import ConfigError

_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_SPREAD = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class _Filters(Layer):
    """Base of layers that apply one set of filters to each bottom; axes before the channels count as rows."""

    bottom_count = Count(1, None)
    top_count = Count(1, None)
    equal_counts = True

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        settings = self.param.convolution_param
        shape = bottoms[0].shape
        self._axis = self.axis(settings.axis, len(shape))
        try:
            self._windows = read_windows(settings, len(shape) - self._axis - 1)
        except ConfigError as error:
            raise self.error(str(error)) from None
        self._channels = shape[self._axis]
        self._outputs: int = settings.num_output
        self._groups: int = settings.group
        if self._outputs < 1:
            raise self.error("convolution_param.num_output must be given and positive")
        if self._groups < 1 or self._channels % self._groups or self._outputs % self._groups:
            raise self.error(
                f"convolution_param.group {self._groups} must divide the {self._channels} channels of bottom "
                f"{self.param.bottom[0]!r} (shape {shape}) and num_output {self._outputs}"
            )
        kernel = [window.kernel for window in self._windows]
        self.make_param(0, (*self.filter_counts(), *kernel), settings.weight_filler)
        if settings.bias_term:
            self.make_param(1, (self._outputs,), settings.bias_filler)

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        first = bottoms[0]
        for name, shape in zip(self.param.bottom, bottoms, strict=True):
            if shape != first:
                raise self.error(
                    f"bottom {name!r} has shape {shape}, but bottom {self.param.bottom[0]!r} has {first}; "
                    "all bottoms must have one shape"
                )
        if len(first) != self._axis + 1 + len(self._windows) or first[self._axis] != self._channels:
            raise self.error(
                f"bottom {self.param.bottom[0]!r} has shape {first}; the filters of shape {self.blobs[0].shape} need "
                f"{self._channels} channels on axis {self._axis} and {len(self._windows)} spatial axes"
            )
        sizes = first[self._axis + 1 :]
        spatial = [self.top_size(window, size) for window, size in zip(self._windows, sizes, strict=True)]
        if any(size < 1 for size in spatial):
            raise self.error(
                f"filters of shape {self.blobs[0].shape} do not fit bottom {self.param.bottom[0]!r} of shape {first}: "
                f"the top's spatial shape would be {tuple(spatial)}"
            )
        return [(*first[: self._axis], self._outputs, *spatial)] * len(bottoms)

    def compute(self, inputs: Tensors, params: Tensors) -> Tensors:
        bias = params[1] if len(params) > 1 else None
        return tuple([self._apply(values, params[0], bias) for values in inputs])

    def _apply(self, values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        before, spatial = values.shape[: self._axis], values.shape[self._axis + 1 :]
        rows = values if self._axis == 1 else values.reshape(math.prod(before), self._channels, *spatial)
        if not spatial:
            rows, weight = rows.unsqueeze(-1), weight.unsqueeze(-1)
        result = self.filter(channels_inside(rows), weight, bias)
        if self._axis == 1 and spatial:
            return result
        return result.reshape(*before, self._outputs, *(result.shape[2:] if spatial else ()))

    @property
    def moving(self) -> Sequence[AxisWindow]:
        """The windows; one of size 1 if there is no spatial axis."""
        return self._windows or [AxisWindow(1, 1, 0, 1)]

    def filter_counts(self) -> tuple[int, int]:
        """Return the first two dimensions of the weights."""
        raise TypeError(f"layer type {self.type} does not shape its weights")

    def top_size(self, window: AxisWindow, size: int) -> int:
        """Return the top's size along an axis on which the bottom has ``size``."""
        raise TypeError(f"layer type {self.type} does not shape its top")

    def filter(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Apply the filters to (rows, channels, *spatial)."""
        raise TypeError(f"layer type {self.type} does not filter")


@register("Convolution")
class Convolution(_Filters):
    """Slides filters over the bottom; weights are outputs x channels per group x kernel."""

    def filter_counts(self) -> tuple[int, int]:
        return self._outputs, self._channels // self._groups

    def top_size(self, window: AxisWindow, size: int) -> int:
        return window.positions(size)

    def filter(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return convolve(rows, weight, bias, self.moving, self._groups)


@register("Deconvolution")
class Deconvolution(_Filters):
    """Adds a scaled filter for every value of the bottom; weights are channels x outputs per group x kernel."""

    def filter_counts(self) -> tuple[int, int]:
        return self._channels, self._outputs // self._groups

    def top_size(self, window: AxisWindow, size: int) -> int:
        return window.spread(size)

    def filter(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return spread(rows, weight, bias, self.moving, self._groups)


def convolve(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, windows: Sequence[AxisWindow], groups: int
) -> torch.Tensor:
    """Convolve over any number of spatial axes; beyond PyTorch's three, sum over the first of them."""
    if len(windows) in _CONVOLVE:
        stride, pad, dilation = _columns(windows)
        return _CONVOLVE[len(windows)](rows, weight, bias, stride, pad, dilation, groups)
    first, rest = windows[0], windows[1:]
    padded = F.pad(rows, (0, 0) * len(rest) + (first.pad, first.pad))
    positions = first.positions(rows.shape[2])
    total: torch.Tensor | None = None
    for place in range(first.kernel):
        begin = place * first.dilation
        slices = padded[:, :, begin : begin + (positions - 1) * first.stride + 1 : first.stride]
        merged = slices.transpose(1, 2).flatten(0, 1)
        part = convolve(merged, weight[:, :, place], bias if place == 0 else None, rest, groups)
        total = part if total is None else total + part
    assert total is not None
    return total.reshape(rows.shape[0], positions, *total.shape[1:]).transpose(1, 2)


def spread(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, windows: Sequence[AxisWindow], groups: int
) -> torch.Tensor:
    """Apply the transpose of ``convolve``: every value adds its filter to the result."""
    if len(windows) in _SPREAD:
        stride, pad, dilation = _columns(windows)
        return _SPREAD[len(windows)](rows, weight, bias, stride, pad, 0, groups, dilation)
    first, rest = windows[0], windows[1:]
    count, positions = rows.shape[0], rows.shape[2]
    merged = rows.transpose(1, 2).flatten(0, 1)
    canvas: torch.Tensor | None = None
    for place in range(first.kernel):
        part = spread(merged, weight[:, :, place], None, rest, groups)
        part = part.reshape(count, positions, *part.shape[1:]).transpose(1, 2)
        if canvas is None:
            size = first.stride * (positions - 1) + first.extent
            canvas = part.new_zeros((*part.shape[:2], size, *part.shape[3:]))
        begin = place * first.dilation
        canvas[:, :, begin : begin + (positions - 1) * first.stride + 1 : first.stride] += part
    assert canvas is not None
    result = canvas[:, :, first.pad : canvas.shape[2] - first.pad]
    return result if bias is None else result + bias.reshape(-1, *[1] * len(windows))


def _columns(windows: Sequence[AxisWindow]) -> tuple[list[int], list[int], list[int]]:
    return [w.stride for w in windows], [w.pad for w in windows], [w.dilation for w in windows]
