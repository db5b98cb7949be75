"""What a worker tells the launcher about itself: step, loss, speed, and what it is doing.

``poseidon.job.tell.tell(step=12, loss=0.3)`` may be called from any training loop; the engine does so by itself.
Without a launcher that listens it does nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from poseidon.job import settings

VARIABLE = settings.REPORT.name
"""Environment variable that names the pipe to the launcher: file descriptor and inode."""

_LONGEST = 4096
"""Up to this many bytes are written to a pipe as one piece, so that threads need not take turns."""


def tell(**facts: Any) -> None:
    """Tell the launcher these facts: ``step``, ``doing``, ``loss``, ``samples_per_s``.

    Returns at once, from any thread; a launcher that does not read makes it lose the facts, never wait.
    """
    name = settings.REPORT.read()
    if not name:
        return
    line = json.dumps(facts).encode() + b"\n"
    # A child of this worker inherits the variable but perhaps not the pipe: its number may be any file of the child's.
    with contextlib.suppress(OSError, ValueError):
        pipe = int(name.partition(":")[0])
        if name_pipe(pipe) == name and len(line) <= _LONGEST:
            os.set_blocking(pipe, False)
            os.write(pipe, line)


def name_pipe(pipe: int) -> str:
    """Return the variable's value for a pipe."""
    return f"{pipe}:{os.fstat(pipe).st_ino}"


def parse(line: bytes) -> dict[str, Any]:
    """Return the facts of a line; none for a line that is not ours. Pure."""
    try:
        facts = json.loads(line)
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}
