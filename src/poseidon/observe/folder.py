"""A run's folder: what is left of a job for whoever looks at it, while it runs and later.

===============  ======================================================================================
``launcher.log``  everything the launcher said, with times
``events.jsonl``  starts, restarts, losses, verdicts: one JSON object per line, a bounded number
``state.json``    what the page shows now: speed, steps, links, verdict, plan; replaced every second or so
``summary.json``  the end: status, first cause, durations, throughput, bytes per link; written once
``trace.json``    the steps that ``--trace`` asked for
``worker-N.log``  what worker N printed
===============  ======================================================================================

A folder on a full disk loses what does not fit; the job goes on.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from poseidon import files
from poseidon.errors import ConfigError

LAUNCHER_LOG, EVENTS, STATE, SUMMARY, TRACE = (
    "launcher.log",
    "events.jsonl",
    "state.json",
    "summary.json",
    "trace.json",
)
MOST_EVENTS = 5000
"""Later ones are dropped, but for the last: a job that restarts for ever must not fill the disk."""
_MOST_BYTES = 64 << 20
"""Of a file that is read back."""


class RunFolder:
    """Writes the files of one run; not thread-safe. ``path`` need not exist before :meth:`open`.

    Several launchers of one job may write to a folder that ``is_shared``.
    """

    def __init__(self, path: Path, is_shared: bool = False) -> None:
        self.path = path
        self._is_shared = is_shared
        self._claim: int | None = None
        self._log: IO[bytes] | None = None
        self._events: IO[bytes] | None = None
        self._count = 0
        self.is_open = False

    def claim(self) -> None:
        """Lock the folder, which must exist, until :meth:`close`; :class:`ConfigError` if another job has it.

        The logs of two jobs would be mixed, and each would replace the other's state and summary. The lock is the
        kernel's: it ends with the process. A file system that cannot lock folders has no such protection.
        """
        if self._claim is not None or self._is_shared:
            return
        with contextlib.suppress(OSError):
            self._claim = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._release()
                raise ConfigError(
                    f"another job is writing its logs to {self.path}; give each job a folder of its own (--log-dir)"
                ) from None

    def _release(self) -> None:
        descriptor, self._claim = self._claim, None
        if descriptor is not None:
            os.close(descriptor)

    def open(self) -> None:
        """Create the folder and its first files; a job that cannot start leaves none."""
        if self.is_open:
            return
        self.is_open = True
        with contextlib.suppress(OSError):
            self.path.mkdir(parents=True, exist_ok=True)
            self._log = (self.path / LAUNCHER_LOG).open("ab", buffering=0)
            self._events = (self.path / EVENTS).open("ab", buffering=0)

    def say(self, text: str) -> None:
        """Add to the launcher's log."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        self._write(self._log, "".join(f"{stamp} {line}\n" for line in text.splitlines()))

    def event(self, kind: str, is_last: bool = False, **facts: Any) -> None:
        """Add an event."""
        self._count += 1
        if self._count <= MOST_EVENTS or is_last:
            self._write(self._events, json.dumps({"at": round(time.time(), 3), "event": kind, **facts}) + "\n")

    def write(self, name: str, data: Mapping[str, Any]) -> None:
        """Replace one of the JSON files."""
        if self.is_open:
            with contextlib.suppress(OSError, ConfigError):
                files.write_json(self.path / name, dict(data), name, indent=None)

    def write_state(self, name: str, data: Mapping[str, Any]) -> None:
        """Replace a file that soon is replaced again: whole for any reader, but not worth waiting for the disk."""
        if self.is_open:
            with contextlib.suppress(OSError):
                temporary = self.path / f".{name}.tmp"
                temporary.write_bytes(json.dumps(data, separators=(",", ":")).encode())
                temporary.replace(self.path / name)

    def close(self) -> None:
        """Close the files."""
        for one in (self._log, self._events):
            if one is not None:
                with contextlib.suppress(OSError):
                    one.close()
        self._log = self._events = None
        self._release()

    def _write(self, target: IO[bytes] | None, text: str) -> None:
        if target is not None:
            with contextlib.suppress(OSError):
                files.write_whole(target, text.encode(errors="replace"))


def find_run(text: str | None) -> Path:
    """Return the folder of a run: the named one, or the newest below ``runs``."""
    if text:
        path = Path(text)
        found = path if path.is_dir() else Path("runs") / text
        if not found.is_dir():
            raise ConfigError(f"there is no run {text!r}: neither that folder nor runs/{text}")
    else:
        runs = sorted(Path("runs").glob("*/" + EVENTS), key=lambda one: one.stat().st_mtime)
        if not runs:
            raise ConfigError("there is no run below ./runs; name the folder that `poseidon run` wrote (--log-dir)")
        found = runs[-1].parent
    if not (found / EVENTS).exists():
        raise ConfigError(f"{found} is not a run's folder: it has no {EVENTS}")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in one of a run's JSON files; an empty one if there is none yet."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return {}
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def read_events(folder: Path, most: int = 500) -> list[dict[str, Any]]:
    """Return the last events of a run."""
    found = []
    for line in tail_lines(folder / EVENTS, most):
        with contextlib.suppress(ValueError, RecursionError):
            event = json.loads(line)
            if isinstance(event, dict):
                found.append(event)
    return found


def tail_lines(path: Path, most: int, most_bytes: int = 256 << 10) -> list[str]:
    """Return the last lines of a text file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - most_bytes))
            data = file.read()
    except OSError:
        return []
    lines = data.decode(errors="replace").splitlines()
    return lines[-most:] if size <= most_bytes else lines[1:][-most:]


def worker_logs(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield the rank and the log of every worker."""
    for path in folder.glob("worker-*.log"):
        number = path.stem.removeprefix("worker-")
        if number.isdigit():
            yield int(number), path
