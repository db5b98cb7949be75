"""Lists of files: images with labels, or HDF5 files."""

from __future__ import annotations

import os
from typing import NamedTuple

from poseidon import files
from poseidon.errors import ConfigError


class ImageLine(NamedTuple):
    """One image of a list."""

    name: str
    label: int
    number: int
    """The line in the file, counted from 1."""


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """Return the lines of a text file."""
    return files.read_text(path, "list").splitlines()


def read_image_list(path: str | os.PathLike[str]) -> list[ImageLine]:
    """Read lines of "name label"; the name may hold spaces, and a name alone has label 0, as in Caffe."""
    lines = [_parse(text.strip(), number, str(path)) for number, text in enumerate(read_lines(path), 1) if text.strip()]
    if not lines:
        raise ConfigError(f"{path}: the list of images is empty")
    return lines


def _parse(text: str, number: int, origin: str) -> ImageLine:
    name, space, label = text.rpartition(" ")
    if not space:
        return ImageLine(text, 0, number)
    try:
        return ImageLine(name.strip(), int(float(label)), number)
    except (ValueError, OverflowError):
        raise ConfigError(
            f"{origin}:{number}: {label!r} is not a label; every line holds a file name, a space and a whole number"
        ) from None


def read_file_list(path: str | os.PathLike[str]) -> list[str]:
    """Read file names separated by white space."""
    names = [name for line in read_lines(path) for name in line.split()]
    if not names:
        raise ConfigError(f"{path}: names no file; at least one HDF5 file is expected")
    return names
