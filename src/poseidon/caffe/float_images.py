"""Images for nets: reading, resizing and cropping (offered to scripts as ``caffe.io``)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poseidon.caffe.extras import require
from poseidon.errors import ConfigError

Image = NDArray[np.float32]

_GRAY_WEIGHTS = np.array([0.2125, 0.7154, 0.0721])
"""How much red, green and blue contribute to brightness (ITU-R BT.709, as scikit-image has it)."""


def load_image(filename: str | os.PathLike[str], color: bool = True) -> Image:
    """Read an image file as (height, width, 3) RGB or (height, width, 1) gray, floats from 0 to 1."""
    pil = require("PIL.Image")
    try:
        with pil.open(filename) as file:
            pixels = _pixels(file)
    except Exception as error:  # Pillow's readers of damaged files raise whatever they stumble over
        raise ConfigError(f"cannot read image {filename}: {error}") from None
    if pixels.ndim == 2:
        return np.repeat(pixels[:, :, np.newaxis], 3 if color else 1, axis=2).astype(np.float32)
    if color:
        return pixels[:, :, :3].astype(np.float32)
    if pixels.shape[2] == 4:
        alpha = pixels[:, :, 3:]
        pixels = pixels[:, :, :3] * alpha + (1 - alpha)
    gray: Image = (pixels @ _GRAY_WEIGHTS).astype(np.float32)
    return gray[:, :, np.newaxis]


def _pixels(file: Any) -> NDArray[np.float64]:
    """Return the pixels of a PIL image as fractions of full brightness; gray images have two axes."""
    if file.mode == "P":
        file = file.convert("RGBA" if "transparency" in file.info else "RGB")
    elif file.mode in ("LA", "PA"):
        file = file.convert("RGBA")
    elif file.mode in ("CMYK", "YCbCr", "LAB", "HSV", "RGBX"):
        file = file.convert("RGB")
    values = np.asarray(file)
    if file.mode.startswith("I"):
        return values.astype(float) / 65535
    if values.dtype == np.uint8:
        return values / 255.0
    return values.astype(float)


def resize_image(im: NDArray[Any], new_dims: Sequence[int], interp_order: int = 1) -> Image:
    """Return an image (height, width, channels) at ``new_dims`` = (height, width), by default bilinear."""
    if im.shape[-1] not in (1, 3):
        zoom = require("scipy.ndimage").zoom
        factors = [new / old for new, old in zip(new_dims, im.shape[:2], strict=True)]
        result: Image = zoom(im, (*factors, 1), order=interp_order).astype(np.float32)
        return result
    low, high = float(im.min()), float(im.max())
    if high <= low:
        return np.full((*new_dims, im.shape[-1]), low, dtype=np.float32)
    # The border counts as black, which is the lowest value in the image.
    scaled = _resample((im.astype(float) - low) / (high - low), new_dims, interp_order)
    return (scaled * (high - low) + low).astype(np.float32)


def _resample(im: NDArray[np.float64], new_dims: Sequence[int], order: int) -> NDArray[np.float64]:
    """Resample pixels as areas; before shrinking, details finer than the new pixels are blurred away."""
    ndimage = require("scipy.ndimage")
    ratios = [old / new for old, new in zip(im.shape, (*new_dims, im.shape[2]), strict=True)]
    if order > 0 and max(ratios) > 1:
        blur = [max(0.0, (ratio - 1) / 2) for ratio in ratios]
        im = ndimage.gaussian_filter(im, blur, mode="grid-constant")
    factors = [1 / ratio for ratio in ratios]
    result: NDArray[np.float64] = ndimage.zoom(im, factors, order=order, mode="grid-constant", grid_mode=True)
    return result.clip(im.min(), im.max())


def oversample(images: Sequence[NDArray[Any]], crop_dims: Sequence[int]) -> Image:
    """Cut each image (height, width, channels) to its four corners and centre, then the same mirrored: 10 crops."""
    height, width, channels = images[0].shape
    crop_height, crop_width = (int(size) for size in crop_dims)
    if crop_height > height or crop_width > width:
        raise ConfigError(f"oversample: crops of {crop_height} x {crop_width} do not fit in {height} x {width}")
    down, right = height - crop_height, width - crop_width
    starts = [(y, x) for y in (0, down) for x in (0, right)]
    # The centre falls on half pixels, which are then truncated, as in Caffe.
    starts.append((int(height / 2 - crop_height / 2), int(width / 2 - crop_width / 2)))
    crops = np.empty((10 * len(images), crop_height, crop_width, channels), dtype=np.float32)
    for number, im in enumerate(images):
        for index, (y, x) in enumerate(starts):
            crop = im[y : y + crop_height, x : x + crop_width]
            crops[10 * number + index] = crop
            crops[10 * number + 5 + index] = crop[:, ::-1]
    return crops
