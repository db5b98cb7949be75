"""The processes of a job or lab, found in /proc even if they daemonised or changed their session.

A process belongs to a lab if it is in one of its namespaces or inherited its mark in the environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from poseidon.job import settings

LAB_MARK = settings.LAB.name
JOB_MARK = settings.JOB.name


def pids_in(inodes: Collection[int]) -> list[int]:
    """Return the processes whose network namespace is one of these."""
    return [pid for pid in _pids() if _net_inode(pid) in inodes]


def pids_marked(mark: str, value: str) -> list[int]:
    """Return the processes that were started with ``mark=value`` in their environment."""
    wanted = f"{mark}={value}".encode()
    return [pid for pid in _pids() if wanted in _environment(pid)]


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if no such process is alive.

    Together with the number it identifies a process, since the kernel reuses numbers.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def send_signal(pids: Collection[int], number: signal.Signals) -> None:
    """Signal processes; ignore those that have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_all(find: Callable[[], Collection[int]], limit_s: float = 10.0) -> None:
    """Kill what ``find`` returns until it returns nothing, which catches new children of dying processes too."""
    deadline = time.monotonic() + limit_s
    while pids := find():
        send_signal(pids, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {sorted(pids)} did not end within {limit_s:g} s of SIGKILL")
        time.sleep(0.01)


def _pids() -> Iterator[int]:
    own = os.getpid()
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and int(path.name) != own)


def _net_inode(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    except OSError:
        return None


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
