"""Read a LevelDB database in key order."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from poseidon.caffe.io.leveldb.coding import DELETION, VALUE, InternalKey, read_string
from poseidon.caffe.io.leveldb.log import read_log
from poseidon.caffe.io.leveldb.table import BlockCache, Entry, SSTable
from poseidon.caffe.io.leveldb.version import LAST_LEVEL, TableFile, read_version
from poseidon.errors import ConfigError

_CACHE_BYTES = 256 << 20


class LevelDB:
    """A database opened for reading; later writes are not seen."""

    can_seek = False

    def __init__(self, path: str) -> None:
        self.path = path
        self.count: int | None = None
        self._folder = Path(path)
        self._cache = BlockCache(_CACHE_BYTES)
        self._version = read_version(self._folder)
        self._recent = self._read_logs()

    def records(self, start: int = 0) -> Iterator[tuple[bytes, bytes]]:
        """Yield keys and values, sorted by key, from record ``start`` on; those before it are read as well."""
        runs: list[Iterable[Entry]] = [self._recent]
        runs += [self._table(table).entries() for table in self._version.level(0)]
        runs += [self._level_entries(self._version.level(level)) for level in range(1, LAST_LEVEL + 1)]
        last: bytes | None = None
        count = 0
        for key, value in heapq.merge(*runs, key=_order):
            if key.user != last:
                last = key.user
                if key.kind == VALUE:
                    count += 1
                    if count > start:
                        yield key.user, value
        self.count = count

    def _level_entries(self, tables: list[TableFile]) -> Iterator[Entry]:
        # Tables of one level do not overlap, so only the current one needs to be open.
        return chain.from_iterable(self._table(table).entries() for table in tables)

    def _table(self, table: TableFile) -> SSTable:
        for suffix in ("ldb", "sst"):
            path = self._folder / f"{table.number:06d}.{suffix}"
            if path.is_file():
                return SSTable(path, self._cache)
        raise ConfigError(f"{self.path}: damaged LevelDB: table {table.number:06d}.ldb is missing")

    def _read_logs(self) -> list[Entry]:
        entries: list[Entry] = []
        logs = [path for path in self._folder.glob("*.log") if path.stem.isascii() and path.stem.isdecimal()]
        for number, path in sorted((int(path.stem), path) for path in logs):
            if number >= self._version.log_number or number == self._version.previous_log_number:
                for record in read_log(path):
                    entries += _batch_entries(record, path)
        return sorted(entries, key=_order)


def _order(entry: Entry) -> tuple[bytes, int]:
    return entry[0].user, -entry[0].sequence


def _batch_entries(record: bytes, path: Path) -> Iterator[Entry]:
    """Yield the entries of one write batch."""
    try:
        if len(record) < 12:
            raise ValueError(f"it has {len(record)} bytes, fewer than its header")
        sequence, count = int.from_bytes(record[:8], "little"), int.from_bytes(record[8:12], "little")
        position = 12
        for number in range(sequence, sequence + count):
            kind = record[position]
            key, position = read_string(record, position + 1)
            value = b""
            if kind == VALUE:
                value, position = read_string(record, position)
            elif kind != DELETION:
                raise ValueError(f"unknown kind {kind}")
            yield InternalKey(key, number, kind), value
    except (ValueError, IndexError) as error:
        raise ConfigError(f"{path}: damaged LevelDB log: cannot parse a batch: {error}") from None
