"""Databases of records, by backend: how layers and tools open and create them."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from poseidon.caffe.io.leveldb import LevelDB, LevelDBWriter
from poseidon.caffe.io.lmdb import LMDB, LMDBWriter
from poseidon.caffe.schema.messages import DataParameter
from poseidon.errors import ConfigError, unknown_name
from poseidon.files import cannot, read_json, replacing_folder, write_json

log = logging.getLogger("poseidon.caffe")


Record = tuple[bytes, bytes | memoryview]
"""Key and value."""


class Database(Protocol):
    """Records sorted by key, opened for reading."""

    path: str
    can_seek: bool
    """Whether reading from the middle on costs little."""

    @property
    def count(self) -> int | None:
        """The number of records, if it is known yet; it is after a pass over all of them."""
        ...

    def records(self, start: int = 0) -> Iterator[Record]:
        """Yield the records from number ``start`` on."""
        ...


class EndlessReader:
    """Records of a database by their place in an endless sequence of passes; cheapest in ascending order."""

    def __init__(self, database: Database) -> None:
        self.path = database.path
        self._database = database
        self._records = database.records()
        self._next = 0

    def at(self, position: int) -> Record:
        """Return the record at a place of the sequence."""
        record = self._get(position)
        # Where the database ends is known at the latest when it was read to its end.
        if record is None and self._database.count:
            record = self._get(position)
        if record is None:
            raise ConfigError(f"{self.path}: the database is empty")
        return record

    def _get(self, position: int) -> Record | None:
        index = position % self._database.count if self._database.count else position
        ahead = index - self._next
        if ahead < 0 or (ahead and self._database.can_seek):
            self._records, ahead = self._database.records(index), 0
        for _ in range(ahead):
            if next(self._records, None) is None:
                return None
        record = next(self._records, None)
        self._next = index + 1
        return record


class Writer(Protocol):
    """A database being written."""

    def put(self, key: bytes, value: bytes) -> None:
        """Add a record; a later one with the same key replaces it."""
        ...


_READERS: dict[str, Callable[[str], Database]] = {"lmdb": LMDB, "leveldb": LevelDB}
_WRITERS: dict[str, Callable[[Path], LMDBWriter | LevelDBWriter]] = {"lmdb": LMDBWriter, "leveldb": LevelDBWriter}
_MARKERS = {"lmdb": "data.mdb", "leveldb": "CURRENT"}
BACKENDS = tuple(_READERS)
_ABOUT = "about.json"


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


class Begun(NamedTuple):
    """A database being written, perhaps by several runs."""

    writer: Writer
    about: Mapping[str, Any]
    """What the run that began it said about it."""
    last_key: bytes | None = None
    """The last record that earlier runs wrote; None: this is the first run."""
    written: int = 0
    """How many they wrote."""


@contextlib.contextmanager
def continued_database(backend: str, path: str, about: Mapping[str, Any], compared: Collection[str]) -> Iterator[Begun]:
    """Create a database that appears under ``path``, complete, when the block ends, perhaps in several runs.

    Until then an LMDB is in ``path.partial``, which an error removes and an interruption leaves, to be continued by the
    next run. ``about`` describes what is written; the fields named in ``compared`` must be the same in all runs. A
    LevelDB is begun anew each time.
    """
    if checked_backend(backend) != "lmdb":
        with new_database(backend, path) as fresh:
            yield Begun(fresh, about)
        return
    target, partial = Path(os.path.realpath(path)), Path(os.path.realpath(path) + ".partial")
    if target.exists():
        raise ConfigError(f"{path} exists already; remove it first or choose another name for the new database")
    note = partial / _ABOUT
    with contextlib.ExitStack() as stack:
        try:
            partial.mkdir(exist_ok=True)
            stack.enter_context(_alone(partial))
            about = _said_before(note, about, compared)
            write_json(note, dict(about), "description of the database")
        except OSError as error:
            raise cannot("write", "database", path, error) from error
        try:
            writer = LMDBWriter(partial)
            log.info("Opened %s %s", backend, path)
            yield Begun(writer, about, *writer.last())
            writer.finish()
            note.unlink()
            partial.rename(target)
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError):
                raise cannot("write", "database", path, error) from error
            raise


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConfigError(f"another run is writing {folder}; wait until it is done, or choose another name") from None
    finally:
        os.close(descriptor)


def _said_before(note: Path, about: Mapping[str, Any], compared: Collection[str]) -> Mapping[str, Any]:
    """Return what an earlier run said about the database, which must not differ; or ``about`` if there was none."""
    if not note.exists():
        return about
    before: Any = read_json(note, "description of the database")
    different = [name for name in about if not isinstance(before, dict) or name not in before]
    different += [name for name in compared if not different and before[name] != about[name]]
    if different:
        raise ConfigError(
            f"{note.parent} holds a database that an interrupted run began with another {different[0]}; remove it to "
            "begin anew, or continue with what that run was given"
        )
    found: Mapping[str, Any] = before
    return found


def checked_backend(backend: str) -> str:
    """Return a known backend's name, or raise an error that lists them."""
    if backend not in _READERS:
        raise unknown_name("database backend", backend, BACKENDS)
    return backend
