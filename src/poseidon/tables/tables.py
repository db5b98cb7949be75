"""The server's side of a table: its rows, and who may read them when. Pure: messages in, replies out.

A table's rows are distributed over *places* 0..n-1, row ``r`` to place ``r % n``, and one server holds each place.
Messages between a worker and a place must arrive in the order they were sent.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from poseidon.errors import ConfigError, ServerError, unknown_name
from poseidon.planning.numbers import count_from
from poseidon.tables.clocks import Clocks, Consistency
from poseidon.tables.importance import most_changed
from poseidon.tables.rows import DenseRows, Index, Patch, RowStore, SparseRows
from poseidon.wire.formats import Array

DTYPES = ("float32", "float64", "int32", "int64")


@dataclass(frozen=True)
class TableSpec:
    """What all workers and servers must agree on for a table."""

    name: str
    rows: int
    width: int
    dtype: str = "float32"
    consistency: str = "bsp"
    staleness: int = 0
    sparse: bool = False
    """Rows store only the columns that were touched."""
    eager: bool = True
    """Servers push changed rows to the workers that hold them (SSPPush)."""
    managed: bool = False
    """Idle bandwidth carries changes early, the largest relative change first."""

    def __post_init__(self) -> None:
        rows, width = count_from(1, self.rows), count_from(1, self.width)
        if rows is None or width is None:
            raise ConfigError(
                f"table {self.name!r} has {self.rows!r} rows of width {self.width!r}; both must be whole numbers of at "
                "least 1"
            )
        if self.dtype not in DTYPES:
            raise unknown_name(f"dtype for table {self.name!r}:", self.dtype, DTYPES)
        # Python's own, as all workers hear of them.
        for name, number in (("rows", rows), ("width", width), ("staleness", self.model.staleness)):
            object.__setattr__(self, name, number)

    @property
    def model(self) -> Consistency:
        """The consistency as an object."""
        return Consistency(self.consistency, self.staleness)

    @property
    def ident(self) -> int:
        """The number that represents the name on the wire."""
        return zlib.crc32(self.name.encode())

    def make_rows(self, stride: int = 1, offset: int = 0) -> RowStore:
        """Return zeroed storage for the rows (with ``stride``, for the rows of one place)."""
        if self.sparse:
            return SparseRows(self.dtype)
        return DenseRows(self.rows, self.width, self.dtype, stride, offset)

    def to_json(self) -> bytes:
        """Return it as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> TableSpec:
        """Read what :meth:`to_json` wrote."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError, RecursionError) as error:
            raise ServerError(f"{len(data)} bytes do not describe a table: {error}") from None


@dataclass(frozen=True, slots=True)
class Reply:
    """Rows for one worker."""

    worker: int
    patch: Patch
    fresh: int
    """The rows hold all updates of every worker up to this clock."""
    included: int
    """How many of the receiver's own updates the rows include."""
    is_push: bool = False
    """All rows of this place that the worker holds, not only those in the patch, are now fresh up to ``fresh``."""


class TableServer:
    """One place of a table.

    Under BSP, updates wait until the slowest clock passes theirs and are then added in the order of workers: reads at
    one clock are bit-identical on all workers. Otherwise updates are added when they arrive, and reads may see more
    than guaranteed. Not thread-safe.
    """

    def __init__(self, spec: TableSpec, workers: Sequence[int], place: int = 0, places: int = 1) -> None:
        self.spec = spec
        self.rows = spec.make_rows(places, place)
        self.clocks = Clocks(sorted(workers), spec.model.bound)
        self._place = place
        self._places = places
        self._held: dict[int, list[tuple[int, Patch]]] = {worker: [] for worker in sorted(workers)}
        """BSP: updates with their clocks that are not in the rows yet."""
        self._received = dict.fromkeys(workers, 0)
        self._applied = dict.fromkeys(workers, 0)
        self._waiting: list[tuple[int, int, Index]] = []
        self._holds: dict[int, Array] = {}
        """By worker: mask of the rows it was sent, by row // places."""
        self._changes: dict[int, Array] = {}
        """By worker: how much each of those rows changed since it was last sent."""

    def inc(self, worker: int, patch: Patch) -> None:
        """Take an update that ``worker`` made at its present clock."""
        self._check_rows(worker, patch.rows)
        self.clocks.check_present(worker)
        self._received[worker] += 1
        if self.spec.consistency == "bsp":
            self._held[worker].append((self.clocks.clock_of(worker), patch))
        else:
            self._apply(worker, patch)

    def get(self, worker: int, clock: int, rows: Index) -> list[Reply]:
        """Answer a read now or, if the slowest clock does not permit it yet, in the replies of a later call."""
        self._check_rows(worker, rows)
        if not self.clocks.may_read(worker, clock):
            self._waiting.append((worker, clock, rows))
            return []
        return [self._answer(worker, rows)]

    def clock(self, worker: int, clock: int) -> list[Reply]:
        """Note that ``worker`` finished a step and reached ``clock``; return the replies due now."""
        if self.clocks.advance(worker, clock):
            return self._advance()
        if self.spec.consistency == "asp" and self.spec.eager:
            return self._push([worker])
        return []

    def leave(self, worker: int) -> list[Reply]:
        """Note that ``worker`` is done and blocks no other."""
        return self._without(worker, self.clocks.leave(worker))

    def lose(self, worker: int) -> list[Reply]:
        """Note that ``worker`` died; its earlier updates count."""
        return self._without(worker, self.clocks.lose(worker))

    def early(self, worker: int, limit_bytes: int) -> Reply | None:
        """Return rows to send to ``worker`` before they are due, about ``limit_bytes``, or None.

        Under BSP always None: a read must not see part of a step.
        """
        changes = self._changes.get(worker)
        if changes is None or self.spec.consistency == "bsp":
            return None
        changed = self._row_numbers(np.flatnonzero(changes))
        if not len(changed):
            return None
        per_row = 8 + self.spec.width * np.dtype(self.spec.dtype).itemsize
        sizes = self.rows.take(changed).size_of_rows()
        chosen = most_changed(changes[changed // self._places], sizes, max(1, limit_bytes // per_row))
        return self._answer(worker, np.sort(changed[chosen]))

    def state(self) -> Patch:
        """Return a copy of all rows that may differ from zero, without updates that wait for their clock."""
        return self.rows.take(self.rows.touched())

    def replace(self, patch: Patch) -> None:
        """Store initial rows, such as those of a snapshot; refused once the table is in use."""
        if any(self._received.values()) or self.clocks.slowest or self._holds:
            raise ServerError(
                f"table {self.spec.name!r} is in use at clock {self.clocks.slowest}; "
                "restore it before the first get, inc or clock of any worker"
            )
        self._check_rows(None, patch.rows)
        self.rows.put(patch)

    # Inside.

    def _apply(self, worker: int, patch: Patch) -> None:
        self.rows.add(patch)
        self._applied[worker] += 1
        if not self._changes:
            return
        sizes = patch.size_of_rows()
        places = patch.rows // self._places
        for holder, changes in self._changes.items():
            # A worker's own updates are already in its copy, though added in another order: good enough unless copies
            # must be bit-identical.
            if holder != worker or self.spec.consistency == "bsp":
                changes[places] += np.where(self._holds[holder][places], sizes, 0.0)

    def _advance(self) -> list[Reply]:
        self._apply_held()
        may_read = [w for w in self._waiting if self.clocks.may_read(w[0], w[1])]
        self._waiting = [w for w in self._waiting if not self.clocks.may_read(w[0], w[1])]
        replies = [self._answer(worker, rows) for worker, _, rows in may_read]
        return replies + (self._push(self._holds) if self.spec.eager else [])

    def _apply_held(self) -> None:
        slowest = self.clocks.slowest
        due = [
            (clock, worker, patch) for worker, held in self._held.items() for clock, patch in held if clock < slowest
        ]
        # By clock, then worker, then order of arrival: sorted() is stable.
        for _, worker, patch in sorted(due, key=lambda update: update[:2]):
            self._apply(worker, patch)
        for worker, held in self._held.items():
            self._held[worker] = [update for update in held if update[0] >= slowest]

    def _answer(self, worker: int, rows: Index, is_push: bool = False) -> Reply:
        if self.spec.eager:
            self._note_held(worker, rows)
        return Reply(worker, self.rows.take(rows), self.clocks.slowest, self._applied[worker], is_push)

    def _push(self, workers: Iterable[int]) -> list[Reply]:
        replies = []
        for worker in [worker for worker in workers if worker in self._holds]:
            changed = self._row_numbers(np.flatnonzero(self._changes[worker]))
            replies.append(self._answer(worker, changed, is_push=True))
        return replies

    def _note_held(self, worker: int, rows: Index) -> None:
        if worker not in self._holds:
            count = len(range(self._place, self.spec.rows, self._places))
            self._holds[worker] = np.zeros(count, np.bool_)
            self._changes[worker] = np.zeros(count, np.float64)
        self._holds[worker][rows // self._places] = True
        self._changes[worker][rows // self._places] = 0.0

    def _without(self, worker: int, has_advanced: bool) -> list[Reply]:
        self._waiting = [w for w in self._waiting if w[0] != worker]
        self._holds.pop(worker, None)
        self._changes.pop(worker, None)
        return self._advance() if has_advanced else []

    def _row_numbers(self, places: Index) -> Index:
        numbers: Index = places * self._places + self._place
        return numbers

    def _check_rows(self, worker: int | None, rows: Index) -> None:
        if worker is not None and worker not in self._received:
            raise ServerError(f"rank {worker} is not a worker of table {self.spec.name!r}: {list(self._received)} are")
        is_ours = (rows >= 0) & (rows < self.spec.rows) & (rows % self._places == self._place)
        if not is_ours.all():
            raise ServerError(
                f"rank {worker} named row {rows[~is_ours][0]} of table {self.spec.name!r}, which has {self.spec.rows} "
                f"rows; place {self._place} of {self._places} holds every {self._places}th"
            )
