"""Which job writes to a folder of checkpoints: one at a time.

Of two jobs that write to the same folder, each would remove the other's checkpoints, and go on from the other's after a
restart, without a word. The lock is the kernel's: it ends with the process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import time
from pathlib import Path

from poseidon.errors import ConfigError
from poseidon.job.elastic import this_job
from poseidon.job.secret import find_secret

LOCK = ".writer"
"""Name of the file that is locked."""
PATIENCE_S = 10.0
"""How long a lock may outlast its owner: processes that it has forked, or a file server, keep it for a while."""
_PAUSE_S = 0.05
_PROCESS = "process {} on {}"


class Claim:
    """The right of this process to write to a folder, until it is released."""

    def __init__(self, folder: Path) -> None:
        """Take it; :class:`ConfigError` if a process of another job has it."""
        self._descriptor: int | None = None
        # Who cannot write here, or cannot lock, is told so when a checkpoint is written, or has never been protected.
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._take(folder, this_owner())

    def _take(self, folder: Path, owner: str) -> None:
        assert self._descriptor is not None
        deadline = time.monotonic() + PATIENCE_S
        while not _is_locked(self._descriptor):
            other = os.pread(self._descriptor, 200, 0).decode(errors="replace").strip()
            if other == owner or _is_dead(other):
                self.release()
                return
            if time.monotonic() > deadline:
                self.release()
                raise ConfigError(
                    f"checkpoint: {folder} is being written to by another job ({other or 'unknown'}); end that job, or "
                    "give each its own folder"
                )
            time.sleep(_PAUSE_S)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{owner}\n".encode(), 0)

    def release(self) -> None:
        """Let others write."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            # Not only closed: processes that this one has forked since share the open file.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    """Lock a file; return false if another one has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def this_owner() -> str:
    """Return who holds a claim of this process: in an elastic job all workers do, as one that hangs keeps its lock."""
    if this_job() is not None:
        return f"elastic job {hashlib.sha256(find_secret()).hexdigest()[:12]}"
    return _PROCESS.format(os.getpid(), platform.node())


def _is_dead(owner: str) -> bool:
    """Return whether an owner was a process of this machine, and is no more."""
    words = owner.split()
    if len(words) != len(_PROCESS.split()) or owner != _PROCESS.format(words[1], platform.node()):
        return False
    return words[1].isdigit() and not Path(f"/proc/{words[1]}").exists()
