"""Which files make up a LevelDB database: the accumulated edits of its MANIFEST."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from poseidon import files
from poseidon.caffe.io.leveldb.coding import InternalKey, read_string, string
from poseidon.caffe.io.leveldb.log import format_log, read_log
from poseidon.caffe.schema.varint import read_varint, varint
from poseidon.errors import ConfigError

COMPARATOR = b"leveldb.BytewiseComparator"
LAST_LEVEL = 6
_CURRENT_BYTES = 4096
_COMPARATOR, _LOG, _NEXT_FILE, _LAST_SEQUENCE, _COMPACT_POINTER, _DELETED, _NEW, _PREVIOUS_LOG = 1, 2, 3, 4, 5, 6, 7, 9


@dataclass(frozen=True)
class TableFile:
    """One table, as the MANIFEST lists it."""

    number: int
    size_bytes: int
    smallest: InternalKey
    largest: InternalKey


@dataclass
class Version:
    """The state of a database."""

    tables: dict[tuple[int, int], TableFile] = field(default_factory=dict)
    """By level and number."""
    log_number: int = 0
    """Log files from this number up hold records that are in no table."""
    previous_log_number: int = 0
    next_file_number: int = 0
    last_sequence: int = 0

    def level(self, level: int) -> list[TableFile]:
        """Return the tables of a level in the order of their keys."""
        found = [table for (at, _), table in self.tables.items() if at == level]
        return sorted(found, key=lambda table: table.smallest.user)

    def edit(self, record: bytes) -> None:
        """Apply one record of the MANIFEST."""
        position = 0
        while position < len(record):
            tag, position = read_varint(record, position)
            if tag == _COMPARATOR:
                name, position = read_string(record, position)
                if name != COMPARATOR:
                    raise ValueError(f"keys are ordered by {name.decode(errors='replace')!r}, which is not supported")
            elif tag == _NEW:
                level, position = read_varint(record, position)
                number, position = read_varint(record, position)
                size, position = read_varint(record, position)
                smallest, position = read_string(record, position)
                largest, position = read_string(record, position)
                if level > LAST_LEVEL:
                    raise ValueError(f"a table is on level {level}; the last one is {LAST_LEVEL}")
                table = TableFile(number, size, InternalKey.unpack(smallest), InternalKey.unpack(largest))
                self.tables[level, number] = table
            elif tag == _DELETED:
                level, position = read_varint(record, position)
                number, position = read_varint(record, position)
                self.tables.pop((level, number), None)
            elif tag == _COMPACT_POINTER:
                _, position = read_varint(record, position)
                _, position = read_string(record, position)
            else:
                value, position = read_varint(record, position)
                self._set_number(tag, value)

    def _set_number(self, tag: int, value: int) -> None:
        if tag == _LOG:
            self.log_number = value
        elif tag == _PREVIOUS_LOG:
            self.previous_log_number = value
        elif tag == _NEXT_FILE:
            self.next_file_number = value
        elif tag == _LAST_SEQUENCE:
            self.last_sequence = value
        else:
            raise ValueError(f"unknown tag {tag}")


def read_version(folder: Path) -> Version:
    """Return the state of the database in ``folder``."""
    current = folder / "CURRENT"
    if not folder.is_dir() or not current.is_file():
        raise ConfigError(f"{folder}: no LevelDB database (there is no such folder, or it holds no file CURRENT)")
    name = files.read_bytes(current, "LevelDB's file", _CURRENT_BYTES).decode("ascii", "replace").strip()
    if not re.fullmatch(r"MANIFEST-[0-9]+", name):
        raise ConfigError(f"{folder}: damaged LevelDB: CURRENT holds {name!r}, expected the name of a MANIFEST")
    manifest = folder / name
    if not manifest.is_file():
        raise ConfigError(f"{folder}: damaged LevelDB: CURRENT names {manifest.name!r}, which does not exist")
    version = Version()
    for record in read_log(manifest):
        try:
            version.edit(record)
        except (ValueError, IndexError) as error:
            raise ConfigError(f"{manifest}: cannot be parsed: {error}") from None
    return version


def write_version(folder: Path, version: Version, manifest_number: int) -> None:
    """Write MANIFEST and CURRENT for a new database."""
    edit = varint(_COMPARATOR) + string(COMPARATOR)
    numbers = (
        (_LOG, version.log_number),
        (_PREVIOUS_LOG, version.previous_log_number),
        (_NEXT_FILE, version.next_file_number),
        (_LAST_SEQUENCE, version.last_sequence),
    )
    for tag, value in numbers:
        edit += varint(tag) + varint(value)
    for (level, number), table in version.tables.items():
        edit += varint(_NEW) + varint(level) + varint(number) + varint(table.size_bytes)
        edit += string(table.smallest.pack()) + string(table.largest.pack())
    name = f"MANIFEST-{manifest_number:06d}"
    (folder / name).write_bytes(format_log([edit]))
    (folder / "CURRENT").write_text(f"{name}\n", encoding="ascii")
