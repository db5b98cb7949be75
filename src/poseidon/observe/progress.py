"""A progress bar: one line that moves on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_WIDTH = 28


class Progress:
    """Shows the progress of a loop of known length; a context manager: call :meth:`update` once per round."""

    def __init__(self, total: int, label: str, stream: TextIO | None = None, is_shown: bool = True) -> None:
        self._total = max(total, 1)
        self._label = label
        self._stream = sys.stderr if stream is None else stream
        self._is_shown = is_shown
        self._is_terminal = self._stream.isatty()
        self._done = 0
        self._started = time.monotonic()
        self._last_drawn = 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown and self._is_terminal:
            self._stream.write("\n")
            self._stream.flush()

    def update(self, note: str = "") -> None:
        """Count one round and draw, at most ten times a second (not on a terminal: every quarter)."""
        self._done += 1
        if not self._is_shown:
            return
        is_last = self._done == self._total
        now = time.monotonic()
        if self._is_terminal:
            if is_last or now - self._last_drawn > 0.1:
                self._last_drawn = now
                self._stream.write(f"\r\x1b[2K{self.line(now - self._started, note)}")
                self._stream.flush()
        elif is_last or self._done % max(1, self._total // 4) == 0:
            self._stream.write(self.line(now - self._started, note) + "\n")
            self._stream.flush()

    def line(self, elapsed_s: float, note: str) -> str:
        """Return the text for the current state."""
        filled = round(_WIDTH * self._done / self._total)
        bar = "#" * filled + "." * (_WIDTH - filled)
        left_s = elapsed_s / self._done * (self._total - self._done) if self._done else 0.0
        text = f"{self._label} [{bar}] {self._done}/{self._total}  {elapsed_s:.0f} s, {left_s:.0f} s left"
        return f"{text}  {note}" if note else text
