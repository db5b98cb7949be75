"""What the user sees of all workers: their lines with coloured prefixes, a log file each, a live status line."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TextIO

from poseidon.errors import ConfigError
from poseidon.files import is_full, write_whole
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
        self._is_unlogged = False
        """A log could not be written; the job goes on without."""
        self._logs: list[IO[bytes]] = []

    def open_logs(self) -> None:
        """Create the log files, when everything is ready: a job that cannot start leaves none."""
        if self._log_dir is None or self._logs or self._is_unlogged:
            return
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            for place in self._places:
                # Unbuffered: a full disk is noticed at the line that it lacks the space for.
                self._logs.append((self._log_dir / f"worker-{place.rank}.log").open("ab", buffering=0))
        except OSError as error:
            if is_full(error):
                self._stop_logging(error)
                return
            raise ConfigError(
                f"cannot write the log files in {self._log_dir}: {error.strerror}; choose another --log-dir"
            ) from None

    def line(self, rank: int, text: str, is_error: bool) -> None:
        """Show one line of a worker."""
        self._erase_status()
        stream, prefix = (self._err, self._error_prefixes) if is_error else (self._out, self._prefixes)
        self._write(stream, f"{prefix[rank]}{text}\n")
        if self._logs:
            try:
                write_whole(self._logs[rank], f"{text}\n".encode(errors="replace"))
            except OSError as error:
                self._stop_logging(error)

    def say(self, text: str) -> None:
        """Show a message of the launcher itself."""
        self._erase_status()
        self._write(self._err, f"poseidon run: {text}\n")

    def status(self, text: str) -> None:
        """Draw the status line; only on a terminal, and not too often."""
        if not self._is_terminal or time.monotonic() - self._drawn_at < _REDRAW_S:
            return
        self._drawn_at = time.monotonic()
        self._status = text
        self._write(self._err, f"{_CLEAR_LINE}{text}")

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
        self._close_logs()

    def _stop_logging(self, error: OSError) -> None:
        self._is_unlogged = True
        self._close_logs()
        self.say(f"warning: the logs in {self._log_dir} end here ({error.strerror}); the job goes on without them")

    def _close_logs(self) -> None:
        for log in self._logs:
            with contextlib.suppress(OSError):
                log.close()
        self._logs = []

    def _write(self, stream: TextIO, text: str) -> None:
        try:
            stream.write(text)
            stream.flush()
        except OSError as error:
            # The reader has seen enough (`| head`), the terminal is gone, or the file is on a full disk; the job and
            # its logs go on.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
            if error.errno not in (errno.EPIPE, errno.EIO) and stream is not self._err:
                self.say(f"warning: the output cannot be written any more ({error.strerror}); the job goes on without")

    def _erase_status(self) -> None:
        if self._status:
            self._write(self._err, _CLEAR_LINE)
            self._status = ""
            self._drawn_at = 0.0
