"""HDF5 files without trust in what they say: data sets of the expected kind and no larger than their file.

h5py lets a file's mistakes through as many kinds of exceptions, allocates whatever a data set declares, and ends the
process with a segmentation fault if the disk is full while a file is open for writing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poseidon import files
from poseidon.caffe.extras import require
from poseidon.errors import ConfigError

_FILTERS = {1: "deflate", 2: "shuffle", 3: "fletcher32", 32000: "lzf"}
"""The others believe parameters in the file, and a wrong one ends the process with a segmentation fault."""
_BEST_RATIO = 1100
"""No filter of HDF5's own packs values more tightly: deflate reaches 1032 to 1."""


@contextlib.contextmanager
def reading(path: files.StrPath, what: str) -> Iterator[Any]:
    """Yield a file opened for reading; whatever h5py finds wrong with it, also in the block, becomes one error."""
    h5py = require("h5py")
    if Path(path).is_dir():
        raise ConfigError(f"cannot read {what} {path}: it is a folder, expected a file")
    if Path(path).is_file() and not h5py.is_hdf5(path):
        size = Path(path).stat().st_size
        kind = f"its {size} bytes are no HDF5 file" if size else "it is empty; was the disk full when it was written?"
        raise ConfigError(f"cannot read {what} {path}: {kind}")
    try:
        with h5py.File(path, "r") as file:
            yield file
    except ConfigError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError, IndexError, MemoryError) as error:
        raise ConfigError(f"cannot read {what} {path}: {_first_line(error)}") from None


@contextlib.contextmanager
def writing(path: files.StrPath, what: str) -> Iterator[Any]:
    """Yield a file in memory, which is written to ``path``, whole or not at all, when the block ends without error."""
    h5py = require("h5py")
    with h5py.File(secrets.token_hex(8), "w", driver="core", backing_store=False) as file:
        yield file
        file.flush()
        image = file.id.get_file_image()
    files.write_bytes(path, image, what)


def group_of(parent: Any, name: str, origin: str) -> Any:
    """Return a group of a file or group."""
    found = parent.get(name)
    if not isinstance(found, require("h5py").Group):
        raise ConfigError(f"{origin}: {_place(parent, name)} is {_kind(found)}, expected a group; who wrote this file?")
    return found


def numbers_of(parent: Any, name: str, origin: str) -> Any:
    """Return a data set of numbers, whose values the file really holds."""
    found = parent.get(name)
    place = _place(parent, name)
    if not isinstance(found, require("h5py").Dataset):
        raise ConfigError(f"{origin}: {place} is {_kind(found)}, expected a data set; who wrote this file?")
    if found.dtype.kind not in "fiu" or found.shape is None:
        raise ConfigError(f"{origin}: data set {place} holds {found.dtype}, expected numbers")
    _check_size(found, place, origin)
    return found


def single_of(parent: Any, name: str, origin: str) -> int:
    """Return the first value of a data set of whole numbers."""
    found = numbers_of(parent, name, origin)
    if found.dtype.kind not in "iu" or found.size < 1:
        raise ConfigError(f"{origin}: {_place(parent, name)} holds no whole number")
    return int(np.asarray(found[()]).reshape(-1)[0])


def values_of(dataset: Any) -> NDArray[np.float32]:
    """Return the values of a checked data set in single precision."""
    values: NDArray[np.float32] = np.asarray(dataset[()]).astype(np.float32, copy=False)
    return values


def reserve(path: files.StrPath, count: int, what: str) -> None:
    """Make sure that a file can grow by ``count`` bytes, before h5py, which cannot be told otherwise, writes them."""
    try:
        descriptor = os.open(path, os.O_RDWR)
        try:
            size = os.fstat(descriptor).st_size
            try:
                os.posix_fallocate(descriptor, size, count)
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)
    except OSError as error:
        raise files.cannot("write", what, path, error) from None


def _check_size(dataset: Any, place: str, origin: str) -> None:
    stored = dataset.id.get_storage_size()
    settings = dataset.id.get_create_plist()
    filters = [settings.get_filter(number)[0] for number in range(settings.get_nfilters())]
    if not set(filters) <= _FILTERS.keys():
        raise ConfigError(
            f"{origin}: data set {place} is packed by HDF5's filters {filters}, expected any of "
            f"{', '.join(f'{number} ({name})' for number, name in _FILTERS.items())}; write it with one of these"
        )
    packed = bool(filters)
    bound = min(stored, Path(dataset.file.filename).stat().st_size) * (_BEST_RATIO if packed else 1)
    if dataset.nbytes > bound or dataset.nbytes > files.memory_bytes():
        raise ConfigError(
            f"{origin}: data set {place} declares shape {dataset.shape}, that is {dataset.nbytes} bytes, "
            f"but the file holds {stored} bytes of it; the file is damaged or incomplete"
        )


def _place(parent: Any, name: str) -> str:
    return f"{parent.name.rstrip('/')}/{name}"


def _kind(found: Any) -> str:
    return "missing" if found is None else f"a {type(found).__name__.lower()}"


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
