"""LMDB databases."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from poseidon.caffe.extras import require
from poseidon.errors import ConfigError

_FIRST_MAP_BYTES = 1 << 20
_TRANSACTION_BYTES = 16 << 20


class _Environment:
    """An opened database. LMDB may be opened once per process only, so all readers share it."""

    def __init__(self, path: str, file: Path) -> None:
        lmdb = require("lmdb")
        is_folder = Path(path).is_dir()
        try:
            # Without locking nothing is written, so databases on read-only file systems work.
            self.handle = lmdb.open(path, subdir=is_folder, readonly=True, lock=False, create=False)
        except lmdb.Error as error:
            if "already open" in str(error):
                raise ConfigError(
                    f"{path}: this program has already opened the database with the lmdb package; "
                    "close it (environment.close()) before a net or tool reads it"
                ) from None
            raise ConfigError(f"{path}: cannot be opened as LMDB ({error}); truncated, damaged or not LMDB") from None
        self._check_size(path, file)

    def _check_size(self, path: str, file: Path) -> None:
        # Reading a page beyond the end of the file would kill the process with a bus error.
        needed = (self.handle.info()["last_pgno"] + 1) * self.handle.stat()["psize"]
        size = file.stat().st_size
        if size < needed:
            self.handle.close()
            raise ConfigError(f"{path}: truncated LMDB database: {file.name} has {size} bytes and should have {needed}")


_open: weakref.WeakValueDictionary[tuple[int, int], _Environment] = weakref.WeakValueDictionary()
"""By device and inode, so that a database recreated under an old name is not mistaken for the old one."""


class LMDB:
    """A database opened for reading."""

    def __init__(self, path: str) -> None:
        self.path = path
        file = Path(path) / "data.mdb" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise ConfigError(f"{path}: no LMDB database (there is no such folder, or it holds no data.mdb)")
        status = file.stat()
        environment = _open.get((status.st_dev, status.st_ino))
        if environment is None:
            environment = _open[status.st_dev, status.st_ino] = _Environment(path, file)
        self._environment = environment

    def records(self) -> Iterator[tuple[bytes, memoryview]]:
        """Yield keys and values, sorted by key; a value is valid until the next one is requested."""
        lmdb = require("lmdb")
        try:
            with self._environment.handle.begin(buffers=True) as transaction:
                for key, value in transaction.cursor():
                    yield bytes(key), value
        except lmdb.Error as error:
            raise ConfigError(f"{self.path}: damaged LMDB database: {error}") from None


class LMDBWriter:
    """Fills an existing, empty folder with a database."""

    def __init__(self, folder: Path) -> None:
        self._lmdb: Any = require("lmdb")
        self._map_bytes = _FIRST_MAP_BYTES
        self._folder = folder
        self._environment = self._lmdb.open(str(folder), map_size=self._map_bytes, lock=False)
        self._pending: dict[bytes, bytes] = {}
        self._pending_bytes = 0

    def put(self, key: bytes, value: bytes) -> None:
        """Add a record; a later one with the same key replaces it."""
        self._pending[key] = value
        self._pending_bytes += len(key) + len(value)
        if self._pending_bytes >= _TRANSACTION_BYTES:
            self._commit()

    def finish(self) -> None:
        """Write what is pending and close the database."""
        self._commit()
        self._environment.sync(True)
        self._environment.close()

    def _commit(self) -> None:
        while True:
            try:
                with self._environment.begin(write=True) as transaction:
                    for key, value in self._pending.items():
                        transaction.put(key, value)
                break
            except self._lmdb.MapFullError:
                self._map_bytes *= 2
                self._environment.set_mapsize(self._map_bytes)
            except self._lmdb.Error as error:
                raise ConfigError(f"cannot write LMDB database in {self._folder.parent}: {error}") from error
        self._pending = {}
        self._pending_bytes = 0
