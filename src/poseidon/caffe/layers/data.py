"""Data layers that make batches in the background; Data reads LMDB and LevelDB."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

from poseidon.caffe.blob import Shape
from poseidon.caffe.io.batches import Batches, Row, Sample, batched
from poseidon.caffe.io.database import EndlessReader, Record, backend_name, open_database
from poseidon.caffe.io.datum import datum_values, read_datum
from poseidon.caffe.io.draws import Draws, new_seed, permuted
from poseidon.caffe.io.images import Mode
from poseidon.caffe.io.prefetch import Prefetcher, StagedBatch, staged
from poseidon.caffe.io.sharding import DataSource, Share, locate, this_worker
from poseidon.caffe.io.transform import Transform, decode_mode
from poseidon.caffe.layers.base import Blobs, Count, Layer, exactly
from poseidon.caffe.layers.registry import register
from poseidon.caffe.schema.messages import DataParameter, HDF5DataParameter, ImageDataParameter, WindowDataParameter
from poseidon.errors import ConfigError

log = logging.getLogger("poseidon.caffe")

SourceSettings = DataParameter | HDF5DataParameter | ImageDataParameter | WindowDataParameter


class DataStream(NamedTuple):
    """What a data layer reads."""

    shapes: Sequence[Shape]
    """Of the tops, at first."""
    batches: Callable[[int, int], Batches]
    """Returns the endless batches from this worker's sample of a number on, by a seed; must not refer to the layer."""
    is_random: bool
    """Whether the seed matters."""


class PrefetchingLayer(Layer):
    """Base of layers that read files: threads make the next batches while the net computes."""

    bottom_count = exactly(0)
    top_count = exactly(2)
    logs_size: ClassVar[bool] = True
    """Whether Caffe logs the size of this type's batches."""
    _stream: DataStream
    _loader: Prefetcher[StagedBatch]
    _samples_taken: int
    seed: int
    """Decides about all that is random; equal on all workers of a solver."""

    def open(self) -> DataStream:
        """Open the source."""
        raise TypeError(f"layer type {self.type} does not say what it reads")

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        try:
            self._stream = self.open()
        except ConfigError as error:
            raise self.error(str(error)) from None
        shapes = self._stream.shapes
        for top, shape in zip(tops, shapes, strict=False):
            top.reshape(*shape)
        if self.logs_size:
            log.info("output data size: %s", ",".join(map(str, shapes[0])))
        self.seed = new_seed() if self._stream.is_random else 0
        self._load_from(0)

    def _load_from(self, sample: int) -> None:
        self._samples_taken = sample
        batches = staged(self._stream.batches(sample, self.seed))
        self._loader = Prefetcher(batches, self.param.data_param.prefetch, self.name)

    @property
    def records_read(self) -> int:
        """How many records all workers have taken together, if all have made as many passes as this one."""
        return self._samples_taken * this_worker().size

    def continue_after(self, records: int, seed: int) -> None:
        """Go on as if all workers together had taken that many records; what was made ahead is dropped."""
        self.seed = seed
        self._load_from(records // this_worker().size)

    def reshape(self, bottoms: Blobs, tops: Blobs) -> None:
        """Do nothing: every batch brings its own shape."""

    def forward(self, bottoms: Blobs, tops: Blobs) -> None:
        try:
            tensors = next(self._loader).take()
        except ConfigError as error:
            raise self.error(str(error)) from error
        self._samples_taken += self._stream.shapes[0][0]
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

    def open(self) -> DataStream:
        settings = self.param.data_param
        batch_size = self.batch_size(settings)
        if settings.rand_skip:
            log.warning("%s: rand_skip is ignored; every worker reads its own records", self.name)
        source = self.locate(settings)
        database = open_database(backend_name(settings.backend), source.path)
        transform = Transform(self.param.transform_param, self.is_training)
        mode = decode_mode(self.param.transform_param)
        first = next(database.records(), None)
        if first is None:
            raise ConfigError(f"{source.path}: the database is empty")
        sample = _sample(source.path, mode, *first)
        shape = transform.shape(sample.values.shape, sample.origin)
        order = ReadingOrder(source.share, batch_size, settings.shuffle_window)

        def batches(number: int, seed: int) -> Batches:
            records = order.records(EndlessReader(database), number, seed)
            rows = (Row(place, partial(_sample, source.path, mode, *record)) for place, record in records)
            return batched(rows, transform, batch_size, seed)

        is_random = transform.is_random or settings.shuffle_window > 1
        return DataStream([(batch_size, *shape), (batch_size,)], batches, is_random)


def _sample(path: str, mode: Mode, key: bytes, value: bytes | memoryview) -> Sample:
    origin = f"{path}: record {key.decode(errors='backslashreplace')!r}"
    datum = read_datum(value, origin)
    return Sample(datum_values(datum, mode, origin), datum.label, origin)


@dataclass(frozen=True)
class ReadingOrder:
    """The order in which a worker takes the records of a database."""

    share: Share
    batch: int
    window: int
    """Records of this many successive places are taken in random order; 0 or 1: as they are in the database."""

    def records(self, reader: EndlessReader, number: int, seed: int) -> Iterator[tuple[int, Record]]:
        """Yield place and content of this worker's records from its sample ``number`` on."""
        if self.window <= 1:
            for each in itertools.count(number):
                yield self._read(reader, each)
        while True:
            turn, start = divmod(number, self.window)
            # Read in order, which is what disks are good at.
            kept = [self._read(reader, turn * self.window + each) for each in range(self.window)]
            for each in permuted(self.window, seed, turn, self.share.rank)[start:].tolist():
                yield kept[each]
            number = (turn + 1) * self.window

    def _read(self, reader: EndlessReader, number: int) -> tuple[int, Record]:
        place = self.share.position(number, self.batch)
        return place, reader.at(place)


def check_skip(rand_skip: int, count: int) -> None:
    """Raise if ``rand_skip`` may skip all records."""
    if rand_skip > count:
        raise ConfigError(f"rand_skip is {rand_skip}, but there are {count} records; make it at most {count}")


def skipped(rand_skip: int, seed: int) -> int:
    """Return how many records all workers together skip at the beginning, at random, less than ``rand_skip``."""
    if not rand_skip:
        return 0
    skip = Draws(seed, -1).below(rand_skip)
    log.info("Skipping first %d data points.", skip)
    return skip
