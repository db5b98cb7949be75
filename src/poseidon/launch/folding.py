"""Folds tracebacks that only say that another worker was lost: the terminal gets a line, the log has all. Pure.

When one worker fails, all others fail with it, each with a page of traceback; the one that explains anything must not
drown in them.
"""

from __future__ import annotations

from poseidon.launch.cause import is_symptom_text, strip_rank

_LONGEST = 400
"""A traceback of more lines is shown as it comes."""


class TracebackFolder:
    """Takes one worker's lines on stderr, returns those to show. A traceback is held back until its last line."""

    def __init__(self) -> None:
        self._held: list[str] = []

    def feed(self, line: str) -> list[str]:
        """Return the lines to show now."""
        text = strip_rank(line)
        if not self._held:
            if text.startswith("Traceback (most recent call last)"):
                self._held = [line]
                return []
            return [line]
        self._held.append(line)
        if len(self._held) > _LONGEST:
            return self.flush()
        # Calls are indented; the first line that is not says what was raised.
        if text.startswith((" ", "\t")) or not text.strip():
            return []
        held = self.flush()
        if is_symptom_text(text):
            return [f"{text} ({len(held) - 1} more lines in its log)"]
        return held

    def flush(self) -> list[str]:
        """Return what is held back, whatever it is."""
        held, self._held = self._held, []
        return held
