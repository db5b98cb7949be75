"""Output of the workers other than the first: kept in short and shown only if the worker fails."""

from __future__ import annotations

import collections
import io
import sys

from poseidon.following.patches import Patches

_KEPT_LINES = 20


class Tail(io.TextIOBase):
    """A text stream that remembers its last lines and shows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._open = ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """As a terminal would answer."""
        return "utf-8"

    def writable(self) -> bool:
        """Tell that text may be written."""
        return True

    def write(self, text: str) -> int:
        """Take text in."""
        *complete, self._open = (self._open + text).split("\n")
        # A progress bar writes its line again and again: only the last state counts.
        self._lines.extend(line.rsplit("\r", 1)[-1] for line in complete)
        self._open = self._open.rsplit("\r", 1)[-1]
        return len(text)

    def last_lines(self) -> list[str]:
        """Return what was written last."""
        return [*self._lines, self._open] if self._open else list(self._lines)


def silence(patches: Patches) -> Tail:
    """Replace stdout and stderr of this process; what they would have shown ends in the returned tail."""
    tail = Tail()
    patches.replace(sys, "stdout", tail)
    patches.replace(sys, "stderr", tail)
    return tail
