"""Convert images to the layout, order and range that a net's input expects, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poseidon.caffe.float_images import Image, resize_image
from poseidon.errors import ConfigError


class Transformer:
    """Prepares images for the inputs of a net; ``inputs`` gives the shape of each, ``{"data": (10, 3, 227, 227)}``.

    The steps run in this order, each only where it was set: resize, transpose, channel swap, raw scale, mean, input
    scale. Means and the input scale therefore apply to swapped channels, after the raw scale.
    """

    def __init__(self, inputs: Mapping[str, Sequence[int]]) -> None:
        self.inputs = {name: tuple(shape) for name, shape in inputs.items()}
        self.transpose: dict[str, tuple[int, ...]] = {}
        self.channel_swap: dict[str, tuple[int, ...]] = {}
        self.raw_scale: dict[str, float] = {}
        self.mean: dict[str, NDArray[Any]] = {}
        self.input_scale: dict[str, float] = {}

    @classmethod
    def for_images(
        cls,
        name: str,
        shape: Sequence[int],
        mean: NDArray[Any] | None = None,
        input_scale: float | None = None,
        raw_scale: float | None = None,
        channel_swap: Sequence[int] | None = None,
    ) -> Transformer:
        """Return a Transformer for one input whose images have their channels last."""
        transformer = cls({name: shape})
        transformer.set_transpose(name, (2, 0, 1))
        if mean is not None:
            transformer.set_mean(name, mean)
        if input_scale is not None:
            transformer.set_input_scale(name, input_scale)
        if raw_scale is not None:
            transformer.set_raw_scale(name, raw_scale)
        if channel_swap is not None:
            transformer.set_channel_swap(name, channel_swap)
        return transformer

    def preprocess_all(self, in_: str, images: Iterable[NDArray[Any]]) -> Image:
        """Return images of any size as rows of the input blob."""
        return np.stack([self.preprocess(in_, im) for im in images])

    def preprocess(self, in_: str, data: NDArray[Any]) -> Image:
        """Turn an image (height, width, channels) into one item of the input blob."""
        self._check(in_)
        result = data.astype(np.float32, copy=False)
        size = self.inputs[in_][2:]
        if result.shape[:2] != size:
            result = resize_image(result, size)
        if in_ in self.transpose:
            result = result.transpose(self.transpose[in_])
        if in_ in self.channel_swap:
            result = result[list(self.channel_swap[in_])]
        if in_ in self.raw_scale:
            result = result * np.float32(self.raw_scale[in_])
        if in_ in self.mean:
            result = (result - self.mean[in_]).astype(np.float32)
        if in_ in self.input_scale:
            result = result * np.float32(self.input_scale[in_])
        return result

    def deprocess(self, in_: str, data: NDArray[Any]) -> NDArray[Any]:
        """Turn one item of the input blob back into an image."""
        self._check(in_)
        result: NDArray[Any] = data.copy().squeeze()
        if in_ in self.input_scale:
            result = result / self.input_scale[in_]
        if in_ in self.mean:
            result = result + self.mean[in_]
        if in_ in self.raw_scale:
            result = result / self.raw_scale[in_]
        if in_ in self.channel_swap:
            result = result[np.argsort(self.channel_swap[in_])]
        if in_ in self.transpose:
            result = result.transpose(np.argsort(self.transpose[in_]))
        return result.astype(data.dtype, copy=False)

    def set_transpose(self, in_: str, order: Sequence[int]) -> None:
        """Set the order of axes, (2, 0, 1) for images that have their channels last."""
        self._check(in_)
        if len(order) != len(self.inputs[in_]) - 1:
            raise ConfigError(f"transpose {tuple(order)} needs one axis per axis of an item of {self._blob(in_)}")
        self.transpose[in_] = tuple(order)

    def set_channel_swap(self, in_: str, order: Sequence[int]) -> None:
        """Set the order of channels, (2, 1, 0) to turn RGB into the BGR that most Caffe models take."""
        self._check(in_)
        if len(order) != self.inputs[in_][1]:
            raise ConfigError(f"channel swap {tuple(order)} needs one entry per channel of {self._blob(in_)}")
        self.channel_swap[in_] = tuple(order)

    def set_raw_scale(self, in_: str, scale: float) -> None:
        """Set a factor applied before the mean is subtracted: 255 for means in the range 0 to 255."""
        self._check(in_)
        self.raw_scale[in_] = scale

    def set_mean(self, in_: str, mean: NDArray[Any]) -> None:
        """Set the mean to subtract: one value per channel, or an image (channels, height, width), resized to fit."""
        self._check(in_)
        channels, size = self.inputs[in_][1], self.inputs[in_][2:]
        mean = np.asarray(mean)
        if mean.ndim == 1:
            if len(mean) != channels:
                raise ConfigError(f"a mean of {len(mean)} values does not fit the channels of {self._blob(in_)}")
            self.mean[in_] = mean[:, np.newaxis, np.newaxis]
            return
        full = mean[np.newaxis] if mean.ndim == 2 else mean
        if full.ndim != 3 or len(full) != channels:
            raise ConfigError(f"a mean of shape {mean.shape} does not fit {self._blob(in_)}")
        if full.shape[1:] != size:
            full = resize_image(full.transpose(1, 2, 0), size).transpose(2, 0, 1)
        self.mean[in_] = full

    def set_input_scale(self, in_: str, scale: float) -> None:
        """Set a factor applied last."""
        self._check(in_)
        self.input_scale[in_] = scale

    def _check(self, in_: str) -> None:
        if in_ not in self.inputs:
            raise ConfigError(f"{in_!r} is not one of the net's inputs: {', '.join(self.inputs)}")

    def _blob(self, in_: str) -> str:
        return f"input {in_!r} of shape {self.inputs[in_]}"
