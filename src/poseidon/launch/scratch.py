"""Scratch folders of workers: on the disk of the working directory, readable by their owner alone, never left behind.

A worker holds its folder's lock while it or a child of its lives. Whoever can take the lock may remove the folder: a
guardian process that the worker starts, the launcher when the job has ended, however it ended, and the next job.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

PREFIX = "poseidon-scratch-"
_NEW = ".poseidon-new-"
"""Begins the name of a folder that has no lock yet, so nobody mistakes it for one that was left behind."""
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_LOCK = "lock"


@dataclass(frozen=True)
class Scratch:
    """A folder and its lock, held by this process and those that inherit the descriptor."""

    folder: Path
    lock: int


def create(directory: Path, kinds: dict[int, str]) -> Scratch:
    """Return a new folder for a worker that starts in ``directory``; ``kinds`` gives file system types by device."""
    place = choose_place(directory, places(directory), kinds)
    # As tempfile does: the name cannot be guessed, and only the owner may enter.
    new = place / f"{_NEW}{secrets.token_hex(8)}"
    new.mkdir(mode=0o700)
    lock = os.open(new / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.set_inheritable(lock, True)
    folder = place / f"{PREFIX}{secrets.token_hex(8)}"
    new.rename(folder)
    return Scratch(folder, lock)


def places(directory: Path) -> list[Path]:
    """Return the folders in which scratch folders of this user may be, the most suitable first."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    known = [Path(tempfile.gettempdir()), Path("/var/tmp"), cache]
    above = [
        one
        for one in (directory, *directory.parents)
        if os.access(one, os.W_OK | os.X_OK) and _is_beside(one, directory)
    ]
    known += above[-1:]
    return [place for place in dict.fromkeys(known) if os.access(place, os.W_OK | os.X_OK)]


def choose_place(directory: Path, candidates: list[Path], kinds: dict[int, str]) -> Path:
    """Return the first place on the directory's own disk, else the first on any disk, else the first."""
    device = directory.stat().st_dev
    on_disk = [place for place in candidates if kinds.get(place.stat().st_dev) not in _IN_MEMORY]
    same = [place for place in candidates if place.stat().st_dev == device]
    found = [*same, *on_disk, *candidates]
    if not found:
        raise OSError(f"no folder for scratch files can be written: neither {tempfile.gettempdir()} nor /var/tmp")
    return found[0]


def guard(scratch: Scratch) -> None:
    """Start a process that removes the folder once the worker and its children have ended.

    The caller must have a single thread.
    """
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    # A grandchild: the script must not find a child that it did not start.
    try:
        if os.fork():
            os._exit(0)
        os.setsid()
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        os.chdir("/")
        # Whoever reads the worker's output waits until nobody can write to it; and the lock must not be held from here.
        os.closerange(0, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 1 << 16 else 1 << 16)
        lock = os.open(scratch.folder / _LOCK, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_SH)
        remove(scratch.folder)
    finally:
        os._exit(0)


def sweep(directory: Path) -> None:
    """Remove the folders whose workers have ended; ``directory`` is where they started."""
    for place in places(directory):
        found: list[Path] = []
        with contextlib.suppress(OSError):
            found = [Path(entry) for entry in os.scandir(place) if entry.name.startswith(PREFIX)]
        for folder in found:
            # One that its guardian removes at this moment must not keep us from the others.
            with contextlib.suppress(OSError):
                if _is_left(folder):
                    remove(folder)


def remove(folder: Path) -> None:
    """Remove a folder whatever its permissions are; another process may do the same at the same time."""
    with contextlib.suppress(OSError):
        folder.chmod(0o700)
        entries = list(os.scandir(folder))
        # The lock last: without it nobody would recognise what is left.
        for entry in sorted(entries, key=lambda entry: entry.name == _LOCK):
            if entry.is_dir(follow_symlinks=False):
                remove(Path(entry))
            else:
                with contextlib.suppress(OSError):
                    Path(entry).unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def _is_left(folder: Path) -> bool:
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        return False
    try:
        lock = os.open(folder / _LOCK, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    try:
        # Shared: a guardian that is removing it holds the lock as well.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _is_beside(one: Path, directory: Path) -> bool:
    return one.stat().st_dev == directory.stat().st_dev
