"""Touched rows of a table, as they travel to the owners of its chunks: their numbers, then their values. Pure.

A table that is a linear layer's weight too gets a full gradient from that layer, early in backward, and rows from its
look-ups, at the end. The full gradient travels as parts do; the rows follow (``TOUCHED``), one message for each chunk.
The owner adds up all workers' rows, in rank order, and takes the result as one more part, the last. The processors do
so with :func:`add_up`; a device gets the rows packed behind a table that says where they lie (:func:`pack`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from poseidon.errors import ServerError
from poseidon.sums.chunks import Chunk
from poseidon.wire.formats import Array
from poseidon.wire.message import Header

_NUMBER = np.dtype(np.int64)
_VALUE = np.dtype(np.float32)
_PLACE = np.dtype(np.int32)
NOWHERE = -1
"""In place of a row's place: the worker has not touched it."""


@dataclass(frozen=True)
class TouchedRows:
    """One worker's rows."""

    numbers: Array
    """Distinct, ascending."""
    values: Array
    """One row each."""

    @classmethod
    def none(cls, width: int) -> TouchedRows:
        """Return no rows."""
        return cls(np.empty(0, _NUMBER), np.empty((0, width), _VALUE))

    def in_chunk(self, chunk: Chunk) -> Array:
        """Return the rows of a chunk as they travel; their numbers count from its first row."""
        where, numbers = rows_in_chunk(self.numbers, chunk, self.values.shape[1])
        return np.concatenate([numbers.view(np.uint8), self.values[where].reshape(-1).view(np.uint8)])


@dataclass(frozen=True)
class PackedRows:
    """How all workers' rows of a chunk lie in one piece of memory.

    First, for each row of the chunk and each of ``workers``, the row's place among the values, or ``NOWHERE``; then the
    values.
    """

    rows: int
    """Rows that the chunk has values of."""
    skipped: int
    """Values of the first row that lie before the chunk."""
    width: int
    workers: int
    """Those that have touched any row."""
    count: int
    """Rows of all workers together."""

    @property
    def values_at(self) -> int:
        """Where the values begin."""
        return self.rows * self.workers * _PLACE.itemsize

    @property
    def used_bytes(self) -> int:
        """Size of everything."""
        return self.values_at + self.count * self.width * _VALUE.itemsize


def rows_in_chunk(numbers: Array, chunk: Chunk, width: int) -> tuple[slice, Array]:
    """Return which of ``numbers``, ascending, have values in a chunk, and those, counted from its first row."""
    span = _span(chunk, width)
    first, last = np.searchsorted(numbers, (span.start, span.stop))
    return slice(first, last), numbers[first:last] - span.start


def read_numbers(details: memoryview, chunk: Chunk, width: int) -> Array:
    """Return the row numbers in a request, counted from the chunk's first row; raise ``ServerError`` for others."""
    numbers, rows = np.frombuffer(details, _NUMBER), len(_span(chunk, width))
    if numbers.size and (numbers.min() < 0 or numbers.max() >= rows):
        raise ServerError(f"rows {numbers[:8].tolist()} of {chunk} were asked for; it has {rows}")
    return numbers


def chunk_span(chunk: Chunk, width: int) -> tuple[int, int]:
    """Return how many rows a chunk has values of, and how many values of the first lie before it."""
    span = _span(chunk, width)
    return len(span), chunk.start - span.start * width


def check_size(header: Header, chunk: Chunk, width: int) -> None:
    """Raise ``ServerError`` unless a message can hold rows of a chunk."""
    row_bytes, rows = _row_bytes(width), len(_span(chunk, width))
    count, rest = divmod(header.length, row_bytes)
    if rest or count > rows:
        raise ServerError(
            f"rank {header.sender} sent {header.length} bytes of touched rows of {chunk}; "
            f"it has {rows} rows, which take {row_bytes} bytes each"
        )


def read_rows(payload: memoryview, chunk: Chunk, width: int, sender: int) -> TouchedRows:
    """Return the rows in a message of possible size, where they lie."""
    count, rows = payload.nbytes // _row_bytes(width), len(_span(chunk, width))
    numbers = np.frombuffer(payload, _NUMBER, count)
    values = np.frombuffer(payload, _VALUE, count * width, count * _NUMBER.itemsize).reshape(count, width)
    if count and (numbers[0] < 0 or numbers[-1] >= rows or not (np.diff(numbers) > 0).all()):
        raise ServerError(
            f"rank {sender} sent touched rows of {chunk} whose numbers do not ascend from 0 to less than {rows}: "
            f"{numbers[:8].tolist()}"
        )
    return TouchedRows(numbers, values)


def add_up(everybody: Sequence[TouchedRows], chunk: Chunk, into: Array) -> None:
    """Fill a chunk with the sum of all workers' rows, added to zeros in the given order."""
    table, (_, skipped) = _add_rows(everybody, chunk), chunk_span(chunk, everybody[0].values.shape[1])
    np.copyto(into, table.reshape(-1)[skipped : skipped + chunk.length])


def pack(everybody: Sequence[TouchedRows], chunk: Chunk, into: Array) -> PackedRows:
    """Pack all workers' rows into bytes, in the given order; add them up first where that takes fewer bytes."""
    width = everybody[0].values.shape[1]
    rows, skipped = chunk_span(chunk, width)
    touching = [each for each in everybody if each.numbers.size]
    count = sum(each.numbers.size for each in touching)
    if count > rows:
        touching, count = [TouchedRows(np.arange(rows), _add_rows(everybody, chunk))], rows
    packed = PackedRows(rows, skipped, width, len(touching), count)
    places = into[: packed.values_at].view(_PLACE).reshape(rows, packed.workers)
    values = into[packed.values_at : packed.used_bytes].view(_VALUE).reshape(count, width)
    places[:] = NOWHERE
    end = 0
    for worker, each in enumerate(touching):
        start, end = end, end + each.numbers.size
        places[each.numbers, worker] = np.arange(start, end)
        values[start:end] = each.values
    return packed


def most_packed_bytes(chunk: Chunk, width: int, workers: int) -> int:
    """Return how many bytes :func:`pack` may take."""
    rows, skipped = chunk_span(chunk, width)
    return PackedRows(rows, skipped, width, workers, rows).used_bytes


def _add_rows(everybody: Sequence[TouchedRows], chunk: Chunk) -> Array:
    """Return the sums of all rows of a chunk."""
    width = everybody[0].values.shape[1]
    table = np.zeros((len(_span(chunk, width)), width), _VALUE)
    with np.errstate(over="ignore", invalid="ignore"):  # finding infinities is up to the caller, as in ``host.py``
        for rows in everybody:
            table[rows.numbers] += rows.values  # each row at most once, so no addition hides another
    return table


def _row_bytes(width: int) -> int:
    return _NUMBER.itemsize + width * _VALUE.itemsize


def _span(chunk: Chunk, width: int) -> range:
    """Return the numbers of the rows of which a chunk holds values; the first and the last may lie in others too."""
    return range(chunk.start // width, -(-chunk.stop // width))
