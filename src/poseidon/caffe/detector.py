"""Score windows of images with a trained net, as R-CNN does: crop each window with some context and classify it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poseidon.caffe.float_images import Image, load_image, resize_image
from poseidon.caffe.pycaffe import Net
from poseidon.caffe.schema import TEST
from poseidon.caffe.transformer import Transformer
from poseidon.errors import ConfigError

Window = Sequence[int]
"""(ymin, xmin, ymax, xmax) in pixels."""


class Detector(Net):
    """A net in the TEST phase that scores windows.

    ``context_pad`` is the number of pixels of context on each side of a window in the net's input; pixels beyond the
    image's edge take the mean. The other options are those of ``Transformer``.
    """

    def __init__(
        self,
        model_file: str | os.PathLike[str],
        pretrained_file: str | os.PathLike[str],
        mean: NDArray[Any] | None = None,
        input_scale: float | None = None,
        raw_scale: float | None = None,
        channel_swap: Sequence[int] | None = None,
        context_pad: int | None = None,
    ) -> None:
        super().__init__(model_file, TEST, weights=pretrained_file)
        self.transformer = Transformer.for_images(
            self.inputs[0], self.blobs[self.inputs[0]].shape, mean, input_scale, raw_scale, channel_swap
        )
        self.configure_crop(context_pad)

    def detect_windows(self, images_windows: Iterable[tuple[str, Sequence[Window]]]) -> list[dict[str, Any]]:
        """Score each (image file, its windows); return a dict of window, prediction and filename per window."""
        places = [(name, window) for name, windows in images_windows for window in windows]
        images = {name: load_image(name) for name in dict.fromkeys(name for name, _ in places)}
        crops = [self.crop(images[name], window) for name, window in places]
        if not crops:
            return []
        rows: dict[str, Any] = {self.inputs[0]: self.transformer.preprocess_all(self.inputs[0], crops)}
        scores = self.forward_all(**rows)[self.outputs[0]]
        # A fully convolutional net returns maps of 1 x 1.
        scores = scores.reshape(len(scores), -1)
        return [
            {"window": window, "prediction": row, "filename": name}
            for (name, window), row in zip(places, scores, strict=True)
        ]

    def detect_selective_search(self, image_fnames: Sequence[str]) -> list[dict[str, Any]]:
        """Score the windows that the package ``selective_search_ijcv_with_python`` proposes."""
        try:
            search: Any = importlib.import_module("selective_search_ijcv_with_python")
        except ImportError as error:
            raise ConfigError(
                "detect_selective_search needs the package selective_search_ijcv_with_python (and MATLAB), which "
                f"cannot be imported ({error}); propose windows yourself and call detect_windows"
            ) from error
        files = [os.path.abspath(name) for name in image_fnames]  # noqa: PTH100 (keeps what the caller named)
        return self.detect_windows(
            zip(image_fnames, search.get_windows(files, cmd="selective_search_rcnn"), strict=True)
        )

    def configure_crop(self, context_pad: int | None) -> None:
        """Set how much context crops include, and the colour of pixels outside the image."""
        name = self.inputs[0]
        _, channels, height, width = self.blobs[name].shape
        self.crop_dims = np.array([height, width, channels])
        self.context_pad = context_pad
        self.crop_mean: NDArray[Any] = np.zeros(self.crop_dims, dtype=np.float32)
        mean = self.transformer.mean.get(name)
        if context_pad and mean is not None:
            self.crop_mean = self.crop_mean + self._as_image(mean)

    def crop(self, im: Image, window: Window) -> Image:
        """Crop a window from an image; with context, the crop already has the size of the net's input."""
        ymin, xmin, ymax, xmax = (int(value) for value in window)
        if not self.context_pad:
            return im[ymin:ymax, xmin:xmax]
        size = float(self.crop_dims[1])
        half = np.array([ymax - ymin + 1, xmax - xmin + 1]) / 2
        centre = np.array([ymin, xmin]) + half
        reach = half * size / (size - 2 * self.context_pad)
        return self._padded_crop(im, np.round(centre - reach), np.round(centre + reach))

    def _padded_crop(self, im: Image, first: NDArray[Any], last: NDArray[Any]) -> Image:
        """Crop a box that may extend beyond the image; pixels outside take the mean."""
        size = self.crop_dims[:2]
        ratio = size / (last - first + 1)
        begin = np.round(np.maximum(0, -first) * ratio).astype(int)
        start, stop = (np.clip(corner, 0, im.shape[:2]).astype(int) for corner in (first, last))
        target = np.minimum(np.round((stop - start + 1) * ratio).astype(int), size - begin)
        if not ((stop > start).all() and (target > 0).all()):
            raise ConfigError(f"window from {first} to {last} lies outside the image of {im.shape[:2]} pixels")
        result = np.array(self.crop_mean, dtype=np.float32)
        end = begin + target
        part = resize_image(im[start[0] : stop[0], start[1] : stop[1]], (int(target[0]), int(target[1])))
        result[begin[0] : end[0], begin[1] : end[1]] = part
        return result

    def _as_image(self, mean: NDArray[Any]) -> NDArray[Any]:
        """Return the mean as an image in the range and order of the input images."""
        name = self.inputs[0]
        image: NDArray[Any] = mean
        if name in self.transformer.raw_scale:
            image = image / self.transformer.raw_scale[name]
        if name in self.transformer.channel_swap:
            image = image[np.argsort(self.transformer.channel_swap[name])]
        result: NDArray[Any] = image.transpose(np.argsort(self.transformer.transpose[name]))
        return result
