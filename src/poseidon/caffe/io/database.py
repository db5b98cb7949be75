"""Databases of records, by backend: how layers and tools open and create them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from poseidon.caffe.io.leveldb import LevelDB, LevelDBWriter
from poseidon.caffe.io.lmdb import LMDB, LMDBWriter
from poseidon.caffe.schema.messages import DataParameter
from poseidon.errors import ConfigError, unknown_name
from poseidon.files import replacing_folder

log = logging.getLogger("poseidon.caffe")


class Database(Protocol):
    """Records sorted by key, opened for reading."""

    path: str

    def records(self) -> Iterator[tuple[bytes, bytes | memoryview]]:
        """Yield keys and values; a value is valid until the next one is requested. Each call starts from the first."""
        ...


class Writer(Protocol):
    """A database being written."""

    def put(self, key: bytes, value: bytes) -> None:
        """Add a record; a later one with the same key replaces it."""
        ...


_READERS: dict[str, Callable[[str], Database]] = {"lmdb": LMDB, "leveldb": LevelDB}
_WRITERS: dict[str, Callable[[Path], LMDBWriter | LevelDBWriter]] = {"lmdb": LMDBWriter, "leveldb": LevelDBWriter}
_MARKERS = {"lmdb": "data.mdb", "leveldb": "CURRENT"}
BACKENDS = tuple(_READERS)


def open_database(backend: str, path: str) -> Database:
    """Open an existing database of backend "lmdb" or "leveldb"."""
    found = kind_of(path)
    if found is not None and found != checked_backend(backend):
        raise ConfigError(f"{path}: is a database of backend {found}, but {backend} was requested")
    database = _READERS[checked_backend(backend)](path)
    log.info("Opened %s %s", backend, path)
    return database


def kind_of(path: str) -> str | None:
    """Return the backend whose files a folder holds, if any."""
    for backend, marker in _MARKERS.items():
        if (Path(path) / marker).is_file():
            return backend
    return None


def backend_name(number: int) -> str:
    """Return the name of a DataParameter's ``backend``."""
    return str(DataParameter.DB.Name(number)).lower()


@contextlib.contextmanager
def new_database(backend: str, path: str) -> Iterator[Writer]:
    """Create a database that appears under ``path``, complete, when the block ends without error."""
    make = _WRITERS[checked_backend(backend)]
    if Path(path).exists():
        raise ConfigError(f"{path} exists already; remove it first or choose another name for the new database")
    with replacing_folder(path, "database") as temporary:
        writer = make(temporary)
        log.info("Opened %s %s", backend, path)
        yield writer
        writer.finish()


def checked_backend(backend: str) -> str:
    """Return a known backend's name, or raise an error that lists them."""
    if backend not in _READERS:
        raise unknown_name("database backend", backend, BACKENDS)
    return backend
