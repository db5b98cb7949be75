"""Gives a place of a table whose server died a new server, with the freshest copies that workers have. Pure.

What no worker's copy holds is lost with the dead server: at most the updates of the last clocks, as many as the
staleness allows a copy to miss, and rows that no live worker ever read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from poseidon.tables.rows import Patch
from poseidon.tables.tables import TableServer, TableSpec


class Adoption:
    """Collects each worker's copies of the place; ``server`` is ready once no worker is awaited."""

    def __init__(self, spec: TableSpec, workers: Sequence[int], gone: Iterable[int], place: int, places: int) -> None:
        self.server = TableServer(spec, workers, place, places)
        self.awaited = set(workers) - set(gone)
        for worker in gone:
            self.server.clocks.lose(worker)
        self._freshest = np.full(spec.rows, -1, np.int64)

    def offer(self, fresh: int, patch: Patch) -> None:
        """Take copies that hold all updates up to clock ``fresh``; of two copies keep the fresher one."""
        better = np.flatnonzero(self._freshest[patch.rows] < fresh)
        self._freshest[patch.rows[better]] = fresh
        self.server.rows.put(patch.select(better))

    def report(self, worker: int, clock: int) -> None:
        """Note that ``worker`` is at ``clock`` and has offered all its copies."""
        self.server.clocks.start_at(worker, clock)
        self.awaited.discard(worker)

    def lose(self, worker: int) -> None:
        """Stop waiting for ``worker``."""
        self.server.clocks.lose(worker)
        self.awaited.discard(worker)


def successor(servers: Sequence[int], lost: Iterable[int], place: int) -> int | None:
    """Return the rank that holds ``place`` without the ``lost`` ranks: the next live server, or None."""
    gone = set(lost)
    ring = [*servers[place:], *servers[:place]]
    return next((rank for rank in ring if rank not in gone), None)
