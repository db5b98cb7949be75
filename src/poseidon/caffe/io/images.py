"""Images as OpenCV passes them to Caffe: 8 bits, channels last, in the order blue, green, red.

OpenCV decodes, encodes and resizes them, as it does for Caffe, so every pixel is the same.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from poseidon import files
from poseidon.caffe.extras import require
from poseidon.errors import ConfigError

Image = NDArray[np.uint8]
Mode = Literal["color", "gray", "native"]
"""Colour, grey, or as many channels as the file has."""

_FLAGS: dict[Mode, int] = {"color": 1, "gray": 0, "native": -1}
"""OpenCV's numbers: IMREAD_COLOR, IMREAD_GRAYSCALE and IMREAD_UNCHANGED."""
_LOG_ERRORS = 2
_JPEG, _JPEG_SCAN, _JPEG_END = b"\xff\xd8\xff", b"\xff\xda", b"\xff\xd9"


@cache
def opencv() -> Any:
    """Return the module ``cv2``."""
    cv2 = require("cv2")
    # Several images are decoded at a time, each by one thread.
    cv2.setNumThreads(1)
    if hasattr(cv2, "setLogLevel"):
        # What it warns of is an error here, and names the file.
        cv2.setLogLevel(_LOG_ERRORS)
    return cv2


def read_image(path: str | os.PathLike[str], mode: Mode = "color", height: int = 0, width: int = 0) -> Image:
    """Read a file as an array (height, width, channels), resized if both sizes are given."""
    return resized(decode_image(read_bytes(path), mode, str(path)), height, width)


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return the content of an image file."""
    return files.read_bytes(path, "image")


def decode_image(content: bytes | memoryview, mode: Mode = "color", origin: str = "<image>") -> Image:
    """Decode a PNG, JPEG or other image file's content; ``origin`` names it in errors.

    In the modes "color" and "gray" an image is turned as its EXIF says, in "native" it is not.
    """
    cv2 = opencv()
    if not content or _is_cut(content):
        raise _refused(origin, f"{len(content)} bytes, and not the end of it")
    try:
        pixels = cv2.imdecode(np.frombuffer(content, np.uint8), _FLAGS[mode])
    except (cv2.error, MemoryError) as error:
        raise _refused(origin, f"OpenCV: {getattr(error, 'err', None) or error or 'too little memory'}") from None
    if pixels is None:
        raise _refused(origin, "of no known kind, or incomplete")
    if pixels.dtype != np.uint8:
        raise ConfigError(
            f"{origin}: has {pixels.dtype} values, expected 8 bits per channel; set force_color or force_gray in "
            "transform_param to have it converted"
        )
    shaped: Image = pixels if pixels.ndim == 3 else pixels[:, :, None]
    return shaped


def _is_cut(content: bytes | memoryview) -> bool:
    """Whether a JPEG ends before its end: OpenCV makes up the missing pixels without a word."""
    if content[:3] != _JPEG or content[-2:] == _JPEG_END:
        return False
    whole = bytes(content)
    # Within a scan neither mark occurs, so the end of an image must follow the last scan; anything may follow the end.
    return whole.rfind(_JPEG_END) < whole.rfind(_JPEG_SCAN)


def _refused(origin: str, reason: str) -> ConfigError:
    return ConfigError(f"{origin}: cannot be decoded as an image ({reason}); truncated or damaged?")


def encode_image(pixels: Image, extension: str) -> bytes:
    """Encode an image as the file type of ``extension`` ("png", "jpg"), with OpenCV's settings for it."""
    cv2 = opencv()
    try:
        is_done, content = cv2.imencode(f".{extension.lower()}", pixels)
    except cv2.error:
        is_done = False
    if not is_done:
        raise ConfigError(f"cannot encode images as {extension!r}; known are for example png, jpg, bmp and tiff")
    encoded: bytes = content.tobytes()
    return encoded


def resized(pixels: Image, height: int, width: int) -> Image:
    """Resize bilinearly as OpenCV does; a size of 0 means no change."""
    if not height or not width or pixels.shape[:2] == (height, width):
        return pixels
    result: Image = opencv().resize(pixels, (width, height))
    return result if result.ndim == 3 else result[:, :, None]
