"""The report to the user: what was done to the script, each line printed once, by worker 0."""

from __future__ import annotations

import sys


class ScriptReport:
    """Prints lines about what ``--auto`` did and could not do."""

    def __init__(self, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._said: set[str] = set()

    def say(self, line: str) -> None:
        """Print a line unless it was printed before."""
        if self._is_shown and line not in self._said:
            print(f"poseidon auto: {line}", file=sys.stderr, flush=True)
        self._said.add(line)
