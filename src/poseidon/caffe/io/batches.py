"""Collect single samples into batches, whose rows any thread may fill."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from poseidon.caffe.io.datum import Values
from poseidon.caffe.io.draws import Draws
from poseidon.caffe.io.prefetch import Assembly, Part
from poseidon.caffe.io.transform import Transform
from poseidon.errors import ConfigError

Array = NDArray[np.float32]
Tensors = tuple[torch.Tensor, ...]
Batches = Iterator[Assembly[Tensors]]

_ROWS_PER_PART = 8
"""Enough that handing them out costs little, few enough that threads finish a batch together."""
_BUFFERS = 8
"""As many are kept: those that wait for the net, the one it uses and the one being filled."""


class Sample(NamedTuple):
    """One image or record, not yet transformed."""

    values: Values
    label: float
    origin: str
    """Names file and key, or line, in errors."""


class Row(NamedTuple):
    """A sample still to be decoded."""

    number: int
    """Its place in the endless sequence of samples that the workers share, on which its random numbers depend."""
    load: Callable[[], Sample]


class BatchBuffers:
    """Arrays for batches, used again when nobody has them any longer: the kernel would have to clear new memory.

    Any thread may ask.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrays: list[tuple[Array, weakref.ref[Array]]] = []
        """With the view that was handed out last: a tensor made from it keeps it alive."""

    def take(self, shape: tuple[int, ...]) -> Array:
        """Return an array with any content."""
        size = math.prod(shape)
        with self._lock:
            others = []
            found: Array | None = None
            for array, used in self._arrays:
                if found is None and array.size == size and used() is None:
                    found = array
                else:
                    others.append((array, used))
            if found is None:
                found = np.empty(size, np.float32)
            view: Array = found.reshape(shape)
            self._arrays = [*others[-_BUFFERS + 1 :], (found, weakref.ref(view))]
            return view


class SampleBatch:
    """A batch of transformed samples; the first row decides its shape."""

    def __init__(
        self, rows: Iterator[Row], transform: Transform, size: int, buffers: BatchBuffers, seed: int = 0
    ) -> None:
        self._rows = rows
        self._seed = seed
        self._transform = transform
        self._size = size
        self._buffers = buffers
        self._lock = threading.Lock()
        self._data: Array | None = None
        self._labels = np.empty(size, np.float32)
        self._shapes: list[tuple[tuple[int, ...], str]] = [((), "")] * size
        """What each row gives, and its origin."""

    def parts(self) -> Iterator[Part]:
        """Yield the work for a few rows at a time."""
        for first in range(0, self._size, _ROWS_PER_PART):
            rows = list(islice(self._rows, min(_ROWS_PER_PART, self._size - first)))
            yield partial(self._fill, first, rows)

    def _fill(self, first: int, rows: Sequence[Row]) -> None:
        for place, row in enumerate(rows, first):
            sample = row.load()
            out = self._place_for(place, self._transform.shape(sample.values.shape, sample.origin), sample.origin)
            if out is not None:
                self._transform(sample.values, out, sample.origin, Draws(self._seed, row.number))
                self._labels[place] = sample.label

    def _place_for(self, place: int, shape: tuple[int, ...], origin: str) -> Array | None:
        self._shapes[place] = (shape, origin)
        with self._lock:
            if self._data is None:
                self._data = self._buffers.take((self._size, *shape))
        return self._data[place] if self._data.shape[1:] == shape else None

    def finish(self) -> Tensors:
        """Return data and labels."""
        assert self._data is not None
        first = self._shapes[0][0]
        for shape, origin in self._shapes:
            if shape != first:
                raise ConfigError(
                    f"{origin}: gives shape {shape} (channels, height, width) in a batch whose first record gives "
                    f"{first}; use records of one size, crop_size, or batch_size 1"
                )
        return torch.from_numpy(self._data), torch.from_numpy(self._labels)


def batched(rows: Iterator[Row], transform: Transform, batch_size: int, seed: int) -> Batches:
    """Yield batches of ``batch_size`` rows each; ``rows`` are endless, and ``seed`` decides about what is random."""
    buffers = BatchBuffers()
    while True:
        yield SampleBatch(rows, transform, batch_size, buffers, seed)
