"""Caffe's console: log lines in the form of Google's logging library, and a progress bar where a person is watching.

Programs that read Caffe's logs expect the prefix (level, month and day, time, process, source file and line), so the
lines of the logger ``poseidon.caffe`` get it here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TextIO

from poseidon import files

_LEVELS = {logging.INFO: "I", logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "F"}
_MINIMUM = [logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL]
_SOURCES = {"training": "caffe", "scoring": "caffe"}
"""The file that logs a line in Caffe, for modules of ours with other names."""
_REDRAW_S = 0.1
_BAR_CELLS = 24


class GlogFormatter(logging.Formatter):
    """Formats a record as ``I1115 10:00:00.123456 12345 solver.cpp:239] text``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; a text of several lines gets one prefix, as in Caffe."""
        when = datetime.fromtimestamp(record.created)
        level = _LEVELS.get(record.levelno, "I")
        # Some programs look for Caffe's own file names; most of ours differ only in the extension.
        stem = Path(record.pathname).stem
        source = f"{_SOURCES.get(stem, stem)}.cpp:{record.lineno}"
        return f"{level}{when:%m%d %H:%M:%S.%f} {record.process or 0:5d} {source}] {record.getMessage()}".rstrip("\n")


class ProgressBar:
    """One line at the bottom of a terminal that shows how far training has come; silent anywhere else."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_on = stream.isatty()
        self._line = ""
        self._drawn_at = 0.0
        self._started: tuple[int, float] | None = None

    def update(self, iteration: int, total: int, loss: float) -> None:
        """Show the state; called every iteration, drawn a few times a second."""
        now = time.monotonic()
        if self._started is None:
            self._started = (iteration, now)
        if not self._is_on or now - self._drawn_at < _REDRAW_S:
            return
        first, began = self._started
        rate = (iteration - first) / (now - began) if now > began else 0.0
        self._line = progress_line(iteration, total, rate, loss)
        self._drawn_at = now
        self.draw()

    def draw(self) -> None:
        """Redraw the line."""
        if self._line:
            self._stream.write(f"\r{self._line}\x1b[K")
            self._stream.flush()

    def clear(self) -> None:
        """Erase the line to make room for a log line."""
        if self._line:
            self._stream.write("\r\x1b[K")

    def close(self) -> None:
        """Erase the line for good."""
        self.clear()
        self._line = ""


def progress_line(iteration: int, total: int, rate: float, loss: float) -> str:
    """Return the bar's text. Pure."""
    done = min(1.0, iteration / total) if total else 0.0
    filled = round(done * _BAR_CELLS)
    left_s = (total - iteration) / rate if rate else 0.0
    clock = f"{int(left_s) // 3600}:{int(left_s) // 60 % 60:02d}:{int(left_s) % 60:02d}"
    bar = "#" * filled + "." * (_BAR_CELLS - filled)
    return f"{iteration}/{total} [{bar}] {done:4.0%}  {rate:.1f} iter/s  {clock} left  loss {loss:.4g}"


class _Handler(logging.StreamHandler[TextIO]):
    def __init__(self, stream: TextIO, bar: ProgressBar) -> None:
        super().__init__(stream)
        self._bar = bar

    def emit(self, record: logging.LogRecord) -> None:
        self._bar.clear()
        super().emit(record)
        self._bar.draw()


class _Copy(logging.FileHandler):
    """A copy of the log in a file; if the disk is full, it ends with one warning, and training goes on."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802 - logging's interface
        error = sys.exc_info()[1]
        logger = logging.getLogger("poseidon.caffe")
        if not isinstance(error, OSError) or self not in logger.handlers:
            return
        logger.removeHandler(self)
        logger.warning("The log in %s ends here (%s)", self.baseFilename, error.strerror)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


@contextlib.contextmanager
def console(is_root: bool = True, stream: TextIO | None = None, log_dir: str | None = None) -> Iterator[ProgressBar]:
    """Show the logger's lines while the context lasts; workers other than the first show warnings only.

    ``GLOG_minloglevel`` (0 to 3) in the environment hides the lower levels. ``log_dir`` gets a copy of the log.
    """
    target = stream or sys.stderr
    bar = ProgressBar(target)
    logger = logging.getLogger("poseidon.caffe")
    handlers: list[logging.Handler] = [_Handler(target, bar)]
    if log_dir and is_root:
        try:
            handlers.append(_Copy(Path(log_dir) / "caffe.INFO", mode="w"))
        except OSError as error:
            raise files.cannot("write", "log", Path(log_dir) / "caffe.INFO", error) from None
    before = (logger.level, logger.propagate)
    logger.setLevel(max(_minimum_level(), logging.INFO if is_root else logging.WARNING))
    logger.propagate = False
    for handler in handlers:
        handler.setFormatter(GlogFormatter())
        logger.addHandler(handler)
    try:
        yield bar
    finally:
        bar.close()
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(before[0])
        logger.propagate = before[1]


def _minimum_level() -> int:
    text = os.environ.get("GLOG_minloglevel", "0")  # noqa: SIM112 - glog's own spelling
    return _MINIMUM[min(int(text), len(_MINIMUM) - 1)] if text.isdigit() else logging.INFO
