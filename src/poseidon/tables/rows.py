"""Rows of a table: their storage, and patches of rows that travel. Pure.

A dense row is a vector of the table's width. A sparse row holds only the columns that were touched, in ascending order;
all others are zero. Untouched rows are zero in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from poseidon.wire.formats import Array

Index = Array
"""Row or column numbers, int64."""


@dataclass(frozen=True, slots=True)
class Patch:
    """Some rows with their values: changes to add, or contents to store. No row occurs twice."""

    rows: Index
    values: Array
    """Dense: one line per row. Sparse: the values of all rows, one after another."""
    columns: Index | None = None
    """Sparse only: the column of each value, ascending within a row."""
    starts: Index | None = None
    """Sparse only: where each row's values start, and one past the last."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """Total bytes of its arrays."""
        arrays = (self.rows, self.values, self.columns, self.starts)
        return sum(array.nbytes for array in arrays if array is not None)

    def select(self, places: Index) -> Patch:
        """Return the rows at these positions of ``rows``."""
        if self.starts is None or self.columns is None:
            return Patch(self.rows[places], self.values[places])
        parts = [slice(self.starts[place], self.starts[place + 1]) for place in places]
        return sparse_patch(self.rows[places], [(self.columns[part], self.values[part]) for part in parts], self.values)

    def within(self, rows: Index) -> Patch:
        """Return the part about ``rows``."""
        return self.select(np.flatnonzero(np.isin(self.rows, rows)))

    def size_of_rows(self) -> Array:
        """Return the sum of the absolute values of each row."""
        sizes = np.abs(self.values)
        if self.starts is None:
            return np.asarray(sizes.sum(axis=1, dtype=np.float64))
        ends = np.concatenate([[0.0], np.cumsum(sizes, dtype=np.float64)])
        result: Array = ends[self.starts[1:]] - ends[self.starts[:-1]]
        return result

    def split(self, limit_bytes: int) -> Iterator[Patch]:
        """Yield pieces of about ``limit_bytes``, of at least one row each; an empty patch yields itself."""
        pieces = max(1, min(len(self), -(-self.nbytes // limit_bytes)))
        if pieces == 1:
            yield self
            return
        for places in np.array_split(np.arange(len(self)), pieces):
            yield self.select(places)


def sparse_patch(rows: Index, contents: Sequence[tuple[Index, Array]], like: Array) -> Patch:
    """Return the patch of sparse ``rows`` with these columns and values, of the dtype of ``like``."""
    starts = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(columns) for columns, _ in contents], out=starts[1:])
    columns = np.concatenate([columns for columns, _ in contents]) if contents else np.empty(0, np.int64)
    values = np.concatenate([values for _, values in contents]) if contents else np.empty(0, like.dtype)
    return Patch(rows, values, columns, starts)


def combine(rows: Index, values: Array) -> Patch:
    """Return dense changes with repeated rows added up in their order; shares ``values`` if possible."""
    if bool(np.all(rows[1:] > rows[:-1])):
        return Patch(rows, values)
    unique, inverse = np.unique(rows, return_inverse=True)
    total = np.zeros((len(unique), values.shape[1]), values.dtype)
    np.add.at(total, inverse, values)
    return Patch(unique, total)


def combine_columns(columns: Index, values: Array) -> tuple[Index, Array]:
    """Return sparse contents with repeated columns added up, in ascending order."""
    unique, inverse = np.unique(columns, return_inverse=True)
    total = np.zeros(len(unique), values.dtype)
    np.add.at(total, inverse, values)
    return unique, total


class RowStore(Protocol):
    """Storage for rows."""

    def add(self, patch: Patch) -> None:
        """Add the values to the rows."""

    def put(self, patch: Patch) -> None:
        """Replace the rows."""

    def take(self, rows: Index) -> Patch:
        """Return a copy of the rows."""

    def clear(self, rows: Index) -> None:
        """Make the rows zero."""

    def touched(self) -> Index:
        """Return the numbers of all rows that may differ from zero, ascending."""


class DenseRows:
    """Rows in one array: every ``stride``-th row of the table, starting at ``offset``."""

    def __init__(self, count: int, width: int, dtype: str, stride: int = 1, offset: int = 0) -> None:
        self._stride = stride
        self._offset = offset
        held = len(range(offset, count, stride))
        # Zeroed memory is mapped on first write, so a sparsely used table costs little.
        self.values = np.zeros((held, width), np.dtype(dtype))

    def add(self, patch: Patch) -> None:
        """Add the values to the rows."""
        self.values[self._places(patch.rows)] += patch.values

    def put(self, patch: Patch) -> None:
        """Replace the rows."""
        self.values[self._places(patch.rows)] = patch.values

    def take(self, rows: Index) -> Patch:
        """Return a copy of the rows."""
        # A slice alone would be a view of rows that change later.
        return Patch(rows, np.array(self.values[self._places(rows)]))

    def clear(self, rows: Index) -> None:
        """Make the rows zero."""
        self.values[self._places(rows)] = 0

    def touched(self) -> Index:
        """Return the numbers of all rows that may differ from zero, ascending."""
        return np.arange(len(self.values), dtype=np.int64) * self._stride + self._offset

    def _places(self, rows: Index) -> Index | slice:
        """Return the positions of the rows; consecutive ones as a slice, which numpy copies several times faster."""
        places = rows // self._stride if self._stride > 1 else rows
        if len(places) > 1 and places[-1] - places[0] == len(places) - 1 and bool(np.all(places[1:] > places[:-1])):
            return slice(int(places[0]), int(places[-1]) + 1)
        return places


class SparseRows:
    """Rows of which only the touched columns are stored."""

    def __init__(self, dtype: str) -> None:
        self._empty = (np.empty(0, np.int64), np.empty(0, np.dtype(dtype)))
        self._contents: dict[int, tuple[Index, Array]] = {}

    def add(self, patch: Patch) -> None:
        """Add the values to the rows."""
        for row, columns, values in _contents_of(patch):
            old_columns, old_values = self._contents.get(row, self._empty)
            self._contents[row] = combine_columns(
                np.concatenate([old_columns, columns]), np.concatenate([old_values, values])
            )

    def put(self, patch: Patch) -> None:
        """Replace the rows."""
        for row, columns, values in _contents_of(patch):
            self._contents[row] = (columns.copy(), values.copy())

    def take(self, rows: Index) -> Patch:
        """Return a copy of the rows."""
        return sparse_patch(rows, [self._contents.get(int(row), self._empty) for row in rows], self._empty[1])

    def clear(self, rows: Index) -> None:
        """Make the rows zero."""
        for row in rows:
            self._contents.pop(int(row), None)

    def touched(self) -> Index:
        """Return the numbers of all rows that may differ from zero, ascending."""
        return np.array(sorted(self._contents), np.int64)


def _contents_of(patch: Patch) -> Iterator[tuple[int, Index, Array]]:
    assert patch.columns is not None
    assert patch.starts is not None
    for place, row in enumerate(patch.rows):
        part = slice(patch.starts[place], patch.starts[place + 1])
        yield int(row), patch.columns[part], patch.values[part]
