"""What a worker reports to the launcher: step, loss, speed, and what it is doing.

Any training loop may call ``poseidon.job.tell.tell(step=12, loss=0.3)``; the engine does so on its own. Without a
launcher it is a no-op.
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
"""Writes to a pipe are atomic up to this many bytes, so threads need no lock."""


def tell(**facts: Any) -> bool:
    """Report facts to the launcher: ``step``, ``doing``, ``loss``, ``samples_per_s``, ``steps_left``.

    Never blocks, on any thread; if the launcher does not read, the facts are lost. Return whether they are not.
    """
    name = settings.REPORT.read()
    if not name:
        return False
    line = json.dumps(facts).encode() + b"\n"
    # A child of this worker inherits the variable but maybe not the pipe: the descriptor may be any file of the child.
    with contextlib.suppress(OSError, ValueError):
        pipe = int(name.partition(":")[0])
        if name_pipe(pipe) == name and len(line) <= _LONGEST:
            os.set_blocking(pipe, False)
            return os.write(pipe, line) == len(line)
    return False


def name_pipe(pipe: int) -> str:
    """Return the value of the variable for a pipe."""
    return f"{pipe}:{os.fstat(pipe).st_ino}"


def parse(line: bytes) -> dict[str, Any]:
    """Return the facts in a line, or none if the line is not ours. Pure."""
    try:
        facts = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}
