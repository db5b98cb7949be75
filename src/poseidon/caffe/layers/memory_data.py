"""MemoryData: arrays that the program provides."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from poseidon.caffe.layers.base import Blobs, Layer, exactly
from poseidon.caffe.layers.registry import register

log = logging.getLogger("poseidon.caffe")


@register("MemoryData")
class MemoryData(Layer):
    """Returns rows of two arrays batch by batch, endlessly."""

    bottom_count = exactly(0)
    top_count = exactly(2)

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        settings = self.param.memory_data_param
        self._batch_size: int = settings.batch_size
        self._row_shape = (settings.channels, settings.height, settings.width)
        if not all((self._batch_size, *self._row_shape)):
            raise self.error(
                f"batch_size {self._batch_size} and channels, height, width {self._row_shape} must all be positive"
            )
        self._arrays: tuple[torch.Tensor, torch.Tensor] | None = None
        self._position = 0
        tops[0].reshape(self._batch_size, *self._row_shape)
        tops[1].reshape(self._batch_size)

    def reset(self, data: NDArray[Any], labels: NDArray[Any]) -> None:
        """Start with the first row of new arrays; they are not copied, so later changes are visible.

        There must be one label per row, a multiple of the batch size, in single precision and C order.
        """
        for what, array, row_shape in (("data", data, self._row_shape), ("labels", labels, (1, 1, 1))):
            if array.dtype != np.float32 or not array.flags.c_contiguous:
                raise self.error(f"{what} must be a C-contiguous float32 array, not {array.dtype}")
            if array.shape[1:] != row_shape:
                raise self.error(f"{what} have shape {array.shape}, expected (n, {', '.join(map(str, row_shape))})")
        if len(data) != len(labels):
            raise self.error(f"{len(data)} rows of data and {len(labels)} labels; one label per row is needed")
        if not len(data) or len(data) % self._batch_size:
            raise self.error(f"{len(data)} rows are not a multiple of batch_size {self._batch_size}")
        if self.param.HasField("transform_param"):
            log.warning("%s does not transform array data on Reset()", self.type)
        self._arrays = (_shared_tensor(data), _shared_tensor(labels))
        self._position = 0

    def reshape(self, bottoms: Blobs, tops: Blobs) -> None:
        """Do nothing: the shapes are fixed at setup."""

    def forward(self, bottoms: Blobs, tops: Blobs) -> None:
        if self._arrays is None:
            raise self.error("has no data yet; call net.set_input_arrays(data, labels) first")
        end = self._position + self._batch_size
        for top, array in zip(tops, self._arrays, strict=True):
            top.put_data(array[self._position : end], borrowed=True)
        self._position = end % len(self._arrays[0])

    def backward(self, tops: Blobs, propagate_down: Sequence[bool], bottoms: Blobs) -> None:
        """Do nothing: the layer has no bottoms."""


def _shared_tensor(array: NDArray[Any]) -> torch.Tensor:
    # Torch warns about read-only memory even though nothing writes to it, so copy it.
    return torch.from_numpy(array if array.flags.writeable else array.copy())
