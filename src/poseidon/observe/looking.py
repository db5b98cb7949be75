"""Looks at this process from outside its training thread: where that thread is, what memory and processors it takes."""

from __future__ import annotations

import os
import re
import resource
import sys
import sysconfig
import time
from pathlib import Path

from poseidon.observe.frames import calls_of
from poseidon.observe.gpu import UNKNOWN, gauge_of

_INPUT = re.compile(
    r"/torch/utils/data/|/poseidon/(?:data|auto/dealing|auto/batches|caffe/io/)|/datasets/|/webdataset/"
)
_OPTIMIZER = re.compile(r"/torch/optim/|/poseidon/engine/optimizers|/keras/(?:src/)?optimizers/")
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OURS = str(Path(__file__).parents[1])


def place_of(thread: int) -> str:
    """Return where a thread is: ``input``, ``optimizer``, or the innermost line of the user's own program."""
    line = ""
    for call in calls_of(thread):
        if _INPUT.search(call.path):
            return "input"
        if _OPTIMIZER.search(call.path):
            return "optimizer"
        if not line and not call.path.startswith((*_LIBRARIES, _OURS, "<")):
            line = f"{Path(call.path).name}:{call.line} in {call.name}"
    return line or "a library"


def stack_of(thread: int, most: int = 14) -> list[str]:
    """Return the innermost calls of a thread, outermost first."""
    calls = calls_of(thread)[:most]
    return [f"{call.path[-160:]}:{call.line} in {call.name[:40]}" for call in reversed(calls)]


class Vitals:
    """Memory, processor time and faults of this process; each look returns the growth since the one before."""

    def __init__(self) -> None:
        self._cpu_s = time.process_time()
        self._faults = _faults()

    def look(self) -> tuple[int, float, int]:
        """Return resident bytes, processor seconds and pages read from disk."""
        cpu_s, faults = time.process_time(), _faults()
        grown = cpu_s - self._cpu_s, faults - self._faults
        self._cpu_s, self._faults = cpu_s, faults
        return _resident_bytes(), *grown


def device_use() -> tuple[int, float]:
    """Return the bytes this process has taken on its GPU and the share of time it is in use; (0, -1) without one."""
    torch = sys.modules.get("torch")
    # Asked only of a process that uses its GPU: to ask another one would start the driver.
    if torch is None or not torch.cuda.is_initialized():
        return 0, UNKNOWN
    taken = int(torch.cuda.memory_reserved())
    # Plain in newer versions of torch, with the driver's prefix in none.
    uuid = str(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", ""))
    return taken, gauge_of(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}").share_used() if uuid else UNKNOWN


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
