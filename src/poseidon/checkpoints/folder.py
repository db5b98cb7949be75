"""A folder of checkpoints: one file for each, which is either complete or not there.

A file is what ``torch.save`` writes: an archive whose entries have checksums. So plain PyTorch reads it too, and a file
that a disk has damaged is recognised before anything is loaded from it.
"""

from __future__ import annotations

import errno
import io
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from poseidon import files
from poseidon.errors import ConfigError

WHAT = "checkpoint"
_NAME = re.compile(r"step-(\d{9,18})\.pt")


@dataclass(frozen=True, order=True)
class Saved:
    """A checkpoint on this machine's disk."""

    step: int
    path: Path


class CheckpointFolder:
    """The checkpoints in one folder; ``keep`` of them stay."""

    def __init__(self, path: files.StrPath, keep: int) -> None:
        self.path = Path(path)
        self._keep = keep

    def saved(self) -> list[Saved]:
        """Return all checkpoints, the oldest first."""
        try:
            names = [path.name for path in self.path.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise files.cannot("read", "checkpoints", self.path, error) from None
        found = ((_NAME.fullmatch(name), name) for name in names)
        return sorted(Saved(int(match[1]), self.path / name) for match, name in found if match)

    def write(self, step: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint, whole or not at all, and remove those that are no longer kept."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise files.cannot("write", "checkpoints", self.path, error) from None
        with files.replacing(self.path / f"step-{step:09d}.pt", WHAT) as temporary:
            try:
                torch.save(dict(state), temporary)
            except RuntimeError as error:
                # The archive's writer reports what the system refused only as text.
                raise OSError(_reason(temporary), f"{error}".splitlines()[0]) from error
        old = [one.path for one in self.saved() if one.step <= step][: -self._keep]
        try:
            for path in (*old, *self._leavings()):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise files.cannot("remove", "an older checkpoint (the new one is written)", path, error) from None

    def _leavings(self) -> Iterator[Path]:
        """Return what processes left that were killed while they wrote; one folder has one writer."""
        return self.path.glob(".step-*.pt.*")

    def newest(self) -> tuple[Saved | None, list[str]]:
        """Return the newest checkpoint that is intact, and what is wrong with newer ones."""
        problems: list[str] = []
        for one in reversed(self.saved()):
            problem = find_damage(one.path)
            if not problem:
                return one, problems
            problems.append(f"{one.path} is damaged ({problem})")
        return None, problems


def find_damage(path: Path) -> str:
    """Return what is wrong with a file, or nothing."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
            return f"the checksum of {broken} is wrong" if broken else ""
    except (OSError, EOFError, ValueError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        return str(error) or type(error).__name__


def read(content: bytes | bytearray | memoryview, what: str) -> dict[str, Any]:
    """Return the state in a checkpoint's bytes; only plain data and tensors are read, never code."""
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConfigError(f"cannot read {what}: {str(error).splitlines()[0]}") from None
    if not isinstance(state, dict) or not isinstance(state.get("step"), int):
        raise ConfigError(f"{what} is not a checkpoint of poseidon.Checkpoint: it has no step")
    return state


def pieces_of(size: int, most: int) -> Iterator[slice]:
    """Cut ``size`` bytes into pieces of at most ``most``."""
    for start in range(0, size, most):
        yield slice(start, min(start + most, size))


def _reason(path: Path) -> int:
    """Return the error number of writing one more byte, or that of a failing disk."""
    try:
        with path.open("ab") as stream:
            stream.write(b"\0" * 65536)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        return error.errno or errno.EIO
    return errno.EIO
