"""Write the blobs that a net computes for its data to databases."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from poseidon.caffe.blob import Blob
from poseidon.caffe.io.database import Writer, new_database
from poseidon.caffe.pycaffe import Net
from poseidon.caffe.schema import TEST, Datum
from poseidon.errors import ConfigError, unknown_name

log = logging.getLogger("poseidon.caffe")

_REPORT_EVERY = 1000


def extract_features(
    weights: str, model: str, blobs: Sequence[str], databases: Sequence[str], batches: int, backend: str
) -> list[int]:
    """Run a net in its TEST phase and store each row of the named blobs; return the number of rows of each."""
    if len(blobs) != len(databases):
        raise ConfigError(
            f"{len(blobs)} blobs ({', '.join(blobs)}) and {len(databases)} databases ({', '.join(databases)}) "
            "were named; there must be one database per blob"
        )
    if batches < 1:
        raise ConfigError(f"the number of batches is {batches}; at least one is needed")
    net = Net(model, TEST, weights=weights)
    for name in blobs:
        if name not in net.blobs:
            raise unknown_name(f"blob of {model}", name, list(net.blobs))
    counts = [0] * len(blobs)
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(new_database(backend, path)) for path in databases]
        log.error("Extracting Features")
        for _ in range(batches):
            net.run_forward()
            for i, (name, writer) in enumerate(zip(blobs, writers, strict=True)):
                counts[i] = _store(writer, net.blobs[name], name, counts[i])
    for name, count in zip(blobs, counts, strict=True):
        log.error("Extracted features of %d query images for feature blob %s", count, name)
    log.error("Successfully extracted the features!")
    return counts


def _store(writer: Writer, blob: Blob, name: str, count: int) -> int:
    """Write the rows of a blob under numbers from ``count`` up; return the next number."""
    for datum in _datums(blob):
        writer.put(f"{count:010d}".encode(), datum.SerializeToString())
        count += 1
        if count % _REPORT_EVERY == 0:
            log.error("Extracted features of %d query images for feature blob %s", count, name)
    return count


def _datums(blob: Blob) -> Iterator[Any]:
    rows = blob.data.reshape(blob.num, -1)
    for row in rows:
        yield Datum(channels=blob.channels, height=blob.height, width=blob.width, float_data=row.tolist())
