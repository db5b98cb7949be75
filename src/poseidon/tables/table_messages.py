"""The payloads of messages about tables. Pure; nothing from the network is trusted.

In the header, ``subject`` is the table, ``number`` counts the messages between two ranks, ``clock`` is the sender's
clock (in replies: the clock up to which the rows are fresh), and ``detail`` holds a :class:`TableFlag`. The payload
starts with 64-bit integers (place, count of included updates, number of rows, number of values), then row numbers,
for sparse rows starts and columns, and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag

import numpy as np

from poseidon.errors import ServerError
from poseidon.tables.rows import Index, Patch
from poseidon.tables.tables import TableSpec
from poseidon.wire.formats import Array

PREFIX = 4
NO_ROWS = np.empty(0, np.int64)


class TableFlag(IntFlag):
    """What the header's ``detail`` says about a message."""

    PUSH = 0x01
    """ROW: all rows of the place that the receiver holds are now fresh."""
    LEAVE = 0x02
    """CLOCK: the sender has finished as a worker."""
    LAST = 0x04
    """STATE: the last message. CLOCK with LEAVE: the very last message of this rank."""
    PUT = 0x08
    """STATE: these rows replace the server's."""
    SETTLED = 0x10
    """STATE: tell the sender when the initial rows have arrived."""
    ADOPT = 0x20
    """STATE: the sender's copies of a place whose server died; the last message carries its clock."""
    ANSWER = 0x40
    """STATE: a server's reply. LOST: a reply to a complaint; the sender is alive."""


@dataclass(frozen=True, slots=True)
class Content:
    """A parsed payload."""

    place: int
    included: int
    patch: Patch


def write_rows(place: int, rows: Index) -> Array:
    """Return the payload that only names ``rows``."""
    return np.concatenate([np.array([place, 0, len(rows), 0], np.int64), rows]).view(np.uint8)


def read_rows(payload: memoryview) -> tuple[int, Index]:
    """Return the place and rows from :func:`write_rows`."""
    place, _, count, _ = _read_prefix(payload)
    _check_length(payload, (PREFIX + count) * 8)
    return place, np.frombuffer(payload, np.int64, count, PREFIX * 8)


def write_patch(place: int, included: int, patch: Patch) -> Array:
    """Return the payload that holds ``patch``."""
    prefix = np.array([place, included, len(patch.rows), patch.values.size], np.int64)
    parts = [prefix, patch.rows, patch.starts, patch.columns, patch.values]
    return np.concatenate([np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts if part is not None])


def read_patch(spec: TableSpec, payload: memoryview) -> Content:
    """Return the content from :func:`write_patch` for a table with ``spec``; its arrays share ``payload``."""
    place, included, count, size = _read_prefix(payload)
    dtype = np.dtype(spec.dtype)
    words = PREFIX + count + (count + 1 + size if spec.sparse else 0)
    _check_length(payload, words * 8 + size * dtype.itemsize)
    rows = np.frombuffer(payload, np.int64, count, PREFIX * 8)
    values = np.frombuffer(payload, dtype, size, words * 8)
    if len(np.unique(rows)) != count:
        raise ServerError(f"a message about table {spec.name!r} names a row twice")
    if not spec.sparse:
        if size != count * spec.width:
            raise ServerError(f"{size} values for {count} rows of table {spec.name!r}, whose width is {spec.width}")
        return Content(place, included, Patch(rows, values.reshape(count, spec.width)))
    starts = np.frombuffer(payload, np.int64, count + 1, (PREFIX + count) * 8)
    columns = np.frombuffer(payload, np.int64, size, (PREFIX + 2 * count + 1) * 8)
    _check_sparse(spec, starts, columns, size)
    return Content(place, included, Patch(rows, values, columns, starts))


def _read_prefix(payload: memoryview) -> tuple[int, int, int, int]:
    if payload.nbytes < PREFIX * 8:
        raise ServerError(f"a message about a table has {payload.nbytes} bytes; at least {PREFIX * 8} are needed")
    place, included, count, size = np.frombuffer(payload, np.int64, PREFIX).tolist()
    if not (0 <= count <= payload.nbytes and 0 <= size <= payload.nbytes):
        raise ServerError(f"a message of {payload.nbytes} bytes announces {count} rows and {size} values")
    return place, included, count, size


def _check_length(payload: memoryview, expected: int) -> None:
    if payload.nbytes != expected:
        raise ServerError(f"a message about a table has {payload.nbytes} bytes; its prefix implies {expected}")


def _check_sparse(spec: TableSpec, starts: Index, columns: Index, size: int) -> None:
    ordered = starts[0] == 0 and starts[-1] == size and bool((np.diff(starts) >= 0).all())
    if not ordered or (size and not (columns.min() >= 0 and columns.max() < spec.width)):
        raise ServerError(f"a message about table {spec.name!r} has columns outside its width of {spec.width}")
