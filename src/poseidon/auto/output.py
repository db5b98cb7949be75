"""Output of all workers but worker 0: the last lines are kept and shown only if the worker fails."""

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
        """The encoding of a terminal."""
        return "utf-8"

    def writable(self) -> bool:
        """Return True: text may be written."""
        return True

    def write(self, text: str) -> int:
        """Keep the last lines of the text."""
        *complete, self._open = (self._open + text).split("\n")
        # A progress bar rewrites its line: only the last state counts.
        self._lines.extend(line.rsplit("\r", 1)[-1] for line in complete)
        self._open = self._open.rsplit("\r", 1)[-1]
        return len(text)

    def last_lines(self) -> list[str]:
        """Return the last lines written."""
        return [*self._lines, self._open] if self._open else list(self._lines)


def silence(patches: Patches) -> Tail:
    """Redirect this process's stdout and stderr to the returned tail."""
    tail = Tail()
    patches.replace(sys, "stdout", tail)
    patches.replace(sys, "stderr", tail)
    return tail
