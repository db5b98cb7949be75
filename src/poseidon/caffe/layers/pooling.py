"""Pooling: the maximum, the average or a random value of each window."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from poseidon.caffe.blob import Shape
from poseidon.caffe.layers.base import Blobs, Count, Layer, Tensors
from poseidon.caffe.layers.registry import register
from poseidon.caffe.layers.windows import AxisWindow, channels_inside, swept
from poseidon.caffe.schema.messages import PoolingParameter

_MAX, _AVE = PoolingParameter.MAX, PoolingParameter.AVE

Windows = tuple[AxisWindow, AxisWindow]


@register("Pooling")
class Pooling(Layer):
    """Reduces each window of an image to one value; MAX's second top holds the value's index in its plane."""

    top_count = Count(1, 2)

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        settings = self.param.pooling_param
        self._method: int = settings.pool
        self._rounds_up: bool = settings.round_mode == PoolingParameter.CEIL
        self._is_global: bool = settings.global_pooling
        if len(tops) > 1 and self._method != _MAX:
            raise self.error("only MAX pooling has a second top")
        strides, pads = self._pair(settings, "stride"), self._pair(settings, "pad")
        kernels = (1, 1) if self._is_global else self._kernels(settings)
        self._windows = (
            AxisWindow(kernels[0], strides[0], pads[0], dilation=1),
            AxisWindow(kernels[1], strides[1], pads[1], dilation=1),
        )
        if self._is_global:
            if any(settings.HasField(name) for name in ("kernel_size", "kernel_h", "kernel_w")):
                raise self.error("global_pooling takes no kernel size")
            if pads != (0, 0) or strides != (1, 1):
                raise self.error(f"global_pooling needs pad 0 and stride 1, not {pads} and {strides}")
        for window in self._windows:
            self._check_window(window)

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        (shape,) = bottoms
        if len(shape) != 4:
            raise self.error(f"bottom {self.param.bottom[0]!r} must have 4 axes, its shape is {shape}")
        sizes = pooled_sizes(shape[2:], self._fitted(shape), self._rounds_up)
        if min(sizes) < 1:
            kernel = tuple(window.kernel for window in self._windows)
            raise self.error(f"kernel {kernel} does not fit bottom {self.param.bottom[0]!r} of shape {shape}")
        return [(*shape[:2], *sizes)] * max(1, len(self.param.top))

    def compute(self, inputs: Tensors, params: Tensors) -> Tensors:
        values = channels_inside(inputs[0])
        windows = self._fitted(tuple(values.shape))
        if len(self.param.top) > 1:
            pooled, places = pool_max(values, windows, self._rounds_up)
            return pooled, places.to(pooled.dtype)
        return (pool(values, windows, self._method, self._rounds_up, self.is_training),)

    def _fitted(self, shape: Shape) -> Windows:
        if not self._is_global:
            return self._windows
        return AxisWindow(shape[2], 1, 0, 1), AxisWindow(shape[3], 1, 0, 1)

    def _kernels(self, settings: PoolingParameter) -> tuple[int, int]:
        has_both = settings.HasField("kernel_h") and settings.HasField("kernel_w")
        if settings.HasField("kernel_size") == has_both:
            raise self.error("pooling_param needs kernel_size, or both kernel_h and kernel_w (and not all of them)")
        return (settings.kernel_h, settings.kernel_w) if has_both else (settings.kernel_size, settings.kernel_size)

    def _pair(self, settings: PoolingParameter, name: str) -> tuple[int, int]:
        """Return a setting for height and width, set once or as ``_h`` and ``_w``."""
        sides = [settings.HasField(f"{name}_{side}") for side in "hw"]
        if any(sides):
            if not all(sides) or settings.HasField(name):
                raise self.error(f"pooling_param needs {name}, or both {name}_h and {name}_w (and not all of them)")
            return getattr(settings, f"{name}_h"), getattr(settings, f"{name}_w")
        return getattr(settings, name), getattr(settings, name)

    def _check_window(self, window: AxisWindow) -> None:
        if window.kernel < 1 or window.stride < 1:
            raise self.error(f"kernel {window.kernel} and stride {window.stride} must be positive")
        if window.pad and self._method not in (_MAX, _AVE):
            raise self.error("only MAX and AVE pooling can be padded")
        if window.pad >= window.kernel:
            raise self.error(f"pad {window.pad} must be smaller than the kernel, {window.kernel}")


def pooled_sizes(sizes: Sequence[int], windows: Windows, rounds_up: bool) -> tuple[int, int]:
    """Return height and width of the result; with padding, no window may start beyond the image."""
    is_padded = any(window.pad for window in windows)
    rounded = math.ceil if rounds_up else math.floor
    results = []
    for size, window in zip(sizes, windows, strict=True):
        count = rounded((size + 2 * window.pad - window.kernel) / window.stride) + 1
        if is_padded and (count - 1) * window.stride >= size + window.pad:
            count -= 1
        results.append(count)
    return results[0], results[1]


def pool(values: torch.Tensor, windows: Windows, method: int, rounds_up: bool, draws: bool) -> torch.Tensor:
    """Pool a batch of images; with ``draws`` STOCHASTIC samples a value, otherwise it averages with its weights."""
    if method == _MAX:
        return pool_max(values, windows, rounds_up)[0]
    if method == _AVE:
        return _pool_average(values, windows, rounds_up)
    return _pool_stochastic(values, windows, rounds_up, draws)


def pool_max(values: torch.Tensor, windows: Windows, rounds_up: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each window's maximum and its index in the plane; ties go to the first."""
    kernel, stride, pad = _columns(windows)
    if _suits_torch(values, windows, rounds_up):
        return F.max_pool2d(values, kernel, stride, pad, ceil_mode=rounds_up, return_indices=True)
    padded = F.pad(values, _padding(values, windows, rounds_up), value=-math.inf)
    pooled, places = F.max_pool2d(padded, kernel, stride, return_indices=True)
    high, wide = places // padded.shape[3] - pad[0], places % padded.shape[3] - pad[1]
    # With a stride larger than the kernel the last window can lie outside the image: Caffe returns the lowest float.
    places = (high * values.shape[3] + wide).masked_fill(pooled == -math.inf, -1)
    return pooled.clamp(min=torch.finfo(torch.float32).min), places


def _pool_average(values: torch.Tensor, windows: Windows, rounds_up: bool) -> torch.Tensor:
    """Divide by the part of the window inside the padded image, not by the number of values read."""
    kernel, stride, pad = _columns(windows)
    if _suits_torch(values, windows, rounds_up):
        return F.avg_pool2d(values, kernel, stride, pad, ceil_mode=rounds_up)
    padded = F.pad(values, _padding(values, windows, rounds_up))
    sums = F.avg_pool2d(padded, kernel, stride, divisor_override=1)
    high, wide = [
        [max(1, min(window.kernel, size + 2 * window.pad - place * window.stride)) for place in range(count)]
        for size, window, count in zip(values.shape[2:], windows, sums.shape[2:], strict=True)
    ]
    return sums / torch.tensor([[h * w for w in wide] for h in high], dtype=values.dtype, device=values.device)


def _pool_stochastic(values: torch.Tensor, windows: Windows, rounds_up: bool, draws: bool) -> torch.Tensor:
    """Sample values with probability proportional to them, or average them with that probability as weight."""
    padded = F.pad(values, _padding(values, windows, rounds_up))
    choices = swept(padded, windows).flatten(2, 3)
    if draws:
        with torch.no_grad():
            sums = choices.cumsum(2)
            limits = torch.rand_like(sums[:, :, -1]) * sums[:, :, -1]
            chosen = (sums >= limits.unsqueeze(2)).to(torch.uint8).argmax(2, keepdim=True)
        return choices.gather(2, chosen).squeeze(2)
    total = choices.sum(2)
    has_weight = total > 0
    return torch.where(has_weight, choices.square().sum(2) / torch.where(has_weight, total, 1), 0)


def _columns(windows: Windows) -> tuple[list[int], list[int], list[int]]:
    return [w.kernel for w in windows], [w.stride for w in windows], [w.pad for w in windows]


def _suits_torch(values: torch.Tensor, windows: Windows, rounds_up: bool) -> bool:
    """Whether PyTorch's pooling accepts the windows and counts them as Caffe does."""
    sizes = values.shape[2:]
    counts = pooled_sizes(sizes, windows, rounds_up)
    return all(
        window.pad <= window.kernel // 2
        and window.kernel <= size + 2 * window.pad
        and (count - 1) * window.stride < size + window.pad
        for size, window, count in zip(sizes, windows, counts, strict=True)
    )


def _padding(values: torch.Tensor, windows: Windows, rounds_up: bool) -> list[int]:
    """Return F.pad's arguments that make Caffe's windows tile the image exactly; negative numbers crop."""
    amounts: list[int] = []
    counts = pooled_sizes(values.shape[2:], windows, rounds_up)
    for size, window, count in zip(values.shape[2:], windows, counts, strict=True):
        after = (count - 1) * window.stride + window.kernel - size - window.pad
        amounts = [window.pad, after, *amounts]
    return amounts
