"""Show the log of nets and solvers as Caffe does, so that programs that read Caffe's logs can read ours."""

from __future__ import annotations

import logging
import sys
from datetime import datetime

log_of_nets = logging.getLogger("poseidon.caffe")

_LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
"""Python's levels in the order in which Caffe counts them."""


class GlogFormatter(logging.Formatter):
    """``I0131 23:59:59.123456  4321 solver.py:120] text``: level, month and day, time, process, place."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        letter = "F" if record.levelno >= logging.CRITICAL else record.levelname[0]
        when = datetime.fromtimestamp(record.created).strftime("%m%d %H:%M:%S.%f")
        place = f"{record.filename}:{record.lineno}"
        return f"{letter}{when} {record.process or 0:5} {place}] {super().format(record)}"


def show(min_level: int = 0) -> None:
    """Write the log to stderr from now on; 0 shows everything, 1 warnings, 2 errors, 3 nothing but the fatal."""
    if not any(isinstance(handler.formatter, GlogFormatter) for handler in log_of_nets.handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(GlogFormatter())
        log_of_nets.addHandler(handler)
    log_of_nets.setLevel(_LEVELS[min(max(min_level, 0), len(_LEVELS) - 1)])


def hide() -> None:
    """Stop what ``show`` began."""
    for handler in [handler for handler in log_of_nets.handlers if isinstance(handler.formatter, GlogFormatter)]:
        log_of_nets.removeHandler(handler)
    log_of_nets.setLevel(logging.NOTSET)
