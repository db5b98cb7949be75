"""The mean image of a database."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from poseidon.caffe.io.database import open_database
from poseidon.caffe.io.datum import datum_values, parse_datum
from poseidon.caffe.schema import BlobProto
from poseidon.caffe.schema.files import write_binary
from poseidon.caffe.schema.packed import append_floats
from poseidon.errors import ConfigError

log = logging.getLogger("poseidon.caffe")

_REPORT_EVERY = 10000


def compute_image_mean(database: str, backend: str, output: str | None = None) -> NDArray[np.float32]:
    """Return the mean (channels, height, width) of all records, and write it to ``output`` as Caffe does."""
    log.info("Starting iteration")
    mean, count = _mean(database, backend)
    if count % _REPORT_EVERY:
        log.info("Processed %d files.", count)
    if output is not None:
        log.info("Write to %s", output)
        write_binary(output, _mean_proto(mean))
    log.info("Number of channels: %d", len(mean))
    for channel, value in enumerate(mean.mean(axis=(1, 2), dtype=np.float64)):
        log.info("mean_value channel [%d]: %g", channel, value)
    return mean


def _mean(database: str, backend: str) -> tuple[NDArray[np.float32], int]:
    total: NDArray[np.float64] | None = None
    count = 0
    for key, value in open_database(backend, database).records():
        origin = f"{database}: record {key.decode(errors='backslashreplace')!r}"
        values = datum_values(parse_datum(value, origin), "native", origin)
        if total is None:
            total = np.zeros(values.shape, np.float64)
        if values.shape != total.shape:
            raise ConfigError(
                f"{origin}: has shape {values.shape} (channels, height, width), the first record {total.shape}; "
                "a mean needs records of one size"
            )
        total += values
        count += 1
        if count % _REPORT_EVERY == 0:
            log.info("Processed %d files.", count)
    if total is None:
        raise ConfigError(f"{database}: the database is empty")
    return (total / count).astype(np.float32), count


def _mean_proto(mean: NDArray[np.float32]) -> BlobProto:
    channels, height, width = mean.shape
    proto = BlobProto(num=1, channels=channels, height=height, width=width)
    append_floats(proto, "data", mean)
    return proto
