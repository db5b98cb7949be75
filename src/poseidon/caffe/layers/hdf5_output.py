"""HDF5Output: writes its bottoms to a file."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from poseidon.caffe.blob import Blob, Shape
from poseidon.caffe.extras import require
from poseidon.caffe.io import hdf5_files
from poseidon.caffe.layers.base import Blobs, Layer, exactly
from poseidon.caffe.layers.registry import register
from poseidon.caffe.memory import Array
from poseidon.errors import ConfigError

log = logging.getLogger("poseidon.caffe")

_DATA_SETS = ("data", "label")
_OVERHEAD_BYTES = 4 << 20
"""What HDF5 may need besides the rows: the rest of a chunk of each data set, and its index."""


@register("HDF5Output")
class HDF5Output(Layer):
    """Writes bottom 0 as ``data`` and bottom 1 as ``label``, four axes each.

    The file is emptied when the net is built and complete after every pass; later passes append their rows (Caffe
    stops at the second one).
    """

    bottom_count = exactly(2)
    top_count = exactly(0)

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        self._path: str = self.param.hdf5_output_param.file_name
        if not self._path:
            raise self.error("hdf5_output_param.file_name must be given")
        try:
            with hdf5_files.writing(self._path, "HDF5 file"):
                pass
        except ConfigError as error:
            raise self.error(str(error)) from None

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        data, label = bottoms
        if data[:1] != label[:1] or max(len(data), len(label)) > 4:
            raise self.error(
                f"bottoms {self.param.bottom[0]!r} of shape {data} and {self.param.bottom[1]!r} of shape {label} "
                "must have the same first dimension and at most 4 axes"
            )
        return []

    def forward(self, bottoms: Blobs, tops: Blobs) -> None:
        log.info("Saving HDF5 file %s", self._path)
        hdf5_files.reserve(self._path, 2 * sum(bottom.data.nbytes for bottom in bottoms) + _OVERHEAD_BYTES, "HDF5 file")
        with self._open("a") as file:
            for name, bottom in zip(_DATA_SETS, bottoms, strict=True):
                self._append(file, name, _four_axes(bottom))
        log.info("Successfully saved %d rows", bottoms[0].num)

    def backward(self, tops: Blobs, propagate_down: Sequence[bool], bottoms: Blobs) -> None:
        """Do nothing: the layer is not part of an objective."""

    def allow_force_backward(self, bottom_index: int) -> bool:
        return False

    def _open(self, mode: str) -> Any:
        try:
            return require("h5py").File(self._path, mode)
        except OSError as error:
            raise self.error(f"cannot write HDF5 file {self._path!r}: {error}") from error

    def _append(self, file: Any, name: str, rows: Array) -> None:
        if name not in file:
            file.create_dataset(name, data=rows, maxshape=(None, *rows.shape[1:]))
            return
        stored = file[name]
        if stored.shape[1:] != rows.shape[1:]:
            raise self.error(
                f"data set {name!r} of {self._path!r} has rows of shape {stored.shape[1:]}; "
                f"rows of shape {rows.shape[1:]} cannot be appended"
            )
        start = len(stored)
        stored.resize(start + len(rows), axis=0)
        stored[start:] = rows


def _four_axes(blob: Blob) -> Array:
    return blob.data.reshape(blob.num, blob.channels, blob.height, blob.width)
