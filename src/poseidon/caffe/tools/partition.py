"""Split a database, or a list of files or windows, into one part per worker."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from poseidon.caffe.io.database import kind_of, new_database, open_database
from poseidon.caffe.io.lists import read_lines
from poseidon.caffe.io.sharding import share_path
from poseidon.errors import ConfigError
from poseidon.files import replacing

log = logging.getLogger("poseidon.caffe")

_REPORT_EVERY = 1000


def partition(path: str, parts: int, backend: str | None = None) -> int:
    """Write ``path_0`` to ``path_{parts-1}``, dealing out records in turn; return how many there were.

    A folder is a database (of the given backend, or detected), a file is a list: one record per line, or per image in a
    window file.
    """
    if parts < 1:
        raise ConfigError(f"the number of partitions is {parts}; at least one is needed")
    targets = [share_path(path, rank) for rank in range(parts)]
    for target in targets:
        if Path(target).exists():
            raise ConfigError(f"{target} exists already; remove it first")
    count = _split_database(path, targets, backend) if Path(path).is_dir() else _split_list(path, targets)
    log.info("Processed %d files.", count)
    log.info("Done.")
    return count


def _split_database(path: str, targets: list[str], backend: str | None) -> int:
    kind = backend or kind_of(path)
    if kind is None:
        raise ConfigError(f"{path}: holds neither an LMDB nor a LevelDB database")
    database = open_database(kind, path)
    count = 0
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(new_database(kind, target)) for target in targets]
        for key, value in database.records():
            writers[count % len(writers)].put(key, bytes(value))
            count += 1
            if count % _REPORT_EVERY == 0:
                log.info("Processed %d files.", count)
        _check_enough(path, count, len(targets))
    return count


def _split_list(path: str, targets: list[str]) -> int:
    lines = [line for line in read_lines(path) if line.strip()]
    is_window_file = bool(lines) and lines[0].split()[0] == "#"
    records = list(_window_records(lines)) if is_window_file else lines
    _check_enough(path, len(records), len(targets))
    with contextlib.ExitStack() as stack:
        for rank, target in enumerate(targets):
            own = records[rank :: len(targets)]
            if is_window_file:
                own = [f"# {number}\n{record}" for number, record in enumerate(own)]
            temporary = stack.enter_context(replacing(target, "list"))
            temporary.write_text("".join(f"{record}\n" for record in own), encoding="utf-8")
    return len(records)


def _window_records(lines: list[str]) -> Iterator[str]:
    """Yield each image's entry in a window file without the image's number, which follows from its position."""
    record: list[str] = []
    for line in lines:
        if line.split()[0] == "#":
            if record:
                yield "\n".join(record)
            record = []
        else:
            record.append(line)
    if record:
        yield "\n".join(record)


def _check_enough(path: str, count: int, parts: int) -> None:
    if count < parts:
        raise ConfigError(f"{path}: {count} records are too few for {parts} partitions")
