"""Batches that a script feeds: each worker computes its rows, and the results of a step are combined.

All workers run the same script, so all feed the same batch. They divide it by rows, and the result is that of one
worker: sample counts weight the gradients, fetched scalars are means over all samples, fetched rows are gathered from
all workers.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from poseidon.team.team import Team
from poseidon.tensorflow.combining import combine

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Division:
    """How the batch of one run is divided."""

    shares: tuple[int, ...]
    """Rows of each worker; empty if the batch stays whole."""
    reason: str = ""
    """Why it stays whole, for the report."""

    def rows(self, rank: int) -> slice:
        """Return the rows of a worker."""
        start = sum(self.shares[:rank])
        return slice(start, start + self.shares[rank])


def plan_division(fed: Mapping[str, tuple[int | None, Array]], size: int) -> Division:
    """Decide how to divide the fed values, given by name as (length required by the placeholder, value). Pure.

    Only values whose placeholder accepts any length are divided, and only if all have the same length.
    """
    arrays = {name: (length, value) for name, (length, value) in fed.items() if value.ndim}
    lengths = {len(value) for length, value in arrays.values() if length is None}
    if not lengths:
        fixed = ", ".join(arrays)
        return Division((), f"{fixed} must have a fixed length (write None for the batch)" if fixed else "")
    if len(lengths) > 1:
        seen = ", ".join(f"{name} {len(value)}" for name, (length, value) in arrays.items() if length is None)
        return Division((), f"what is fed has different lengths ({seen})")
    (count,) = lengths
    odd = [name for name, (length, value) in arrays.items() if length is not None and len(value) == count]
    if odd:
        return Division((), f"{odd[0]} has as many rows as the batch, but needs all of them")
    if count < size:
        return Division((), f"{count} rows are fewer than the workers")
    return Division(tuple((rank + 1) * count // size - rank * count // size for rank in range(size)))


def join_results(
    team: Team,
    results: Sequence[Any],
    has_open_rows: Sequence[bool],
    ways: Sequence[int],
    count: int,
    division: Division,
) -> tuple[list[Any], list[int]]:
    """Return the results of a step as one worker would see them, and the workers' numbers of samples. Collective.

    ``has_open_rows`` says for each result whether the graph leaves its length open, as for a batch's rows; ``ways`` how
    numbers are combined (``combining.py``), where 0 leaves one as it is.
    """
    scalars = [i for i, result in enumerate(results) if ways[i] and _is_scalar(result)]
    kinds = zlib.crc32(repr((scalars, list(has_open_rows))).encode())
    rows = team.gather_ints([count, kinds], "the others' results of the step")
    joined, counts = list(results), [row[0] for row in rows]
    if len({row[1] for row in rows}) > 1:
        return joined, counts  # the workers have fetched different results
    if scalars:
        words = team.gather_ints([_to_word(results[i]) for i in scalars], "the others' results of the step")
        for i, column in zip(scalars, zip(*words, strict=True), strict=True):
            values = [np.asarray(_from_word(word, results[i].dtype)) for word in column]
            joined[i] = results[i].dtype.type(combine(ways[i], values, counts))
    for i in _divided(team, results, has_open_rows, division):
        joined[i] = _collect(team, results[i])
    return joined, counts


def _divided(team: Team, results: Sequence[Any], has_open_rows: Sequence[bool], division: Division) -> list[int]:
    """Return which results hold each worker's rows."""
    if not division.shares:
        return []
    mine = division.shares[team.rank]
    flags = [
        int(is_open and isinstance(result, np.ndarray) and result.ndim > 0 and len(result) == mine)
        for result, is_open in zip(results, has_open_rows, strict=True)
    ]
    if not any(has_open_rows):
        return []
    everybody = team.gather_ints(flags, "the others' results of the step")
    return [i for i, column in enumerate(zip(*everybody, strict=True)) if all(column) and results[i].dtype != object]


def _collect(team: Team, mine: Array) -> Array:
    """Return all workers' rows in order."""
    parts = team.gather_bytes(np.ascontiguousarray(mine).tobytes(), "the others' rows")
    return np.frombuffer(bytearray(b"".join(parts)), mine.dtype).reshape(-1, *mine.shape[1:])


def _is_scalar(result: Any) -> bool:
    return isinstance(result, (np.number, np.ndarray)) and result.ndim == 0 and result.dtype.kind in "fiu"


def _to_word(value: Any) -> int:
    return int(value) if value.dtype.kind in "iu" else int(struct.unpack("<q", struct.pack("<d", float(value)))[0])


def _from_word(word: int, dtype: Any) -> float | int:
    return word if dtype.kind in "iu" else float(struct.unpack("<d", struct.pack("<q", word))[0])
