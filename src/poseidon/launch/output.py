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
from poseidon.launch.folding import TracebackFolder
from poseidon.launch.places import Place
from poseidon.observe.folder import RunFolder

_COLOURS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)
_CLEAR_LINE, _UP = "\r\x1b[2K", "\x1b[1A"
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
        self,
        places: Sequence[Place],
        log_dir: Path | None,
        out: TextIO | None = None,
        err: TextIO | None = None,
        folder: RunFolder | None = None,
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
        self._folder = folder
        self._said: list[str] = []
        """What was said before there was a folder."""
        self._is_unlogged = False
        """A log could not be written; the job goes on without."""
        self._logs: list[IO[bytes]] = []
        self._folders = [TracebackFolder() for _ in places]

    def add(self, place: Place) -> None:
        """Take in one more worker."""
        self._places = [*self._places, place]
        self._prefixes = prefixes(self._places, wants_colour(self._out, os.environ))
        self._error_prefixes = prefixes(self._places, wants_colour(self._err, os.environ))
        self._folders.append(TracebackFolder())
        if self._logs and self._log_dir is not None:
            try:
                self._logs.append((self._log_dir / f"worker-{place.rank}.log").open("ab", buffering=0))
            except OSError as error:
                self._stop_logging(error)

    def open_logs(self, restart: int = 0) -> None:
        """Create the log files, when everything is ready: a job that cannot start leaves none."""
        if self._log_dir is None or self._is_unlogged:
            return
        if self._logs:
            self._mark_logs(f"--- restart {restart}, {time.strftime('%Y-%m-%d %H:%M:%S')} ---")
            return
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            if self._folder is not None:
                self._folder.claim()
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

        if self._folder is not None:
            self._folder.open()
            for text in self._said:
                self._folder.say(text)
            self._said.clear()

    def _mark_logs(self, text: str) -> None:
        try:
            for log in self._logs:
                write_whole(log, f"{text}\n".encode())
        except OSError as error:
            self._stop_logging(error)

    def line(self, rank: int, text: str, is_error: bool) -> None:
        """Show one line of a worker; a traceback that only reports the loss of another becomes one line."""
        # Only if it can be read in the log.
        self._show(rank, self._folders[rank].feed(text) if is_error and self._logs else [text], is_error)
        if self._logs:
            try:
                write_whole(self._logs[rank], f"{text}\n".encode(errors="replace"))
            except OSError as error:
                self._stop_logging(error)

    def flush(self, rank: int) -> None:
        """Show what is held back of a worker that has ended."""
        self._show(rank, self._folders[rank].flush(), is_error=True)

    def _show(self, rank: int, lines: Sequence[str], is_error: bool) -> None:
        if lines:
            self._erase_status()
        stream, prefix = (self._err, self._error_prefixes) if is_error else (self._out, self._prefixes)
        for text in lines:
            self._write(stream, f"{prefix[rank]}{text}\n")

    def say(self, text: str, is_logged: bool = True) -> None:
        """Show a message of the launcher itself; secrets are not logged."""
        self._erase_status()
        self._write(self._err, f"poseidon run: {text}\n")
        if self._folder is None or not is_logged:
            return
        if self._folder.is_open:
            self._folder.say(text)
        else:
            self._said.append(text)

    def status(self, text: str) -> None:
        """Draw the status, a line or two; only on a terminal, and not too often."""
        if not self._is_terminal or time.monotonic() - self._drawn_at < _REDRAW_S:
            return
        erase = self._erasing()
        self._drawn_at = time.monotonic()
        self._status = text
        self._write(self._err, f"{erase or _CLEAR_LINE}{text}")

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
        for place in self._places:
            self.flush(place.rank)
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
            self._write(self._err, self._erasing())
            self._status = ""
            self._drawn_at = 0.0

    def _erasing(self) -> str:
        """Return what removes the status, and leaves the cursor where it began."""
        return _CLEAR_LINE + (_UP + _CLEAR_LINE) * self._status.count("\n") if self._status else ""
