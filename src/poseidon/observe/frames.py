"""Where other threads of this process are: their Python calls, read from outside."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType
from typing import NamedTuple

IS_UNSAFE = (3, 11) <= sys.version_info[:3] < (3, 11, 9)
"""In these versions reading frames may collect garbage half-way, which lets other threads run meanwhile. Then the
interpreter waits for its own lock for ever, or takes something else for a frame (python/cpython#106883)."""

_ONE_READER = threading.Lock()


class FrameCall(NamedTuple):
    """One call of a thread's stack."""

    path: str
    """The file of its code."""
    line: int
    name: str
    """Of the function."""
    number: int
    """The same for as long as the call lasts."""


def calls_of(thread: int) -> list[FrameCall]:
    """Return the calls in which a thread is, the innermost first; none if there is no such thread."""
    if not IS_UNSAFE:
        return _read(thread)
    with _ONE_READER:
        collects = gc.isenabled()
        gc.disable()
        try:
            return _read(thread)
        finally:
            if collects:
                gc.enable()


def _read(thread: int) -> list[FrameCall]:
    found = []
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        code = frame.f_code
        found.append(FrameCall(code.co_filename, frame.f_lineno, code.co_name, id(frame)))
        frame = frame.f_back
    return found
