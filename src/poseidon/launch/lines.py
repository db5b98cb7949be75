"""Cuts what a worker writes into lines. Pure.

A progress bar draws itself over and over with carriage returns and no line end. Such drafts are told apart from
lines: they show how far the worker is, but only the last one is worth keeping.
"""

from __future__ import annotations

from collections.abc import Iterator

LONGEST = 1 << 16
"""A line longer than this is cut."""


class LineCutter:
    """Takes bytes as they come, gives ``(text, is_draft)``."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> Iterator[tuple[str, bool]]:
        """Yield the lines, and the newest draft, that are complete now."""
        *lines, rest = (self._pending + data).split(b"\n")
        for line in lines:
            yield _last_state(line), False
        while len(rest) > LONGEST:
            yield _text(rest[:LONGEST]), False
            rest = rest[LONGEST:]
        # What was drawn over will never be seen again.
        drawn, is_drawn, rest = rest.rpartition(b"\r")
        if is_drawn:
            draft = drawn.rpartition(b"\r")[2]
            if draft:
                yield _text(draft), True
            # The last state stays until something is drawn over it: it may prove to be the last of all.
            self._pending = rest or draft + b"\r"
        else:
            self._pending = rest

    def end(self) -> Iterator[tuple[str, bool]]:
        """Yield what came last without a line end."""
        if self._pending.strip(b"\r"):
            yield _last_state(self._pending), False
        self._pending = b""


def _last_state(line: bytes) -> str:
    return _text(line.rstrip(b"\r").rpartition(b"\r")[2])


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
