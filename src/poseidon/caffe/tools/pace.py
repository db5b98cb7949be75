"""How fast a long conversion goes, and how long it will take."""

from __future__ import annotations

import time
from collections.abc import Callable

_EVERY_S = 10.0


class Pace:
    """Counts what is done of a known number of things, and says something every few seconds."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._done = 0
        self._began = self._said = clock()

    def count(self) -> str | None:
        """Count one; return a line to show when it is time for one."""
        self._done += 1
        now = self._clock()
        if now - self._said < _EVERY_S:
            return None
        self._said = now
        rate = self._done / (now - self._began)
        left_s = round((self._total - self._done) / rate)
        return (
            f"{self._done / self._total:.1%} done, {rate:.0f} images/s, about "
            f"{left_s // 3600}:{left_s // 60 % 60:02d}:{left_s % 60:02d} left"
        )
