"""A place of a table whose server died gets a new server, with the freshest copies that workers still have. Pure.

What the dead server had and no worker's copy holds is gone: at most the updates of the last clocks that the staleness
allows a copy to lack, and rows that nobody alive ever read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from poseidon.tables.rows import Patch
from poseidon.tables.tables import TableServer, TableSpec


class Adoption:
    """Collects what each worker knows of the place; ``server`` is ready for use once nobody is awaited."""

    def __init__(self, spec: TableSpec, workers: Sequence[int], gone: Iterable[int], place: int, places: int) -> None:
        self.server = TableServer(spec, workers, place, places)
        self.awaited = set(workers) - set(gone)
        for worker in gone:
            self.server.clocks.lose(worker)
        self._freshest = np.full(spec.rows, -1, np.int64)

    def offer(self, fresh: int, patch: Patch) -> None:
        """Take copies that hold everybody's updates up to clock ``fresh``; of two copies the fresher one stays."""
        better = np.flatnonzero(self._freshest[patch.rows] < fresh)
        self._freshest[patch.rows[better]] = fresh
        self.server.rows.put(patch.select(better))

    def report(self, worker: int, clock: int) -> None:
        """Note that ``worker`` is at ``clock`` and has offered all it has."""
        self.server.clocks.start_at(worker, clock)
        self.awaited.discard(worker)

    def lose(self, worker: int) -> None:
        """Expect nothing from ``worker``."""
        self.server.clocks.lose(worker)
        self.awaited.discard(worker)


def successor(servers: Sequence[int], lost: Iterable[int], place: int) -> int | None:
    """Return the rank that holds ``place`` when ``lost`` ranks are gone: the next server alive, or None."""
    gone = set(lost)
    ring = [*servers[place:], *servers[:place]]
    return next((rank for rank in ring if rank not in gone), None)
