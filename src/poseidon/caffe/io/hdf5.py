"""Rows of HDF5 files, in order or shuffled."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from poseidon.caffe.io import hdf5_files
from poseidon.caffe.io.sharding import Share, too_few
from poseidon.errors import ConfigError

log = logging.getLogger("poseidon.caffe")

Arrays = list[NDArray[np.float32]]


def read_arrays(path: str, names: Sequence[str]) -> Arrays:
    """Return the named data sets, which must have the same number of rows, in single precision."""
    arrays: Arrays = []
    with hdf5_files.reading(path, "HDF5 file") as file:
        for name in names:
            if name not in file:
                raise ConfigError(f"{path}: holds no data set {name!r}; it holds: {', '.join(sorted(file))}")
            stored = hdf5_files.numbers_of(file, name, path)
            if not stored.ndim:
                raise ConfigError(f"{path}: data set {name!r} must hold rows of numbers, not a single {stored.dtype}")
            _log_class("H5T_FLOAT" if stored.dtype.kind == "f" else "H5T_INTEGER")
            arrays.append(hdf5_files.values_of(stored))
    rows = [len(array) for array in arrays]
    if len(set(rows)) > 1:
        counts = ", ".join(f"{name!r} {count}" for name, count in zip(names, rows, strict=True))
        raise ConfigError(f"{path}: data sets must have the same number of rows; they have: {counts}")
    return arrays


@cache
def _log_class(name: str) -> None:
    # Caffe logs this once per process.
    log.info("Datatype class: %s", name)


class HDF5Rows:
    """An endless pass over the rows of several files, one of which is in memory at a time."""

    def __init__(
        self, files: Sequence[str], names: Sequence[str], share: Share, random: np.random.Generator | None
    ) -> None:
        self._files = list(files)
        self._names = list(names)
        self._share = share
        self._random = random
        self._loaded = -1
        self._arrays: Arrays = []
        self.row_shapes = [array.shape[1:] for array in self._load(0)]

    def batches(self, batch_size: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield one tensor per data set with ``batch_size`` rows; a batch may span several files."""
        out = self._new_batch(batch_size)
        filled = 0
        for arrays, rows in self._parts():
            done = 0
            while done < len(rows):
                count = min(len(rows) - done, batch_size - filled)
                for target, array in zip(out, arrays, strict=True):
                    target[filled : filled + count] = array[rows[done : done + count]]
                done, filled = done + count, filled + count
                if filled == batch_size:
                    yield tuple(torch.from_numpy(array) for array in out)
                    out, filled = self._new_batch(batch_size), 0

    def _new_batch(self, batch_size: int) -> Arrays:
        return [np.empty((batch_size, *shape), np.float32) for shape in self.row_shapes]

    def _parts(self) -> Iterator[tuple[Arrays, NDArray[np.int64]]]:
        """Yield, file by file, the arrays and the rows of them that this worker takes."""
        position = 0
        while True:
            start, taken = position, 0
            for number in self._file_order():
                arrays = self._load(number)
                count = len(arrays[0])
                # In order: every size-th row of the endless sequence. Shuffled: every size-th row of each file.
                own = self._share.rows(count, position if self._random is None else number)
                rows = np.asarray(own, np.int64)
                yield arrays, rows if self._random is None else self._random.permutation(rows)
                position += count
                taken += len(rows)
            if not taken and (self._random is not None or position == start):
                raise too_few(", ".join(self._files), position - start, self._share)

    def _file_order(self) -> list[int]:
        order = range(len(self._files))
        return list(order) if self._random is None else self._random.permutation(order).tolist()

    def _load(self, number: int) -> Arrays:
        if number != self._loaded:
            arrays = read_arrays(self._files[number], self._names)
            if number:
                self._check_shapes(arrays, self._files[number])
            self._arrays, self._loaded = arrays, number
        return self._arrays

    def _check_shapes(self, arrays: Arrays, path: str) -> None:
        for name, array, expected in zip(self._names, arrays, self.row_shapes, strict=True):
            if array.shape[1:] != expected:
                raise ConfigError(
                    f"{path}: rows of {name!r} have shape {array.shape[1:]}, those of {self._files[0]} {expected}"
                )
