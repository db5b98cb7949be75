"""Tables of shared rows, for programs other than neural nets too: ``get``, ``inc``, ``clock``.

::

    with poseidon.ps.connect() as job:
        table = job.table("weights", rows=10, width=64, consistency="ssp", staleness=2)
        for step in range(100):
            weights = table.get(range(10))
            table.inc(range(10), -0.1 * gradient(weights))
            table.clock()

Run it with ``torchrun`` or ``poseidon run`` on several workers, or alone. See ``docs/parameter-server.md``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from poseidon.errors import ConfigError, UnsupportedError
from poseidon.job.closing import Stage, at_exit
from poseidon.job.elastic import this_job
from poseidon.job.limits import time_limit
from poseidon.tables import snapshot
from poseidon.tables.node import Node
from poseidon.tables.rows import Index, Patch, combine, combine_columns, sparse_patch
from poseidon.tables.tables import TableSpec
from poseidon.wire.formats import Array
from poseidon.wire.settings import WireSettings
from poseidon.wire.transport import Transport

__all__ = ["SparseRow", "Table", "TableJob", "connect"]


class SparseRow(NamedTuple):
    """The touched columns of a row, ascending, and their values; all other columns are zero."""

    columns: Index
    values: Array


def connect(
    *,
    servers: Sequence[int] | None = None,
    timeout_s: float | None = None,
    settings: WireSettings | None = None,
    transport: Transport | None = None,
) -> TableJob:
    """Join the other workers of the job and return it. Collective. Use it in a ``with`` statement.

    The job is the one :func:`poseidon.init` finds; a process that no launcher started works alone. Rows live on all
    workers, or on the ranks in ``servers``, which then are not workers. A read that has waited for ``timeout_s``
    (default: ``POSEIDON_TIMEOUT``) gives up the workers it waits for, unless they work on something else. ``settings``
    choose the network interface, a bandwidth cap, encryption.

    A ``transport`` must not be connected yet, or not be used for tables before all ranks have called this.
    """
    timeout_s = time_limit(timeout_s)
    if this_job() is not None:
        raise UnsupportedError(
            "tables in an elastic job (--nodes, --nproc MIN:MAX): their rows are lost with the worker that has them; "
            "start the job with a fixed number of workers, and save tables with Table.snapshot"
        )
    if transport is not None:
        return TableJob(Node(transport, servers=servers, timeout_s=timeout_s))
    if _job_size() == 1:
        return TableJob(Node(None, timeout_s=timeout_s))
    return _connect_team(servers, timeout_s, settings)


def _job_size() -> int:
    import torch.distributed as dist

    from poseidon.job.world import init

    return dist.get_world_size() if dist.is_initialized() else init().size


def _connect_team(servers: Sequence[int] | None, timeout_s: float, settings: WireSettings | None) -> TableJob:
    from poseidon.team.team import Team
    from poseidon.team.wiring import connect_wire

    team = Team(None, timeout_s)
    try:
        transport = connect_wire(team, range(team.size), settings, route="tables")
        node = Node(
            transport,
            servers=servers,
            timeout_s=timeout_s,
            is_busy=team.watch.is_busy,
            look=team.watch.look,
            is_started=False,
        )
        # The team's heartbeats last as long as the tables.
        job = TableJob(node, transport, team.close)
    except BaseException as error:
        team.close(error)
        raise
    try:
        # No rank may send before all listen.
        team.gather_ints([0], "the start of the tables")
        node.start()
        # Tables exchange nothing over the team's other connections, so nobody else would report their end.
        team.watch.listen_lost(node.lose_other_connection)
    except BaseException:
        job.__exit__(*sys.exc_info())
        raise
    return job


class TableJob:
    """The tables of a job, as seen by one of its ranks; made by :func:`connect`.

    Leaving the ``with`` block waits until all workers are done, since others may still need the rows held here; leaving
    it by an exception reports this worker as lost to the others at once. A rank that is only a server has nothing to do
    in the block: it serves until all workers have left theirs. A job that is never closed is closed the same way when
    the process exits.
    """

    def __init__(
        self, node: Node, transport: Transport | None = None, close: Callable[[], None] = lambda: None
    ) -> None:
        self._node = node
        self._transport = transport
        self._close_team = close
        self._is_closed = False
        self.tables: dict[str, Table] = {}
        self._cancel_exit = at_exit(Stage.TABLES, self._close_at_exit)
        _open_jobs.append(self)

    @property
    def rank(self) -> int:
        """Rank of this process in the job."""
        return self._node.rank

    @property
    def workers(self) -> list[int]:
        """Ranks that use the tables."""
        return self._node.workers

    @property
    def servers(self) -> list[int]:
        """Ranks that hold the rows."""
        return self._node.servers

    @property
    def is_worker(self) -> bool:
        """Whether this rank uses the tables."""
        return self._node.is_worker

    @property
    def losses(self) -> dict[int, int]:
        """Workers that died, each with the last clock known here."""
        return dict(self._node.losses)

    def table(self, name: str, rows: int, width: int, dtype: str = "float32", **options: Any) -> Table:
        """Open a table, with the same arguments on all workers; the options are those of :class:`Table`."""
        return Table(name, rows, width, dtype, job=self, **options)

    def clock(self) -> None:
        """Finish a step in all tables."""
        for table in self.tables.values():
            table.clock()

    def close(self) -> None:
        """Finish, serve until all workers have finished, and disconnect. Further calls do nothing."""
        if not self._is_closed:
            try:
                self._node.leave()
            finally:
                self._disconnect()

    def __enter__(self) -> TableJob:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.close()
        elif not self._is_closed:
            self._node.abandon()
            self._disconnect()

    def _close_at_exit(self) -> None:
        # An uncaught exception is kept there, and means what it means in a ``with`` block.
        error = getattr(sys, "last_value", None)
        self.__exit__(None if error is None else type(error), error, None)

    def _disconnect(self) -> None:
        self._is_closed = True
        self._cancel_exit()
        _open_jobs.remove(self)
        if self._transport is not None:
            self._transport.close()
        self._close_team()


_open_jobs: list[TableJob] = []
"""Jobs of this process that are open, the latest last."""


class Table:
    """Rows that all workers read and add to.

    ``consistency`` bounds what a read may miss: under ``"bsp"`` it holds exactly all workers' updates of the finished
    clocks, bit-identical on all workers; under ``"ssp"`` at least all but the last ``staleness`` clocks, and no worker
    gets further ahead of the slowest than that; under ``"asp"`` no worker waits. Every read holds the worker's own
    updates. ``sparse`` rows store only the columns that were touched. ``eager`` servers push changed rows to workers
    that have read them before. ``managed`` lets idle bandwidth carry updates early, the largest relative change first.
    """

    def __init__(
        self,
        name: str,
        rows: int,
        width: int,
        dtype: str = "float32",
        *,
        consistency: str = "bsp",
        staleness: int = 0,
        sparse: bool = False,
        eager: bool = True,
        managed: bool = False,
        job: TableJob | None = None,
    ) -> None:
        job = job or _current_job()
        if not job.is_worker:
            raise ConfigError(f"rank {job.rank} is a server and cannot open tables; it serves until the job is closed")
        self.spec = TableSpec(name, rows, width, dtype, consistency, staleness, sparse, eager, managed)
        self._worker = job._node.worker
        self._is_first = job.rank == job.workers[0]
        self._cache = self._worker.open(self.spec)
        job.tables[name] = self

    @property
    def now(self) -> int:
        """Clock of this worker: the number of steps it has finished."""
        return self._cache.clock

    @property
    def staleness_seen(self) -> Counter[int]:
        """Number of rows read, by how many clocks they were behind this worker."""
        return self._cache.staleness_seen

    def get(self, rows: int | npt.ArrayLike) -> Any:
        """Return a copy of one row (a vector) or several (a matrix); for sparse tables a :class:`SparseRow` each.

        Waits until the rows are as fresh as the consistency demands.
        """
        numbers = self._numbers(rows)
        unique, inverse = np.unique(numbers, return_inverse=True)
        patch = self._worker.get(self._cache, unique)
        if patch.columns is not None and patch.starts is not None:
            parts = [slice(patch.starts[place], patch.starts[place + 1]) for place in inverse]
            found = [SparseRow(patch.columns[part], patch.values[part]) for part in parts]
            return found[0] if np.ndim(rows) == 0 else found
        values = patch.values if np.array_equal(unique, numbers) else patch.values[inverse]
        return values[0] if np.ndim(rows) == 0 else values

    def inc(self, rows: int | npt.ArrayLike, deltas: Any, columns: npt.ArrayLike | None = None) -> None:
        """Add ``deltas`` to one row or several; visible here at once, to others after the next :meth:`clock`.

        For a sparse table pass one row with the ``columns`` of its deltas, or several with a :class:`SparseRow` each.
        """
        numbers = self._numbers(rows)
        if self.spec.sparse:
            contents = deltas if columns is None else [SparseRow(np.asarray(columns), np.asarray(deltas))]
            self._worker.inc(self._cache, self._sparse_changes(numbers, contents))
            return
        values = np.asarray(deltas, self.spec.dtype)
        expected = (self.spec.width,) if np.ndim(rows) == 0 else (len(numbers), self.spec.width)
        if columns is not None or values.shape != expected:
            raise ConfigError(
                f"table {self.spec.name!r}: changes of shape {values.shape}"
                f"{' with columns' if columns is not None else ''} for {len(numbers)} rows of width {self.spec.width}; "
                f"expected {expected}"
            )
        self._worker.inc(self._cache, combine(numbers, values.reshape(-1, self.spec.width)))

    def clock(self) -> int:
        """Finish a step: send all changes and return the new clock. Does not block; the next :meth:`get` may."""
        return self._worker.clock(self._cache)

    def limit(self, staleness: int) -> None:
        """Let this worker's reads miss at most so many clocks from now on; at most the table's own ``staleness``.

        For an eager ssp table. Workers may choose differently: each waits by its own limit.
        """
        self._worker.limit(self._cache, staleness)

    def start_from(self, values: npt.ArrayLike) -> None:
        """Start with these rows (dense tables only). All workers must call it before anything else.

        The rows of the first worker count.
        """
        array = np.asarray(values, self.spec.dtype)
        if self.spec.sparse or array.shape != (self.spec.rows, self.spec.width):
            raise ConfigError(
                f"table {self.spec.name!r} ({'sparse' if self.spec.sparse else 'dense'}) of {self.spec.rows} rows and "
                f"width {self.spec.width} cannot start from an array of shape {array.shape}"
            )
        patch = Patch(np.arange(self.spec.rows), array)
        self._worker.start_from(self._cache, patch if self._is_first else None)

    def snapshot(self, path: str | Path) -> None:
        """Write the servers' rows to a file, atomically. One worker is enough; the others may go on.

        Under BSP the file holds exactly the clocks that all workers have finished.
        """
        clock, patches = self._worker.save(self._cache)
        snapshot.save(Path(path), self.spec, clock, patches)

    def restore(self, path: str | Path) -> int:
        """Start with the rows in a file and return the clock they were saved at. Called as :meth:`start_from`.

        The number of workers and servers may differ from when the file was saved.
        """
        clock, patches = snapshot.load(Path(path), self.spec)
        whole = self.spec.make_rows()
        for patch in patches:
            whole.put(patch)
        self._worker.start_from(self._cache, whole.take(whole.touched()) if self._is_first else None)
        return clock

    def _numbers(self, rows: int | npt.ArrayLike) -> Index:
        numbers = np.atleast_1d(np.asarray(rows))
        if numbers.size == 0:
            return np.empty(0, np.int64)
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
            raise ConfigError(f"table {self.spec.name!r}: rows are {rows!r}; expected whole numbers")
        if numbers.min() < 0 or numbers.max() >= self.spec.rows:
            wrong = numbers[(numbers < 0) | (numbers >= self.spec.rows)][0]
            raise ConfigError(
                f"table {self.spec.name!r} has rows 0 to {self.spec.rows - 1}; row {wrong} does not exist"
            )
        return numbers.astype(np.int64)

    def _sparse_changes(self, numbers: Index, contents: Sequence[SparseRow]) -> Patch:
        if len(contents) != len(numbers) or len(np.unique(numbers)) != len(numbers):
            raise ConfigError(
                f"table {self.spec.name!r}: changes to {len(contents)} rows for rows {numbers.tolist()}; "
                "pass one SparseRow per row, and each row once"
            )
        merged = []
        for columns, values in contents:
            columns = np.asarray(columns, np.int64)
            if len(columns) != len(values) or (
                len(columns) and not 0 <= columns.min() <= columns.max() < self.spec.width
            ):
                raise ConfigError(
                    f"table {self.spec.name!r}: {len(values)} values for columns {columns[:5]}...; "
                    f"columns are 0 to {self.spec.width - 1}"
                )
            merged.append(combine_columns(columns, np.asarray(values, self.spec.dtype)))
        return sparse_patch(numbers, merged, np.empty(0, self.spec.dtype))


def _current_job() -> TableJob:
    if not _open_jobs:
        raise ConfigError("no job is open: make tables inside `with poseidon.ps.connect() as job:`")
    return _open_jobs[-1]
