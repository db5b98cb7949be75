"""Whose part of a chunk may come, and whose may be added: the owner's side, whatever the arithmetic. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from poseidon.errors import ServerError
from poseidon.sums.chunks import Chunk
from poseidon.sums.touched import TouchedRows


class PartRoll:
    """Who has brought a part of one owned chunk at which clock; call it under a lock.

    Float addition is not associative, so parts are added in rank order, whatever order they arrive in. A part is first
    expected (before its bytes are read, perhaps over those of the clock before) and then entered. A thread that
    enters one may get parts to add; nobody else gets any until it calls :meth:`settle`, and it never waits.

    Parts are handed out ``together`` at a time, or as many as there still are.
    """

    def __init__(self, chunk: Chunk, workers: int, together: int) -> None:
        self.chunk = chunk
        self.total: Any = None
        """The sum of the parts handed out before; it belongs to the thread that has parts to add."""
        self._workers = workers
        self._together = together
        self._clock = -1
        """The clock being summed, or summed last."""
        self._expected: set[int] = set()
        self._waiting: dict[int, Any] = {}
        """Parts whose turn has not come, by rank."""
        self._taken = 0
        """How many ranks' parts, in order, have been handed out."""
        self._is_busy = False

    @property
    def is_open(self) -> bool:
        """Whether a sum is under way."""
        return bool(self._expected)

    def lacks(self, rank: int) -> bool:
        """Return whether a sum is under way, and a rank's part of it has not come."""
        return self.is_open and rank not in self._expected

    def expect(self, rank: int, clock: int) -> None:
        """Raise ``ServerError`` unless it is the turn of this part."""
        is_open = bool(self._expected)
        if is_open and clock != self._clock:
            raise ServerError(
                f"rank {rank} sent {self.chunk} of clock {clock} while clock {self._clock} is being summed"
            )
        if not is_open and clock <= self._clock:
            raise ServerError(
                f"rank {rank} sent {self.chunk} of clock {clock}, but clock {self._clock} is already finished"
            )
        if rank in self._expected:
            raise ServerError(f"rank {rank} sent {self.chunk} of clock {clock} twice")
        self._clock = clock
        self._expected.add(rank)

    def enter(self, rank: int, part: Any) -> list[Any]:
        """Take an expected part; return the parts that the caller must add now, in order."""
        self._waiting[rank] = part
        return self._take()

    def settle(self) -> tuple[Any, list[Any]]:
        """Note that the parts handed out are in ``total``.

        Return it if it is complete, else None and any further parts that the caller must add now.
        """
        self._is_busy = False
        if self._taken < self._workers:
            return None, self._take()
        total, self.total = self.total, None
        self._taken = 0
        self._expected = set()
        return total, []

    def _take(self) -> list[Any]:
        fewest = min(self._together, self._workers - self._taken)
        if self._is_busy or len(self._waiting) < fewest:
            return []
        stop = self._taken
        while stop in self._waiting:
            stop += 1
        if stop - self._taken < fewest:
            return []
        ready = [self._waiting.pop(rank) for rank in range(self._taken, stop)]
        self._taken = stop
        self._is_busy = True
        return ready


class TouchedRoll:
    """Who has brought touched rows of one owned chunk at which clock; call it under a lock."""

    def __init__(self, chunk: Chunk, workers: int) -> None:
        self._chunk = chunk
        self._workers = workers
        self._clock = -1
        self._rows: dict[int, TouchedRows] = {}

    @property
    def is_open(self) -> bool:
        """Whether some workers' rows are here, but not all."""
        return bool(self._rows)

    def lacks(self, rank: int) -> bool:
        """Return whether other workers' rows are here, but not those of ``rank``."""
        return self.is_open and rank not in self._rows

    def enter(self, rank: int, clock: int, rows: TouchedRows) -> list[TouchedRows]:
        """Take a worker's rows; return all workers', in rank order, if these are the last.

        Raises ``ServerError`` unless it is their turn.
        """
        if rank in self._rows or (clock != self._clock if self._rows else clock <= self._clock):
            raise ServerError(
                f"rank {rank} sent touched rows of {self._chunk} of clock {clock}; "
                f"those of clock {self._clock} are here from ranks {sorted(self._rows) or 'all'}"
            )
        self._clock = clock
        self._rows[rank] = rows
        if len(self._rows) < self._workers:
            return []
        everybody = [self._rows[each] for each in range(self._workers)]
        self._rows = {}
        return everybody


def in_turn(workers: Iterable[int], rank: int, size: int) -> list[int]:
    """Return the workers in the order in which the owner on ``rank`` answers them.

    Each owner starts with a different one: otherwise all would fill the first one's link and leave the rest idle.
    """
    return sorted(workers, key=lambda worker: (worker - rank) % size)
