"""A table's rows in a file: numpy's npz without pickled objects, written atomically."""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from poseidon.errors import ConfigError
from poseidon.tables.rows import Patch
from poseidon.tables.tables import TableSpec

SHAPE = ("rows", "width", "dtype", "sparse")
"""Fields in which a file and a table must agree; name and consistency may change."""


def save(path: Path, spec: TableSpec, clock: int, patches: Sequence[Patch]) -> None:
    """Write the rows in ``patches``; an existing file is replaced atomically, or kept if this fails."""
    arrays = {f"{part}_{number}": array for number, patch in enumerate(patches) for part, array in _parts(patch)}
    about = json.dumps({**asdict(spec), "clock": clock, "patches": len(patches)})
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            arrays["about"] = np.frombuffer(about.encode(), np.uint8)
            np.savez(file, allow_pickle=False, **arrays)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load(path: Path, spec: TableSpec) -> tuple[int, list[Patch]]:
    """Return the clock and rows in a file; refuse one whose shape differs from ``spec``."""
    try:
        with np.load(path, allow_pickle=False) as file:
            about = json.loads(file["about"].tobytes())
            differ = [
                f"{name} {about[name]}, not {getattr(spec, name)}"
                for name in SHAPE
                if about[name] != getattr(spec, name)
            ]
            if differ:
                raise ConfigError(f"{path} does not fit table {spec.name!r}: it has {', '.join(differ)}")
            return about["clock"], [_read(file, number) for number in range(about["patches"])]
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not a snapshot of a table ({error}); Table.snapshot() writes them") from error


def _parts(patch: Patch) -> list[tuple[str, np.ndarray]]:
    parts = {"rows": patch.rows, "values": patch.values, "columns": patch.columns, "starts": patch.starts}
    return [(name, array) for name, array in parts.items() if array is not None]


def _read(file: np.lib.npyio.NpzFile, number: int) -> Patch:
    sparse = [file.get(f"{part}_{number}") for part in ("columns", "starts")]
    return Patch(file[f"rows_{number}"], file[f"values_{number}"], *sparse)
