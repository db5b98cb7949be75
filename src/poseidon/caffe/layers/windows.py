"""Sliding windows: size, stride, padding and dilation along each spatial axis, and memory layout for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from poseidon.caffe.schema.messages import ConvolutionParameter
from poseidon.errors import ConfigError


@dataclass(frozen=True)
class AxisWindow:
    """How a window moves along one axis."""

    kernel: int
    stride: int
    pad: int
    dilation: int

    @property
    def extent(self) -> int:
        """Number of positions from the window's first value to its last."""
        return self.dilation * (self.kernel - 1) + 1

    def positions(self, size: int) -> int:
        """Return how many positions the window can take along ``size`` values; less than 1: it does not fit."""
        return (size + 2 * self.pad - self.extent) // self.stride + 1

    def spread(self, positions: int) -> int:
        """Return the size along which the window takes that many positions: the inverse of ``positions``."""
        return self.stride * (positions - 1) + self.extent - 2 * self.pad


def read_windows(settings: ConvolutionParameter, axes: int) -> list[AxisWindow]:
    """Return one AxisWindow per spatial axis from a ConvolutionParameter, or raise ConfigError."""
    kernels = _per_axis(settings, "kernel_size", "kernel", axes)
    strides = _per_axis(settings, "stride", "stride", axes, default=1)
    pads = _per_axis(settings, "pad", "pad", axes, default=0)
    dilations = _per_axis(settings, "dilation", None, axes, default=1)
    for name, values in (("kernel_size", kernels), ("stride", strides), ("dilation", dilations)):
        if 0 in values:
            raise ConfigError(f"convolution_param.{name} must be positive, it is {' '.join(map(str, values))}")
    return [AxisWindow(*values) for values in zip(kernels, strides, pads, dilations, strict=True)]


def _per_axis(
    settings: ConvolutionParameter, name: str, stem: str | None, axes: int, default: int | None = None
) -> list[int]:
    """Return the values of a repeated field, set once for all axes, once per axis, or as ``_h`` and ``_w``."""
    given = list(getattr(settings, name))
    if stem is not None and (settings.HasField(f"{stem}_h") or settings.HasField(f"{stem}_w")):
        if axes != 2:
            raise ConfigError(f"convolution_param.{stem}_h and {stem}_w need 2 spatial axes, the bottom has {axes}")
        if given:
            raise ConfigError(f"convolution_param takes {name} or {stem}_h and {stem}_w, not both")
        return [getattr(settings, f"{stem}_h"), getattr(settings, f"{stem}_w")]
    if not given and (default is not None or axes == 0):
        return [default or 0] * axes
    if len(given) not in (1, axes):
        raise ConfigError(
            f"convolution_param.{name} must be given once, or once for each of the {axes} spatial axes; "
            f"it is given {len(given)} times"
        )
    return given * axes if len(given) == 1 else given


def swept(values: torch.Tensor, windows: Sequence[AxisWindow]) -> torch.Tensor:
    """Return a view of padded ``values`` (rows, channels, *spatial) as (rows, channels, *kernel, *positions)."""
    axes = len(windows)
    for axis, window in enumerate(windows, 2):
        values = values.unfold(axis, window.extent, window.stride)[..., :: window.dilation]
    kernel_axes, position_axes = range(2 + axes, 2 + 2 * axes), range(2, 2 + axes)
    return values.permute(0, 1, *kernel_axes, *position_axes)


def channels_inside(values: torch.Tensor) -> torch.Tensor:
    """Return a batch of images in the memory layout that suits windows on its device."""
    if values.dim() == 4 and values.device.type == "cpu":
        # With channels innermost PyTorch's CPU kernels for windows are vectorised; ``contiguous`` keeps the strides of
        # a single channel and misses these kernels.
        return values.to(memory_format=torch.channels_last)
    return values
