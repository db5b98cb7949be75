"""The messages between launcher and agents: one JSON object per line, after a mark. Pure.

The mark distinguishes them from whatever a login shell on the other side prints.
"""

from __future__ import annotations

import json
from typing import Any

MARK = b"\x1e"
ALIVE_S = 1.5
"""Seconds between two heartbeats, in both directions."""
SILENCE_S = 8.0
"""After this long without one, the other side is considered gone."""
LOCAL_SILENCE_S = 300.0
"""The same on the launcher's own machine, outside elastic jobs: a pipe's end tells that the other side is gone, and
silence mostly that the machine is busy."""
ELASTIC_SILENCE_S = 2.7
"""The same in elastic jobs, where a machine that was given up too early can come back: 3 s until all have heard."""

Message = dict[str, Any]

# From the launcher:
PREPARE = "prepare"
"""directory, script, interface, via_ssh, silence_s, ends: end what has these marks, look around, answer READY or
REFUSED."""
PORT = "port"
"""address, wanted: find a free port there; answered with the same kind and the port, or REFUSED."""
START = "start"
"""run, directory, address, workers: start these workers; answered with STARTED."""
SIGNAL = "signal"
"""number: pass a signal on to every worker."""
NEWS = "news"
"""rank, news: pass this on to a worker of an elastic job."""
KILL = "kill"
"""rank: end one worker at once."""
STOP = "stop"
"""grace_s: end all workers, kill what is left after the grace time, answer ENDED and exit."""

# From an agent:
READY = "ready"
REFUSED = "refused"
STARTED = "started"
OUTPUT = "output"
"""rank, is_error, text, is_draft: one line that a worker wrote, or the state of its progress bar."""
REPORT = "report"
"""rank, facts: a worker's report about itself, see :mod:`poseidon.job.tell`."""
STOPPED = "stopped"
"""stopped, ranks: which of a machine's workers are stopped processes; from machines of an elastic job."""
EXIT = "exit"
"""rank, status (negative: a signal)."""
ENDED = "ended"
"""left: processes of the job that could not be ended."""

# From both:
ALIVE = "alive"


def beat_s(silence_s: float) -> float:
    """Return the seconds between heartbeats where so long a silence means an end."""
    return ALIVE_S * min(1.0, silence_s / SILENCE_S)


def patience_s(silence_s: float, is_local: bool) -> float:
    """Return how long an agent may be silent, in a job where machines may be so for ``silence_s``."""
    return LOCAL_SILENCE_S if is_local and silence_s >= SILENCE_S else silence_s


def pack(kind: str, **content: Any) -> bytes:
    """Return a message as a line."""
    return MARK + json.dumps({"kind": kind, **content}, separators=(",", ":")).encode() + b"\n"


def unpack(line: bytes) -> Message | None:
    """Return the message in a line, None if the line is not ours."""
    if not line.startswith(MARK):
        return None
    try:
        message = json.loads(line[len(MARK) :])
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and isinstance(message.get("kind"), str) else None
