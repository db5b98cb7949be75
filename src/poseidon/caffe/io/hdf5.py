"""Rows of HDF5 files, in order or shuffled."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray

from poseidon.caffe.io import hdf5_files
from poseidon.caffe.io.batches import Batches, Tensors
from poseidon.caffe.io.draws import permuted
from poseidon.caffe.io.prefetch import Part
from poseidon.caffe.io.sharding import Share
from poseidon.errors import ConfigError

log = logging.getLogger("poseidon.caffe")

Arrays = list[NDArray[np.float32]]

_ROWS_PER_PART = 64


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

    def __init__(self, files: Sequence[str], names: Sequence[str], share: Share) -> None:
        self._files = list(files)
        self._names = list(names)
        self._share = share
        self._counts: dict[int, int] = {}
        self._loaded = -1
        self._arrays: Arrays = []
        self.row_shapes = [array.shape[1:] for array in self._load(0)]

    def batches(self, batch_size: int, first: int = 0, seed: int | None = None) -> Batches:
        """Yield batches of one tensor per data set, from this worker's row ``first`` on; they may span files.

        With a seed, the files and the rows of each file come in another random order in each pass.
        """
        pieces = _pieces(self._rows(batch_size, first, seed), batch_size)
        while True:
            yield _RowBatch(next(pieces), [np.empty((batch_size, *shape), np.float32) for shape in self.row_shapes])

    def _rows(self, batch_size: int, skip: int, seed: int | None) -> Iterator[tuple[Arrays, NDArray[np.int64]]]:
        """Yield, file by file, the arrays and the rows of them that this worker takes."""
        position = 0
        for turn in itertools.count():
            start = position
            files = range(len(self._files)) if seed is None else permuted(len(self._files), seed, turn)
            for number in map(int, files):
                if number not in self._counts:
                    self._load(number)
                count = self._counts[number]
                mine = self._share.owns(np.arange(position, position + count), batch_size)
                rows = np.flatnonzero(mine) if seed is None else permuted(count, seed, turn, number)[mine]
                if skip < len(rows):
                    yield self._load(number), rows[skip:]
                skip = max(0, skip - len(rows))
                position += count
            if position == start:
                raise ConfigError(f"{', '.join(self._files)}: hold no rows")

    def _load(self, number: int) -> Arrays:
        if number != self._loaded:
            arrays = read_arrays(self._files[number], self._names)
            if number:
                self._check_shapes(arrays, self._files[number])
            self._arrays, self._loaded = arrays, number
            self._counts[number] = len(arrays[0])
        return self._arrays

    def _check_shapes(self, arrays: Arrays, path: str) -> None:
        for name, array, expected in zip(self._names, arrays, self.row_shapes, strict=True):
            if array.shape[1:] != expected:
                raise ConfigError(
                    f"{path}: rows of {name!r} have shape {array.shape[1:]}, those of {self._files[0]} {expected}"
                )


Piece = tuple[Arrays, NDArray[np.int64]]
"""Some rows of one file."""


def _pieces(parts: Iterator[Piece], size: int) -> Iterator[list[Piece]]:
    """Yield what makes up a batch of ``size`` rows, over and over."""
    batch: list[Piece] = []
    missing = size
    for arrays, rows in parts:
        while len(rows):
            batch.append((arrays, rows[:missing]))
            rows, missing = rows[missing:], missing - len(rows[:missing])
            if not missing:
                yield batch
                batch, missing = [], size


class _RowBatch:
    """A batch in the making."""

    def __init__(self, pieces: list[Piece], out: Arrays) -> None:
        self._pieces = pieces
        self._out = out

    def parts(self) -> Iterator[Part]:
        filled = 0
        for arrays, rows in self._pieces:
            for begin in range(0, len(rows), _ROWS_PER_PART):
                some = rows[begin : begin + _ROWS_PER_PART]
                yield partial(self._fill, filled, arrays, some)
                filled += len(some)

    def _fill(self, place: int, arrays: Arrays, rows: NDArray[np.int64]) -> None:
        for target, array in zip(self._out, arrays, strict=True):
            np.take(array, rows, axis=0, out=target[place : place + len(rows)], mode="clip")

    def finish(self) -> Tensors:
        return tuple(torch.from_numpy(array) for array in self._out)
