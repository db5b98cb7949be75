"""What the user sees of all workers: their lines with coloured prefixes, a log file each, a live status line."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from poseidon.errors import ConfigError
from poseidon.launch.places import Place

_COLOURS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)
_CLEAR_LINE = "\r\x1b[2K"
_REDRAW_S = 0.2


def wants_colour(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Return whether to use colours: on a terminal, unless NO_COLOR is set or the terminal is dumb."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def prefixes(places: Sequence[Place], colour: bool) -> list[str]:
    """Return the prefix of each worker's lines: its rank and host, all of one width. Pure."""
    several = len({place.host for place in places}) > 1
    names = [f"{place.rank} {place.host}" if several else f"{place.rank}" for place in places]
    width = max(map(len, names))
    if not colour:
        return [f"[{name:<{width}}] " for name in names]
    return [f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m[{name:<{width}}]\x1b[0m " for rank, name in enumerate(names)]


class JobOutput:
    """Writes workers' lines to this process's streams and to a log file per worker. Not thread-safe."""

    def __init__(
        self, places: Sequence[Place], log_dir: Path | None, out: TextIO | None = None, err: TextIO | None = None
    ) -> None:
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._prefixes = prefixes(places, wants_colour(self._out, os.environ))
        self._error_prefixes = prefixes(places, wants_colour(self._err, os.environ))
        self._is_terminal = self._err.isatty() and os.environ.get("TERM") != "dumb"
        self._status = ""
        self._drawn_at = 0.0
        self._places = places
        self._log_dir = log_dir
        self._logs: list[TextIO] = []

    def open_logs(self) -> None:
        """Create the log files, when everything is ready: a job that cannot start leaves none."""
        if self._log_dir is not None and not self._logs:
            self._logs = [_open_log(self._log_dir / f"worker-{place.rank}.log") for place in self._places]

    def line(self, rank: int, text: str, is_error: bool) -> None:
        """Show one line of a worker."""
        self._erase_status()
        stream, prefix = (self._err, self._error_prefixes) if is_error else (self._out, self._prefixes)
        _write(stream, f"{prefix[rank]}{text}\n")
        if self._logs:
            self._logs[rank].write(f"{text}\n")
            self._logs[rank].flush()

    def say(self, text: str) -> None:
        """Show a message of the launcher itself."""
        self._erase_status()
        _write(self._err, f"poseidon run: {text}\n")

    def status(self, text: str) -> None:
        """Draw the status line; only on a terminal, and not too often."""
        if not self._is_terminal or time.monotonic() - self._drawn_at < _REDRAW_S:
            return
        self._drawn_at = time.monotonic()
        self._status = text
        _write(self._err, f"{_CLEAR_LINE}{text}")

    @property
    def is_live(self) -> bool:
        """Whether there is a terminal for the status line."""
        return self._is_terminal

    @property
    def width(self) -> int:
        """The terminal's width."""
        return shutil.get_terminal_size().columns

    def close(self) -> None:
        """Remove the status line and close the logs."""
        self._erase_status()
        for log in self._logs:
            log.close()

    def _erase_status(self) -> None:
        if self._status:
            _write(self._err, _CLEAR_LINE)
            self._status = ""
            self._drawn_at = 0.0


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        # The reader has seen enough (`| head`), or the terminal is gone; the job and its logs go on.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open_log(path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the log file {path}: {error.strerror}; choose another --log-dir") from None
