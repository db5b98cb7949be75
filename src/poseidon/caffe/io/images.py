"""Images as OpenCV passes them to Caffe: 8 bits, channels last, in the order blue, green, red."""

from __future__ import annotations

import io
import os
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from poseidon import files
from poseidon.caffe.extras import require
from poseidon.errors import ConfigError

Image = NDArray[np.uint8]
Mode = Literal["color", "gray", "native"]
"""Colour, grey, or as many channels as the file has."""

_COEFFICIENT_BITS = 11


def read_image(path: str | os.PathLike[str], mode: Mode = "color", height: int = 0, width: int = 0) -> Image:
    """Read a file as an array (height, width, channels), resized if both sizes are given."""
    return resized(decode_image(read_bytes(path), mode, str(path)), height, width)


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return the content of an image file."""
    return files.read_bytes(path, "image")


def decode_image(content: bytes, mode: Mode = "color", origin: str = "<image>") -> Image:
    """Decode a PNG, JPEG or other image file's content; ``origin`` names it in errors."""
    pil = require("PIL.Image")
    try:
        with pil.open(io.BytesIO(content)) as picture:
            if mode == "gray":
                # Use a JPEG's own luminance, as OpenCV does, instead of one computed from its colours.
                picture.draft("L", picture.size)
            picture.load()
            if mode != "native":
                picture = require("PIL.ImageOps").exif_transpose(picture)
            return _to_array(picture, mode)
    except Exception as error:  # Pillow's readers of damaged files raise whatever they stumble over
        reason = "of no known kind" if isinstance(error, pil.UnidentifiedImageError) else error
        raise ConfigError(f"{origin}: cannot be decoded as an image ({reason}); truncated or damaged?") from None


def _to_array(picture: Any, mode: Mode) -> Image:
    if picture.mode.startswith("I;16"):
        picture = require("PIL.Image").fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")
    if mode == "gray":
        wanted = "L"
    elif mode == "color":
        wanted = "RGB"
    elif picture.mode in ("1", "L", "I", "F"):
        wanted = "L"
    else:
        wanted = "RGBA" if picture.mode in ("RGBA", "LA", "PA") else "RGB"
    pixels: Image = np.asarray(picture if picture.mode == wanted else picture.convert(wanted))
    if pixels.ndim == 2:
        return pixels[:, :, None]
    order = [2, 1, 0, 3][: pixels.shape[2]]
    return np.ascontiguousarray(pixels[:, :, order])


def encode_image(pixels: Image, extension: str) -> bytes:
    """Encode an image as the file type of ``extension`` ("png", "jpg")."""
    pil = require("PIL.Image")
    kind = pil.registered_extensions().get(f".{extension.lower()}")
    if kind is None or kind not in pil.SAVE:
        raise ConfigError(f"cannot encode images as {extension!r}; known are for example png, jpg, bmp and tiff")
    stream = io.BytesIO()
    shown = pixels[:, :, 0] if pixels.shape[2] == 1 else pixels[:, :, ::-1]
    # OpenCV's default quality for JPEG; other kinds ignore it.
    pil.fromarray(np.ascontiguousarray(shown)).save(stream, format=kind, quality=95)
    return stream.getvalue()


def resized(pixels: Image, height: int, width: int) -> Image:
    """Resize bilinearly without smoothing, rounding as OpenCV does; a size of 0 means no change."""
    if not height or not width or pixels.shape[:2] == (height, width):
        return pixels
    top, bottom, row_weights = _taps(pixels.shape[0], height)
    left, right, column_weights = _taps(pixels.shape[1], width)
    used, inverse = np.unique(np.concatenate([top, bottom]), return_inverse=True)
    rows = pixels[used].astype(np.int32)
    weights = column_weights[:, :, None]
    # OpenCV's fixed-point arithmetic: columns first with 11 bits, then rows, dropping bits on the way.
    mixed = (rows[:, left] * weights[0] + rows[:, right] * weights[1]) >> 4
    weights = row_weights[:, :, None, None]
    upper, lower = mixed[inverse[:height]], mixed[inverse[height:]]
    result = (((upper * weights[0]) >> 16) + ((lower * weights[1]) >> 16) + 2) >> 2
    clipped: Image = np.clip(result, 0, 255).astype(np.uint8)
    return clipped


def _taps(source: int, target: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """Return for each target position its two source positions and their weights."""
    position = ((np.arange(target) + 0.5) * (source / target) - 0.5).astype(np.float32)
    first = np.floor(position).astype(np.int64)
    fraction = position - first.astype(np.float32)
    outside = (first < 0) | (first >= source - 1)
    fraction[outside] = 0
    first = np.clip(first, 0, source - 1)
    second = np.minimum(first + 1, source - 1)
    scale = np.float32(1 << _COEFFICIENT_BITS)
    weights = np.rint(np.stack([1 - fraction, fraction]) * scale).astype(np.int32)
    return first, second, weights
