"""What can limit a job, and what is said of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

STARVED = 0.15
"""Of the time: if training threads wait this much for a processor everywhere, other figures say little."""
STEADY = 0.7
"""Share of the records in which a machine must be the slowest to be named for sure."""


class Cause(Enum):
    """What limits a job."""

    STARTING = "starting"
    HUNG = "hung"
    SILENT = "silent"
    STALLS = "stalls"
    BUSY = "busy"
    SLOW = "slow"
    INPUT = "input"
    LINK = "link"
    LOSS = "loss"
    WIRE = "wire"
    COMPUTATION = "computation"
    UNCLEAR = "unclear"


@dataclass(frozen=True)
class JobVerdict:
    """What limits a job now."""

    cause: Cause
    text: str
    next_step: str = ""
    host: str = ""
    """The machine to look at; empty: all alike."""
    rank: int | None = None
    is_sure: bool = False
    waited_s: float = 0.0
    """What the others have waited for it in the window, each."""

    def __str__(self) -> str:
        doubt = "" if self.is_sure or self.cause in (Cause.STARTING, Cause.UNCLEAR) else "probably "
        return f"{doubt}{self.text}" + (f": {self.next_step}" if self.next_step else "")


def as_ms(seconds: float) -> str:
    """Return a time for people to read."""
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
