"""Window files (regions of images with a class and an overlap) and how to crop a region. Pure except for reading."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from poseidon.caffe.io.images import Image, resized
from poseidon.caffe.io.lists import read_lines
from poseidon.errors import ConfigError


class ImageWindow(NamedTuple):
    """A region of an image, corners included."""

    image: int
    label: int
    overlap: float
    x1: int
    y1: int
    x2: int
    y2: int


@dataclass
class WindowFile:
    """The images and windows that a file lists."""

    images: list[str] = field(default_factory=list)
    channels: int = 0
    windows: list[ImageWindow] = field(default_factory=list)


def read_windows(path: str | os.PathLike[str]) -> WindowFile:
    """Read entries of the form: # index, image, channels, height, width, count, then count windows."""
    words = _Words(path)
    result = WindowFile()
    while words.more():
        if words.text("'#'") != "#":
            raise words.error("'#' and an image's number")
        index = words.number("an image's number")
        result.images.append(words.text("an image's path"))
        result.channels = words.number("channels")
        words.number("height")
        words.number("width")
        for _ in range(words.number("the number of windows")):
            label, overlap = words.number("a class"), words.real("an overlap")
            corners = [words.number(name) for name in ("x1", "y1", "x2", "y2")]
            result.windows.append(ImageWindow(index, label, overlap, *corners))
    if not result.images:
        raise ConfigError(f"{path}: the window file is empty")
    for window in result.windows:
        if not 0 <= window.image < len(result.images):
            raise ConfigError(
                f"{path}: a window belongs to image {window.image}, but there are {len(result.images)}; "
                "images must be numbered from 0 in order"
            )
    return result


class _Words:
    """The words of a file in order, with their lines for errors."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._words = self._read(path)
        self._next = next(self._words, None)
        self._seen: tuple[int, str] = (0, "")

    @staticmethod
    def _read(path: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
        for number, line in enumerate(read_lines(path), 1):
            for word in line.split():
                yield number, word

    def more(self) -> bool:
        return self._next is not None

    def text(self, expected: str) -> str:
        if self._next is None:
            raise ConfigError(f"{self._path}: the file ends where {expected} is expected; it is truncated")
        self._seen, self._next = self._next, next(self._words, None)
        return self._seen[1]

    def number(self, expected: str) -> int:
        word = self.text(expected)
        try:
            return int(word)
        except ValueError:
            raise self.error(expected) from None

    def real(self, expected: str) -> float:
        word = self.text(expected)
        try:
            return float(word)
        except ValueError:
            raise self.error(expected) from None

    def error(self, expected: str) -> ConfigError:
        line, word = self._seen
        return ConfigError(f"{self._path}:{line}: {word!r} where {expected} is expected")


@dataclass(frozen=True)
class WindowCrop:
    """How windows become squares of ``size`` pixels."""

    size: int
    context_pad: int = 0
    """Pixels of context on each side, measured in the result."""
    is_square: bool = False
    """Crop squares around windows instead of stretching them."""

    def place(self, window: ImageWindow, height: int, width: int, mirrored: bool) -> Placement:
        """Return the region to crop from an image of that size and where it goes in the result."""
        x1, y1, x2, y2 = window[3:]
        if not self.context_pad and not self.is_square:
            return Placement(x1, y1, x2, y2, 0, 0, self.size, self.size)
        x1, y1, x2, y2 = self._expanded(x1, y1, x2, y2)
        scale_x = np.float32(self.size) / np.float32(x2 - x1 + 1)
        scale_y = np.float32(self.size) / np.float32(y2 - y1 + 1)
        left, right = max(0, -x1), max(0, x2 - width + 1)
        top, bottom = max(0, -y1), max(0, y2 - height + 1)
        x1, x2, y1, y2 = x1 + left, x2 - right, y1 + top, y2 - bottom
        pad_x = _round(np.float32(right if mirrored else left) * scale_x)
        pad_y = _round(np.float32(top) * scale_y)
        # Rounding may make the stretched region and its padding exceed the size.
        new_width = min(_round(np.float32(x2 - x1 + 1) * scale_x), self.size - pad_x)
        new_height = min(_round(np.float32(y2 - y1 + 1) * scale_y), self.size - pad_y)
        return Placement(x1, y1, x2, y2, pad_x, pad_y, new_width, new_height)

    def _expanded(self, x1: int, y1: int, x2: int, y2: int) -> tuple[int, int, int, int]:
        """Return the region expanded so that after scaling exactly ``context_pad`` pixels surround the window."""
        scale = np.float32(self.size) / np.float32(self.size - 2 * self.context_pad)
        half_width, half_height = np.float32(x2 - x1 + 1) / 2, np.float32(y2 - y1 + 1) / 2
        center_x, center_y = np.float32(x1) + half_width, np.float32(y1) + half_height
        if self.is_square:
            half_width = half_height = max(half_width, half_height)
        return (
            _round(center_x - half_width * scale),
            _round(center_y - half_height * scale),
            _round(center_x + half_width * scale),
            _round(center_y + half_height * scale),
        )


class Placement(NamedTuple):
    """A region of an image (corners included), where it goes in the result, and the size it is resized to."""

    x1: int
    y1: int
    x2: int
    y2: int
    left: int
    top: int
    width: int
    height: int

    def cut(self, pixels: Image, mirrored: bool) -> Image:
        """Return the region, resized and mirrored; ValueError if it does not lie inside the image."""
        height, width = pixels.shape[:2]
        if not (0 <= self.x1 <= self.x2 < width and 0 <= self.y1 <= self.y2 < height):
            raise ValueError(
                f"x {self.x1} to {self.x2}, y {self.y1} to {self.y2} is not inside {width} x {height} pixels"
            )
        if self.width < 1 or self.height < 1:
            raise ValueError(f"nothing is left of it after scaling to {self.width} x {self.height} pixels")
        region = resized(pixels[self.y1 : self.y2 + 1, self.x1 : self.x2 + 1], self.height, self.width)
        return region[:, ::-1] if mirrored else region


def _round(value: np.float32) -> int:
    """Round to the nearest whole number, halves away from zero, as C does."""
    return int(math.copysign(math.floor(abs(float(value)) + 0.5), value))
