"""A job's processes on one machine: none may outlive the job, however it ends.

There are four safety nets. The agent stops workers; it adopts and kills whatever they leave behind; the kernel kills a
worker whose agent dies; and every process carries the job's mark in its environment, by which a second agent finds what
a killed one could not clean up.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from poseidon.job import members, settings

MARK = settings.RUN.name
"""Environment variable of every worker: the job it belongs to."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent is gone, so that none can escape."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def dies_with_parent() -> Callable[[], None] | None:
    """Return the function with which a child gets itself killed when the thread that started it ends."""
    if sys.platform != "linux":
        return None
    # Loaded here: between fork and exec only loaded code may be used.
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def follow() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return follow


def descendants(root: int) -> set[int]:
    """Return the live descendants of a process."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            parent = _live_parent(path)
            if parent is not None:
                children.setdefault(parent, []).append(int(path.name))
    found: set[int] = set()
    ahead = [root]
    while ahead:
        new = [pid for pid in children.get(ahead.pop(), []) if pid not in found]
        found.update(new)
        ahead.extend(new)
    return found


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, by SIGSTOP for instance."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


def end_all(run: str) -> list[int]:
    """Kill all processes of a job on this machine; return those that did not end."""

    def find() -> set[int]:
        return {*descendants(os.getpid()), *members.pids_marked(MARK, run)}

    try:
        members.kill_all(find, limit_s=5.0)
    except RuntimeError:
        return sorted(find())
    return []


def _live_parent(path: Path) -> int | None:
    try:
        state, parent, *_ = (path / "stat").read_text().rpartition(")")[2].split()
        # The first thread of a process ends before the others, which still hold its files and locks.
        has_ended = state in "ZX" and len(list((path / "task").iterdir())) < 2
    except (OSError, ValueError):
        return None
    return None if has_ended else int(parent)
