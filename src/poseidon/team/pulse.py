"""What this process does, as its heartbeat sees it from outside: whether it works, and in which call it waits."""

from __future__ import annotations

import itertools
import re
import sys
import threading
import time
from pathlib import Path

from poseidon.observe.frames import calls_of

BUSY_SHARE = 0.02
"""Of a processor: what waiting threads take is far less."""
BUSY_BYTES = 64 << 10
"""Read and written between two looks: what a heartbeat writes is far less."""

_WAITS = re.compile(
    r"/torch/distributed/(?:distributed_c10d|c10d_logger|rendezvous|device_mesh|_functional_collectives)\.py$"
    r"|/poseidon/(?:team/gathering|tables/worker|tables/node|job/world)\.py$"
)
"""Where a thread waits for others and does nothing else. Poseidon's other waits announce themselves."""
_STANDARD = re.compile(r"/(?:threading|queue|socket|ssl|selectors|contextlib)\.py$|/concurrent/futures/")


class Pulse:
    """Counts how often this process was found working."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._used_s = time.process_time()
        self._moved = moved_bytes()
        self.work = 0

    def look(self) -> None:
        """Note whether the process has worked since the last look."""
        now, used_s, moved = time.monotonic(), time.process_time(), moved_bytes()
        computes = used_s - self._used_s >= BUSY_SHARE * (now - self._at)
        if computes or moved - self._moved >= BUSY_BYTES:
            self.work += 1
        self._at, self._used_s, self._moved = now, used_s, moved


def moved_bytes() -> int:
    """Return how many bytes this process has read and written, other than from and to sockets."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


def uncaught() -> BaseException | None:
    """Return the error that ended the script, while its process waits for other threads of the script to end.

    Exit hooks, by which the other workers would hear of it, run only after that, which may be never.
    """
    error = getattr(sys, "last_value", None)
    if error is None:
        return None  # nearly always
    calls = calls_of(threading.main_thread().ident or 0)
    # At a prompt an error does not end the script, and it is kept as well.
    is_ending = bool(calls) and calls[-1].name == "_shutdown" and calls[-1].path.endswith("threading.py")
    return error if is_ending else None


def waiting_call(thread: int) -> tuple[str, int]:
    """Return the call in which a thread waits for other workers, and a number that tells it from others; or nothing.

    This sees collectives of torch.distributed too that a script calls itself.
    """
    calls = calls_of(thread)
    while calls and _STANDARD.search(calls[0].path):
        del calls[0]
    waits = list(itertools.takewhile(lambda call: _WAITS.search(call.path), calls))
    if not waits:
        return "", 0
    # The outermost call of the same kind: what the script called. torch wraps its functions, to log their times.
    name = next((call.name for call in reversed(waits) if call.name != "wrapper"), waits[0].name)
    kind = "torch.distributed" if "/torch/distributed/" in waits[-1].path else "Poseidon"
    return f"{name}() of {kind}", waits[-1].number & 0xFFFFFF
