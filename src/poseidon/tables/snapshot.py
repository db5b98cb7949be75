"""A table's rows in a file: numpy's npz without pickled objects, written whole, and trusted in nothing when read."""

from __future__ import annotations

import errno
import json
import math
import os
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np

from poseidon import files
from poseidon.errors import ConfigError
from poseidon.tables.rows import Index, Patch
from poseidon.tables.tables import TableSpec
from poseidon.wire.formats import Array

SHAPE = ("rows", "width", "dtype", "sparse")
"""Fields in which a file and a table must agree; name and consistency may change."""
_WHAT = "snapshot of a table"
_BROKEN = (LookupError, ValueError, TypeError, EOFError, SyntaxError, RuntimeError, MemoryError, OverflowError)
"""What zipfile and numpy raise for content that is not theirs, besides errors of their own."""


def save(path: Path, spec: TableSpec, clock: int, patches: Sequence[Patch]) -> None:
    """Write the rows in ``patches``; an existing file is replaced atomically, or kept if this fails."""
    arrays = {f"{part}_{number}": array for number, patch in enumerate(patches) for part, array in _parts(patch)}
    about = json.dumps({**asdict(spec), "clock": clock, "patches": len(patches)})
    arrays["about"] = np.frombuffer(about.encode(), np.uint8)
    with files.replacing(path, _WHAT) as temporary, temporary.open("wb") as stream:
        np.savez(stream, allow_pickle=False, **arrays)


def load(path: Path, spec: TableSpec) -> tuple[int, list[Patch]]:
    """Return the clock and rows in a file; refuse one that does not fit ``spec`` or is damaged."""
    try:
        with path.open("rb") as stream:
            return _load(stream, path, spec)
    except ConfigError:
        raise
    except (OSError, zipfile.BadZipFile, zlib.error, *_BROKEN) as error:
        # zipfile goes where a damaged file sends it, also before its beginning.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise files.cannot("read", _WHAT, path, error) from None
        reason = str(error) or type(error).__name__
        raise ConfigError(f"{path} is not a {_WHAT} ({reason}); Table.snapshot() writes them") from error


def _load(stream: IO[bytes], path: Path, spec: TableSpec) -> tuple[int, list[Patch]]:
    with zipfile.ZipFile(stream) as archive:
        _check_sizes(archive, os.fstat(stream.fileno()).st_size)
        about = json.loads(_read_array(archive, "about").tobytes())
        differ = [
            f"{name} {about[name]}, not {getattr(spec, name)}" for name in SHAPE if about[name] != getattr(spec, name)
        ]
        if differ:
            raise ConfigError(f"{path} does not fit table {spec.name!r}: it has {', '.join(differ)}")
        clock, count = (_whole(about, name) for name in ("clock", "patches"))
        if count > len(archive.infolist()):
            raise ValueError(f"it states {count} patches in {len(archive.infolist())} parts")
        patches = [_read_patch(archive, number, spec) for number in range(count)]
    rows = np.concatenate([patch.rows for patch in patches]) if patches else np.empty(0, np.int64)
    if len(np.unique(rows)) != len(rows):
        raise ValueError("it holds a row twice")
    return clock, patches


def _check_sizes(archive: zipfile.ZipFile, size: int) -> None:
    """Refuse parts that could take more memory than the file has bytes."""
    parts = archive.infolist()
    if any(part.compress_type != zipfile.ZIP_STORED or part.file_size != part.compress_size for part in parts):
        raise ValueError("its parts are compressed")
    total = sum(part.file_size for part in parts)
    if total > size:
        raise ValueError(f"its parts state {total} bytes, but it has {size}")


def _read_array(archive: zipfile.ZipFile, name: str) -> Array:
    """Return one array, whose size must be what its header says, before any memory is allocated for it."""
    part = archive.getinfo(f"{name}.npy")
    with archive.open(part) as stream:
        version = np.lib.format.read_magic(stream)
        if version != (1, 0):
            raise ValueError(f"{name} is of numpy's format {version}, expected (1, 0)")
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(stream)
        expected = math.prod(shape) * dtype.itemsize
        left = part.file_size - stream.tell()
        if dtype.hasobject or is_fortran or min(shape, default=0) < 0 or expected != left:
            raise ValueError(f"{name} states {dtype} of shape {shape}, that is {expected} bytes, and has {left}")
        return np.frombuffer(stream.read(), dtype).reshape(shape)


def _read_patch(archive: zipfile.ZipFile, number: int, spec: TableSpec) -> Patch:
    rows = _read_index(archive, f"rows_{number}")
    if len(rows) and not 0 <= rows.min() <= rows.max() < spec.rows:
        wrong = rows[(rows < 0) | (rows >= spec.rows)][0]
        raise ValueError(f"it names row {wrong}; a table of {spec.rows} rows has 0 to {spec.rows - 1}")
    values = _read_array(archive, f"values_{number}")
    if values.dtype != np.dtype(spec.dtype):
        raise ValueError(f"its values are {values.dtype}, expected {spec.dtype}")
    if not spec.sparse:
        if values.shape != (len(rows), spec.width):
            raise ValueError(f"its values have shape {values.shape}, expected {(len(rows), spec.width)}")
        return Patch(rows, values)
    columns, starts = (_read_index(archive, f"{part}_{number}") for part in ("columns", "starts"))
    _check_sparse(spec, rows, values, columns, starts)
    return Patch(rows, values, columns, starts)


def _read_index(archive: zipfile.ZipFile, name: str) -> Index:
    array = _read_array(archive, name)
    if array.dtype != np.int64 or array.ndim != 1:
        raise ValueError(f"{name} is {array.dtype} of shape {array.shape}, expected a list of int64")
    return array


def _check_sparse(spec: TableSpec, rows: Index, values: Array, columns: Index, starts: Index) -> None:
    if values.ndim != 1 or len(columns) != len(values) or len(starts) != len(rows) + 1:
        raise ValueError(f"{values.shape} values, {len(columns)} columns and {len(starts)} starts for {len(rows)} rows")
    if starts[0] != 0 or starts[-1] != len(values) or bool((np.diff(starts) < 0).any()):
        raise ValueError(f"its rows do not share out {len(values)} values")
    inner = np.ones(len(columns), bool)
    inner[starts[:-1][starts[:-1] < len(columns)]] = False  # the first column of each row follows nothing
    if len(columns) and (
        not 0 <= columns.min() <= columns.max() < spec.width or bool((np.diff(columns, prepend=-1) <= 0)[inner].any())
    ):
        raise ValueError(f"its columns are not ascending numbers from 0 to {spec.width - 1}")


def _whole(about: dict[str, Any], name: str) -> int:
    value = about[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is {value!r}, expected a whole number")
    return value


def _parts(patch: Patch) -> list[tuple[str, Array]]:
    parts = {"rows": patch.rows, "values": patch.values, "columns": patch.columns, "starts": patch.starts}
    return [(name, array) for name, array in parts.items() if array is not None]
