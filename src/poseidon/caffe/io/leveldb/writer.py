"""Write a new LevelDB database: sorted, uncompressed tables and an empty log."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from poseidon.caffe.io.leveldb.coding import VALUE, InternalKey
from poseidon.caffe.io.leveldb.table import write_table
from poseidon.caffe.io.leveldb.version import LAST_LEVEL, TableFile, Version, write_version

_MANIFEST_NUMBER = 2
_LOG_NUMBER = 3
_TABLE_BYTES = 32 << 20


class LevelDBWriter:
    """Fills an existing, empty folder; ``finish`` makes it a database."""

    def __init__(self, folder: Path, table_bytes: int = _TABLE_BYTES) -> None:
        self._folder = folder
        self._table_bytes = table_bytes
        self._pending: dict[bytes, tuple[int, bytes]] = {}
        self._pending_bytes = 0
        self._sequence = 0
        self._tables: list[TableFile] = []

    def put(self, key: bytes, value: bytes) -> None:
        """Add a record; a later one with the same key replaces it."""
        self._sequence += 1
        self._pending[key] = (self._sequence, value)
        self._pending_bytes += len(key) + len(value)
        if self._pending_bytes >= self._table_bytes:
            self._flush()

    def finish(self) -> None:
        """Write what is pending, then the files that make the folder a database."""
        if self._pending:
            self._flush()
        # Only level 0 may hold overlapping tables. LevelDB does not compact the last level.
        level = 0 if self._has_overlap() else LAST_LEVEL
        version = Version(
            tables={(level, table.number): table for table in self._tables},
            log_number=_LOG_NUMBER,
            next_file_number=_LOG_NUMBER + 1 + len(self._tables),
            last_sequence=self._sequence,
        )
        (self._folder / f"{_LOG_NUMBER:06d}.log").write_bytes(b"")
        write_version(self._folder, version, _MANIFEST_NUMBER)

    def _flush(self) -> None:
        number = _LOG_NUMBER + 1 + len(self._tables)
        entries = [
            (InternalKey(key, sequence, VALUE), value) for key, (sequence, value) in sorted(self._pending.items())
        ]
        size = write_table(self._folder / f"{number:06d}.ldb", entries)
        self._tables.append(TableFile(number, size, entries[0][0], entries[-1][0]))
        self._pending = {}
        self._pending_bytes = 0

    def _has_overlap(self) -> bool:
        ordered = sorted(self._tables, key=lambda table: table.smallest.user)
        return any(a.largest.user >= b.smallest.user for a, b in pairwise(ordered))
