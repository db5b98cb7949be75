"""HDF5Data: rows of the files named in a list."""

from __future__ import annotations

import logging
from pathlib import Path

from poseidon.caffe.io.batches import Batches
from poseidon.caffe.io.hdf5 import HDF5Rows
from poseidon.caffe.io.lists import read_file_list
from poseidon.caffe.layers.base import Count
from poseidon.caffe.layers.data import DataStream, PrefetchingLayer
from poseidon.caffe.layers.registry import register
from poseidon.errors import ConfigError

log = logging.getLogger("poseidon.caffe")


@register("HDF5Data")
class HDF5Data(PrefetchingLayer):
    """Returns rows of the data sets named after its tops."""

    top_count = Count(1, None)
    logs_size = False

    def open(self) -> DataStream:
        if self.param.HasField("transform_param"):
            raise ConfigError("HDF5Data does not transform data; remove transform_param")
        settings = self.param.hdf5_data_param
        batch_size = self.batch_size(settings)
        source = self.locate(settings)
        log.info("Loading list of HDF5 filenames from: %s", source.path)
        files = read_file_list(source.path)
        log.info("Number of HDF5 files: %d", len(files))
        missing = [file for file in files if not Path(file).is_file()]
        if missing:
            raise ConfigError(f"{source.path}: names {missing[0]}, which does not exist")
        rows = HDF5Rows(files, self.param.top, source.share)
        is_shuffled = settings.shuffle

        def batches(number: int, seed: int) -> Batches:
            return rows.batches(batch_size, number, seed if is_shuffled else None)

        return DataStream([(batch_size, *shape) for shape in rows.row_shapes], batches, is_shuffled)
