"""Sums of chunks in rank order: step 5 of the journey. Pure.

Contributions arrive in any order. Float addition is not associative, so they are added in the order of ranks, a few at
a time as soon as the next ones are there; later ones are held by reference until their turn.
Every worker receives the bits that one place computed, so replicas stay identical.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from poseidon.errors import ConfigError, ServerError
from poseidon.sums.chunks import Chunk
from poseidon.sums.turns import check_clock, refuse_second
from poseidon.wire.formats import Array, Format, find_format

PIECE_BYTES = 128 * 1024
"""Contributions that are there together are added piece by piece, so that the sum stays in the core's own cache."""
FEWEST_ADDED = 4
"""Contributions wait for so many to be added together: each time the whole sum is read and written once."""


class Shard:
    """The sums of the chunks one rank owns, over the same ``workers`` every time.

    ``formats`` names the number format of each unit (or of all of them); values of half precision are added in
    float32 and rounded once. With ``mean``, the finished sum is divided once by the number of workers (rounding once;
    dividing every contribution first would round once more each).

    :meth:`add` may be called from several threads. Nobody waits for another's addition: a thread that finds a sum
    being worked on leaves its values there, and the working thread adds them.
    """

    def __init__(
        self,
        chunks: Iterable[Chunk],
        workers: Sequence[int],
        *,
        formats: Mapping[int, str] | str = "float32",
        mean: bool = False,
    ) -> None:
        self.workers = tuple(sorted(workers))
        if not self.workers or len(set(self.workers)) != len(self.workers):
            raise ConfigError(f"workers are {list(workers)}; at least one is needed, each once")
        self._mean = mean
        self._lock = threading.Lock()
        self._spare: dict[tuple[int, str], list[Array]] = {}
        self._sums: dict[tuple[int, int], _Sum] = {}
        self.include(chunks, formats)

    def include(self, chunks: Iterable[Chunk], formats: Mapping[int, str] | str) -> None:
        """Take over more chunks; nobody may send their values before."""
        found = {}
        for chunk in chunks:
            name = formats if isinstance(formats, str) else formats[chunk.unit]
            found[chunk.unit, chunk.index] = _Sum(chunk, find_format(name))
        with self._lock:
            self._sums = {**self._sums, **found}

    def add(self, unit: int, chunk: int, clock: int, rank: int, values: Array) -> Array | None:
        """Take the contribution of ``rank``; return the finished sum if this call finished it, else None.

        ``values`` must not change until the sum is finished; it is read where it lies. The returned array is the
        caller's until it is handed to :meth:`release`.
        """
        return self._add(self._find(unit, chunk, rank), clock, rank, values)

    def add_bytes(self, unit: int, chunk: int, clock: int, rank: int, payload: memoryview) -> Array | None:
        """Like :meth:`add`, for values as they came from the wire; they are read where they lie."""
        total = self._find(unit, chunk, rank)
        stored = total.format.stored
        if payload.nbytes % stored.itemsize:
            raise ServerError(
                f"rank {rank} sent {payload.nbytes} bytes for {total}, which is no whole number of {stored} values"
            )
        return self._add(total, clock, rank, np.frombuffer(payload, stored))

    def release(self, result: Array) -> None:
        """Give back a finished sum that nobody reads any more; its memory serves a later one. Optional."""
        with self._lock:
            self._spare.setdefault((result.size, result.dtype.str), []).append(result)

    def awaited(self) -> dict[tuple[int, int], list[int]]:
        """Return, for each chunk whose sum is under way, the ranks it still waits for."""
        with self._lock:
            return {
                key: [rank for rank in self.workers[total.added :] if rank not in total.waiting]
                for key, total in self._sums.items()
                if total.waiting or total.added
            }

    def _add(self, total: _Sum, clock: int, rank: int, values: Array) -> Array | None:
        with self._lock:
            self._accept(total, clock, rank, values)
            ready = total.take_ready(self.workers)
        while ready:
            self._add_up(total, ready)
            with self._lock:
                total.is_busy = False
                finished = total.take_finished(len(self.workers))
                ready = total.take_ready(self.workers)
            if finished is not None:
                return self._finish(finished, total.format)
        return None

    def _accept(self, total: _Sum, clock: int, rank: int, values: Array) -> None:
        if rank not in self.workers:
            raise ServerError(f"rank {rank} sent {total}, but the workers are {list(self.workers)}")
        if values.shape != (total.chunk.length,) or values.dtype != total.format.stored:
            raise ServerError(
                f"rank {rank} sent {values.size} values of {values.dtype} for {total}; "
                f"expected {total.chunk.length} of {total.format.stored}"
            )
        total.open(clock, rank)
        if rank in total.waiting or rank in self.workers[: total.added]:
            raise refuse_second(total, rank, clock)
        total.waiting[rank] = values

    def _find(self, unit: int, chunk: int, rank: int) -> _Sum:
        total = self._sums.get((unit, chunk))
        if total is None:
            raise ServerError(f"rank {rank} sent chunk {chunk} of unit {unit}, which this shard does not own")
        return total

    def _add_up(self, total: _Sum, ready: list[Array]) -> None:
        """Add ``ready`` to the sum, in order. Called by the one thread that took them, without the lock."""
        values = [total.format.widen(one) for one in ready]
        if total.target is None:
            total.target = self._make(total)
        else:
            values.insert(0, total.target)
        _sum_pieces(values, total.target)

    def _make(self, total: _Sum) -> Array:
        dtype = total.format.summed
        with self._lock:
            spare = self._spare.get((total.chunk.length, dtype.str))
            if spare:
                return spare.pop()
        return np.empty(total.chunk.length, dtype)

    def _finish(self, target: Array, number_format: Format) -> Array:
        if self._mean:
            np.divide(target, target.dtype.type(len(self.workers)), out=target)
        result = number_format.narrow(target)
        if result is not target:
            self.release(target)
        return result


class _Sum:
    """One chunk's sum under way."""

    def __init__(self, chunk: Chunk, number_format: Format) -> None:
        self.chunk = chunk
        self.format = number_format
        self.clock = -1
        """The clock being summed, or summed last."""
        self.waiting: dict[int, Array] = {}
        """Contributions whose turn has not come."""
        self.added = 0
        """How many workers, in order, are in the sum."""
        self.target: Array | None = None
        """The sum of those."""
        self.is_busy = False

    def open(self, clock: int, rank: int) -> None:
        """Check that ``clock`` is the one under way, or begin it if none is."""
        check_clock(self, rank, clock, self.clock, is_open=bool(self.waiting or self.added))
        self.clock = clock

    def take_ready(self, order: Sequence[int]) -> list[Array]:
        """Take the contributions whose turn it is and claim the sum; nothing while another thread works on it."""
        fewest = min(FEWEST_ADDED, len(order) - self.added)
        if self.is_busy or len(self.waiting) < fewest:
            return []
        turns = list(itertools.takewhile(self.waiting.__contains__, order[self.added :]))
        if len(turns) < fewest:
            return []
        self.added += len(turns)
        self.is_busy = bool(turns)
        return [self.waiting.pop(rank) for rank in turns]

    def take_finished(self, workers: int) -> Array | None:
        """Take the sum if all ``workers`` are in it, and get ready for the next clock."""
        if self.added < workers:
            return None
        finished = self.target
        self.added = 0
        self.target = None
        return finished

    def __str__(self) -> str:
        return f"chunk {self.chunk.index} of unit {self.chunk.unit}"


def _sum_pieces(values: Sequence[Array], target: Array) -> None:
    """Write the sum of ``values``, added from left to right, to ``target``, which may be the first of them."""
    first, *others = values
    if not others:
        np.copyto(target, first)
        return
    step = max(1, PIECE_BYTES // target.itemsize)
    # Infinite and missing values are the caller's to find (loss scaling looks for them), so they make no noise here.
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, target.size, step):
            piece = slice(start, start + step)
            into = target[piece]
            np.add(first[piece], others[0][piece], out=into)
            for one in others[1:]:
                np.add(into, one[piece], out=into)
