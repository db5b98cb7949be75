"""Splits a worker's output into lines. Pure.

A progress bar redraws itself with carriage returns and no line end. Such drafts are kept apart from lines: they show
how far the worker is, but only the last one is worth keeping.
"""

from __future__ import annotations

from collections.abc import Iterator

LONGEST = 1 << 16
"""Longer lines are cut."""


class LineCutter:
    """Takes bytes as they arrive, yields ``(text, is_draft)``."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> Iterator[tuple[str, bool]]:
        """Yield the lines and the newest draft that are complete now."""
        *lines, rest = (self._pending + data).split(b"\n")
        for line in lines:
            yield _last_state(line), False
        while len(rest) > LONGEST:
            yield _text(rest[:LONGEST]), False
            rest = rest[LONGEST:]
        # What was overwritten will never be seen again.
        drawn, is_drawn, rest = rest.rpartition(b"\r")
        if is_drawn:
            draft = drawn.rpartition(b"\r")[2]
            if draft:
                yield _text(draft), True
            # The last state stays until it is overwritten: it may turn out to be the final one.
            self._pending = rest or draft + b"\r"
        else:
            self._pending = rest

    def end(self) -> Iterator[tuple[str, bool]]:
        """Yield the last text, which has no line end."""
        if self._pending.strip(b"\r"):
            yield _last_state(self._pending), False
        self._pending = b""


def _last_state(line: bytes) -> str:
    return _text(line.rstrip(b"\r").rpartition(b"\r")[2])


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
