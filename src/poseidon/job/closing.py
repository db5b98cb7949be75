"""The end of the process: one exit hook closes whatever is still open, in one order.

A script may end in the middle of anything. Other workers may still wait for messages queued here, and a thread that is
inside PyTorch's C++ code while the interpreter shuts down aborts the process. So whoever starts threads or holds work
back registers how to end them, and cancels the registration when closed by hand.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable
from enum import IntEnum

_log = logging.getLogger(__name__)


class Stage(IntEnum):
    """When something is closed at exit: stage by stage, and within a stage the last registered first."""

    STEPS = 0
    """Optimizer steps under way: other workers cannot finish theirs without this one."""
    EXCHANGES = 1
    """Queues and threads of routes and servers."""
    TABLES = 2
    """Tables, which wait until the other workers no longer need them."""
    WATCHES = 3
    """Heartbeats: until here the others must see this worker alive."""
    SETTLING = 4
    """Whatever must come after everything else."""


class Closing:
    """Callbacks ordered by stage. Any thread may register and cancel."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._open: dict[int, tuple[Stage, Callable[[], None]]] = {}

    def register(self, stage: Stage, close: Callable[[], None]) -> Callable[[], None]:
        """Call ``close`` at exit unless the returned function is called first.

        ``close`` is kept alive until then, and with it the object it belongs to.
        """
        number = next(self._numbers)
        with self._lock:
            self._open[number] = (stage, close)

        def cancel() -> None:
            with self._lock:
                self._open.pop(number, None)

        return cancel

    def close(self) -> None:
        """Close everything that is open, stage by stage. A failure is logged and does not keep the rest open."""
        while True:
            with self._lock:
                if not self._open:
                    return
                number = min(self._open, key=lambda each: (self._open[each][0], -each))
                _, close = self._open.pop(number)
            try:
                close()
            except Exception:
                _log.exception("closing at exit failed")


_PROCESS = Closing()


def at_exit(stage: Stage, close: Callable[[], None]) -> Callable[[], None]:
    """Register with the process's own exit hook; see :meth:`Closing.register`."""
    # Exit handlers run last in, first out. Moving ours to the end each time makes it run before those of libraries that
    # the objects registered here still use.
    atexit.unregister(_PROCESS.close)
    atexit.register(_PROCESS.close)
    return _PROCESS.register(stage, close)


def end_after_hooks(status: int) -> None:
    """Make this process, which is about to exit, end as soon as its exit hooks have run.

    What the interpreter and PyTorch do after them, freeing one object at a time what the kernel frees at once, takes
    seconds on a busy machine, and a thread that is still inside a library can make it abort or hang.
    """

    def end() -> None:
        # The last registered runs first, so none of the others has run yet.
        atexit.unregister(end)
        atexit._run_exitfuncs()
        os._exit(status if _flush_output() else status or _UNWRITTEN)

    atexit.register(end)


_UNWRITTEN = 120
"""Python's own exit status when its last output could not be written."""


def _flush_output() -> bool:
    """Return whether all output could be written."""
    is_written = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (OSError, ValueError):
            is_written = False
    return is_written


def close_now() -> None:
    """Close everything before the process ends: another launcher is about to take the process group away."""
    _PROCESS.close()
