"""A worker's side of a table: its copy of the rows, its own changes, and what it may read. Pure.

Every change is added to the copy at once, so a worker always reads its own writes. Rows from a server replace the copy,
and the worker's changes that the server had not seen are added again.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque

import numpy as np

from poseidon.errors import ConfigError, ServerError
from poseidon.tables.importance import most_changed
from poseidon.tables.rows import Index, Patch
from poseidon.tables.tables import Reply, TableSpec
from poseidon.wire.formats import Array

NEVER = -1


class TableCache:
    """One worker's copy of a table whose rows are distributed over ``places``. Not thread-safe."""

    def __init__(self, spec: TableSpec, places: int = 1) -> None:
        self.spec = spec
        self.clock = 0
        """Number of steps this worker has finished."""
        self.staleness_seen: Counter[int] = Counter()
        """Number of rows read, by how many clocks they were behind the reader."""
        self._bound = spec.model.bound
        self._places = places
        self._visible = spec.make_rows()
        self._fresh: Index = np.full(spec.rows, NEVER, np.int64)
        """By row: the clock up to which the copy holds all workers' updates."""
        self._arrived: Index = np.full(spec.rows, NEVER, np.int64)
        """By row: the worker's own clock when the copy arrived."""
        self._asked: Array = np.zeros(spec.rows, np.bool_)
        """Rows requested from a server; it answers, or (eager) keeps sending them."""
        self._unsent = spec.make_rows()
        self._dirty: Array = np.zeros(spec.rows, np.bool_)
        """Rows with changes in ``_unsent``."""
        self._sent: list[deque[tuple[int, Patch]]] = [deque() for _ in range(places)]
        """By place: numbered updates that no reply has included yet."""
        self._sent_count = [0] * places

    def limit(self, staleness: int) -> None:
        """Let this worker's reads miss at most so many clocks from now on, up to the table's own bound.

        Servers know the table's bound alone. An eager one sends changed rows whenever the slowest clock advances, so
        rows that are fresh enough always come.
        """
        bound = self.spec.model.bound
        if self.spec.consistency != "ssp" or not self.spec.eager or bound is None or not 0 <= staleness <= bound:
            raise ConfigError(
                f"table {self.spec.name!r} ({self.spec.consistency}, staleness {self.spec.staleness}, "
                f"{'eager' if self.spec.eager else 'not eager'}) cannot be limited to a staleness of {staleness}; "
                "an eager ssp table can, up to its own"
            )
        self._bound = staleness

    @property
    def awaited_clock(self) -> int:
        """The clock at which servers, by the table's own bound, wait for the workers that a read here waits for."""
        return self.clock if self._bound is None else self.clock + (self.spec.model.bound or 0) - self._bound

    def inc(self, patch: Patch) -> None:
        """Add changes; visible here at once, to others some time after the next :meth:`tick`."""
        self._visible.add(patch)
        self._unsent.add(patch)
        self._dirty[patch.rows] = True

    def stale(self, rows: Index) -> Index:
        """Return those of ``rows`` that are too stale to be read at this clock."""
        if self._bound is None and not self.spec.eager:
            # Reads never wait, but a copy is used for one clock only: otherwise it would never be renewed.
            is_stale: Array = self._arrived[rows] < self.clock
        else:
            oldest = 0 if self._bound is None else max(0, self.clock - self._bound)
            is_stale = self._fresh[rows] < oldest
        return np.asarray(rows[is_stale])

    def ask(self, rows: Index) -> list[tuple[int, Index]]:
        """Return the stale rows to request from each place, without those already requested."""
        unasked = rows[~self._asked[rows]]
        self._asked[unasked] = True
        return [(place, mine) for place in range(self._places) if len(mine := unasked[unasked % self._places == place])]

    def read(self, rows: Index) -> Patch:
        """Return a copy of ``rows``, none of them too stale, and count their staleness."""
        behind, counts = np.unique(self.clock - self._fresh[rows], return_counts=True)
        self.staleness_seen.update(dict(zip(behind.tolist(), counts.tolist(), strict=True)))
        return self._visible.take(rows)

    def take_updates(self, limit_bytes: int = 1 << 20) -> list[tuple[int, Patch]]:
        """Take all unsent changes, by place, in pieces of about ``limit_bytes``; each piece is one update."""
        dirty = np.flatnonzero(self._dirty)
        shares = [(place, dirty[dirty % self._places == place]) for place in range(self._places)]
        return [
            (place, self._note_sent(place, piece))
            for place, rows in shares
            if len(rows)
            for piece in self._take(rows).split(limit_bytes)
        ]

    def take_early(self, place: int, limit_bytes: int) -> Patch | None:
        """Take changes for ``place`` to send before they are due, about ``limit_bytes``, if there are any."""
        dirty = np.flatnonzero(self._dirty)
        rows = dirty[dirty % self._places == place]
        if not len(rows):
            return None
        per_row = 8 + self.spec.width * np.dtype(self.spec.dtype).itemsize
        changes = self._unsent.take(rows).size_of_rows()
        sizes = self._visible.take(rows).size_of_rows()
        chosen = most_changed(changes, sizes, max(1, limit_bytes // per_row))
        return self._note_sent(place, self._take(np.sort(rows[chosen]))) if len(chosen) else None

    def tick(self) -> int:
        """Finish a step and return the new clock; its updates must have been taken before."""
        assert not self._dirty.any(), "the updates of a step must be sent before its clock"
        self.clock += 1
        return self.clock

    def receive(self, place: int, reply: Reply) -> None:
        """Copy rows from a server."""
        rows = reply.patch.rows
        if len(rows) and not ((rows >= 0) & (rows < self.spec.rows) & (rows % self._places == place)).all():
            raise ServerError(f"place {place} of table {self.spec.name!r} sent rows it does not hold: {rows[:5]}...")
        sent = self._sent[place]
        while sent and sent[0][0] <= reply.included:
            sent.popleft()
        self._visible.put(reply.patch)
        for _, patch in sent:
            self._visible.add(patch.within(rows))
        self._visible.add(self._unsent.take(rows[self._dirty[rows]]))
        self._fresh[rows] = np.maximum(self._fresh[rows], reply.fresh)
        self._arrived[rows] = self.clock
        if not self.spec.eager:
            self._asked[rows] = False
        if reply.is_push:
            held = self._fresh[place :: self._places]
            np.maximum(held, reply.fresh, out=held, where=held != NEVER)

    def hand_over(self, place: int) -> list[tuple[int, Patch]]:
        """Return the copies of a place whose server died, for a new one, with the clock up to which each is fresh.

        Updates sent to the old server count as delivered; their numbers start again from the beginning.
        """
        mine = self._fresh[place :: self._places]
        numbers = np.arange(place, self.spec.rows, self._places)
        copies = []
        for fresh in np.unique(mine[mine != NEVER]).tolist():
            rows = numbers[mine == fresh]
            known = self.spec.make_rows()
            known.put(self._visible.take(rows))
            unsent = self._unsent.take(rows[self._dirty[rows]])
            known.add(dataclasses.replace(unsent, values=-unsent.values))
            copies.append((fresh, known.take(rows)))
        self._sent[place].clear()
        self._sent_count[place] = 0
        self._asked[place :: self._places] = False
        return copies

    def _take(self, rows: Index) -> Patch:
        patch = self._unsent.take(rows)
        self._unsent.clear(rows)
        self._dirty[rows] = False
        return patch

    def _note_sent(self, place: int, patch: Patch) -> Patch:
        self._sent_count[place] += 1
        self._sent[place].append((self._sent_count[place], patch))
        return patch
