"""Data layers that load batches in the background; Data reads LMDB and LevelDB."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import ClassVar

import torch

from poseidon.caffe.blob import Shape
from poseidon.caffe.io.batches import Sample, batched
from poseidon.caffe.io.database import Database, backend_name, open_database
from poseidon.caffe.io.datum import datum_values, parse_datum
from poseidon.caffe.io.images import Mode
from poseidon.caffe.io.prefetch import Prefetcher, StagedBatch, staged
from poseidon.caffe.io.sharding import DataSource, Share, in_turns, locate, this_worker
from poseidon.caffe.io.transform import Transform, decode_mode
from poseidon.caffe.layers.base import Blobs, Count, Layer, exactly
from poseidon.caffe.layers.registry import register
from poseidon.caffe.schema.messages import DataParameter, HDF5DataParameter, ImageDataParameter, WindowDataParameter
from poseidon.errors import ConfigError

log = logging.getLogger("poseidon.caffe")

Batches = Iterator[tuple[torch.Tensor, ...]]
SourceSettings = DataParameter | HDF5DataParameter | ImageDataParameter | WindowDataParameter


class PrefetchingLayer(Layer):
    """Base of layers that read files: a thread loads the next batches while the net computes."""

    bottom_count = exactly(0)
    top_count = exactly(2)
    logs_size: ClassVar[bool] = True
    """Whether Caffe logs the size of this type's batches."""
    _loader: Prefetcher[StagedBatch]

    def open(self) -> tuple[Sequence[Shape], Batches]:
        """Open the source; return the tops' shapes and an endless iterator, which must not refer to the layer."""
        raise TypeError(f"layer type {self.type} does not say what it reads")

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        try:
            shapes, batches = self.open()
        except ConfigError as error:
            raise self.error(str(error)) from None
        for top, shape in zip(tops, shapes, strict=False):
            top.reshape(*shape)
        if self.logs_size:
            log.info("output data size: %s", ",".join(map(str, shapes[0])))
        self._loader = Prefetcher(staged(batches), self.param.data_param.prefetch, self.name)

    def reshape(self, bottoms: Blobs, tops: Blobs) -> None:
        """Do nothing: every batch brings its own shape."""

    def forward(self, bottoms: Blobs, tops: Blobs) -> None:
        try:
            tensors = next(self._loader).take()
        except ConfigError as error:
            raise self.error(str(error)) from error
        for top, values in zip(tops, tensors, strict=False):
            top.put_data(values)

    def backward(self, tops: Blobs, propagate_down: Sequence[bool], bottoms: Blobs) -> None:
        """Do nothing: the layer has no bottoms."""

    def locate(self, settings: SourceSettings) -> DataSource:
        """Return what this worker reads for the ``source`` in the layer's settings."""
        if not settings.source:
            raise ConfigError("no source is given; name the database or list to read")
        shared = settings.shared_file_system if settings.HasField("shared_file_system") else None
        return locate(settings.source, shared, self.is_training, this_worker())

    def batch_size(self, settings: SourceSettings) -> int:
        """Return the number of samples per batch, which must be given."""
        if not settings.batch_size > 0:
            raise ConfigError(f"batch_size is {settings.batch_size}; a positive number is needed")
        return settings.batch_size


@register("Data")
class Data(PrefetchingLayer):
    """Reads Datums from a database in the order of their keys, endlessly."""

    top_count = Count(1, 2)

    def open(self) -> tuple[Sequence[Shape], Batches]:
        settings = self.param.data_param
        batch_size = self.batch_size(settings)
        if settings.rand_skip:
            log.warning("%s: rand_skip is ignored; every worker reads its own records", self.name)
        source = self.locate(settings)
        database = open_database(backend_name(settings.backend), source.path)
        transform = Transform(self.param.transform_param, self.is_training, this_worker().rank)
        mode = decode_mode(self.param.transform_param)
        first = next(_samples(database, Share(), mode), None)
        if first is None:
            raise ConfigError(f"{source.path}: the database is empty")
        shape = transform.shape(first.values.shape, first.origin)
        samples = _samples(database, source.share, mode)
        return [(batch_size, *shape), (batch_size,)], batched(samples, transform, batch_size)


def _samples(database: Database, share: Share, mode: Mode) -> Iterator[Sample]:
    for key, value in in_turns(database.records, share):
        origin = f"{database.path}: record {key.decode(errors='backslashreplace')!r}"
        datum = parse_datum(value, origin)
        yield Sample(datum_values(datum, mode, origin), datum.label, origin)


def skipped(items: Iterator[int], rand_skip: int, count: int) -> Iterator[int]:
    """Skip a random number of items, less than ``rand_skip``, at the beginning."""
    if not rand_skip:
        return items
    skip = int(torch.randint(rand_skip, ()).item())
    log.info("Skipping first %d data points.", skip)
    if skip >= count:
        raise ConfigError(f"rand_skip {rand_skip} skips {skip} of {count} records; make it at most {count}")
    return islice(items, skip, None)
