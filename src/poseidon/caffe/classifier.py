"""Classify images with a trained net: resize, crop, run, average over crops."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poseidon.caffe.float_images import Image, oversample, resize_image
from poseidon.caffe.memory import Array
from poseidon.caffe.pycaffe import Net
from poseidon.caffe.schema import TEST
from poseidon.caffe.transformer import Transformer


class Classifier(Net):
    """A net in the TEST phase whose first input takes images and whose first output gives scores.

    Images are resized to ``image_dims`` (height, width) before crops of the input's size are cut; the other options are
    those of ``Transformer``.
    """

    def __init__(
        self,
        model_file: str | os.PathLike[str],
        pretrained_file: str | os.PathLike[str],
        image_dims: Sequence[int] | None = None,
        mean: NDArray[Any] | None = None,
        input_scale: float | None = None,
        raw_scale: float | None = None,
        channel_swap: Sequence[int] | None = None,
    ) -> None:
        super().__init__(model_file, TEST, weights=pretrained_file)
        self.transformer = Transformer.for_images(
            self.inputs[0], self.blobs[self.inputs[0]].shape, mean, input_scale, raw_scale, channel_swap
        )
        self.crop_dims = np.array(self.blobs[self.inputs[0]].shape[2:])
        self.image_dims = self.crop_dims if image_dims is None else np.array(image_dims)

    def predict(self, inputs: Sequence[NDArray[Any]], oversample: bool = True) -> Array:
        """Return the scores, one row per image (height, width, channels).

        With ``oversample`` a score is the average over ten crops of the image, otherwise the score of its centre.
        """
        size = (int(self.image_dims[0]), int(self.image_dims[1]))
        resized = np.stack([resize_image(im, size) for im in inputs])
        crops = self._ten_crops(resized) if oversample else self._centres(resized)
        rows: dict[str, Any] = {self.inputs[0]: self.transformer.preprocess_all(self.inputs[0], crops)}
        scores = self.forward_all(**rows)[self.outputs[0]]
        if not oversample:
            return scores
        averaged: Array = scores.reshape(len(scores) // 10, 10, -1).mean(1)
        return averaged

    def _ten_crops(self, images: Image) -> Image:
        height, width = self.crop_dims
        return oversample(list(images), (height, width))

    def _centres(self, images: Image) -> Image:
        top, left = ((self.image_dims - self.crop_dims) / 2).astype(int)
        height, width = self.crop_dims
        return images[:, top : top + height, left : left + width]
