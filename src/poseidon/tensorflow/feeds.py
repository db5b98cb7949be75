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


def mean_of(values: Sequence[float], counts: Sequence[int]) -> float:
    """Return the mean of the workers' values, weighted by their samples. Pure."""
    if len(set(values)) == 1:
        return values[0]
    return sum(value * count for value, count in zip(values, counts, strict=True)) / sum(counts)


def join_results(
    team: Team, results: Sequence[Any], has_open_rows: Sequence[bool], count: int, division: Division
) -> list[Any]:
    """Return the results of a step as one worker would see them. Collective.

    ``has_open_rows`` says for each result whether the graph leaves its length open, as for a batch's rows.
    """
    scalars = [i for i, result in enumerate(results) if _is_scalar(result)]
    kinds = zlib.crc32(repr((scalars, list(has_open_rows))).encode())
    rows = team.gather_ints([count, kinds], "the others' results of the step")
    joined = list(results)
    if len({row[1] for row in rows}) > 1:
        return joined  # the workers have fetched different results
    counts = [row[0] for row in rows]
    if scalars:
        words = team.gather_ints([_to_word(float(results[i])) for i in scalars], "the others' results of the step")
        for i, column in zip(scalars, zip(*words, strict=True), strict=True):
            joined[i] = results[i].dtype.type(mean_of([_from_word(word) for word in column], counts))
    for i in _divided(team, results, has_open_rows, division):
        joined[i] = _collect(team, results[i])
    return joined


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
    return isinstance(result, (np.floating, np.ndarray)) and result.ndim == 0 and result.dtype.kind == "f"


def _to_word(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _from_word(word: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", word))[0])
