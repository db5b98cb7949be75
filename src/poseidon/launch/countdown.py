"""How long a job will still take, where somebody has said how many steps it has. Pure."""

from __future__ import annotations

import collections
import re

_GOAL = re.compile(r"\b(?:step|iter|iteration|batch)\b\s*[:=#\[]?\s*(\d+)\s*(?:/|of)\s*(\d+)", re.IGNORECASE)
_POINT_S = 1.0
_POINTS = 120
"""The speed is that of the last two minutes, or longer where steps are slow."""


class Countdown:
    """Takes how many steps are done and how many there are, of any count that grows evenly."""

    def __init__(self) -> None:
        self.of = ""
        """What ends then: ``epoch 3``, or, if empty, the training."""
        self._goal: float | None = None
        self._points: collections.deque[tuple[float, float]] = collections.deque(maxlen=_POINTS)

    def aim(self, goal: float, of: str = "") -> None:
        """Expect the end when this many are done."""
        self._goal, self.of = goal, of

    def note(self, done: float, now: float) -> None:
        """Take how many are done now."""
        if self._points and done < self._points[-1][1]:
            self._points.clear()  # it has begun again
        if self._points and now - self._points[-1][0] < _POINT_S:
            return
        # What stands still would be forgotten, and with it the speed.
        if not self._points or done > self._points[-1][1]:
            self._points.append((now, done))

    def left_s(self, now: float) -> float | None:
        """Return the seconds that are left; None if nobody knows."""
        if self._goal is None or len(self._points) < 2:
            return None
        (began, first), (at, last) = self._points[0], self._points[-1]
        remaining_s = (self._goal - last) * (at - began) / (last - first)
        return max(0.0, remaining_s - (now - at))


def find_goal(line: str) -> tuple[int, int] | None:
    """Return how many steps are done, and of how many, if a printed line says so: ``step 12/500``."""
    found = _GOAL.search(line)
    if found is None:
        return None
    done, total = int(found[1]), int(found[2])
    return (done, total) if done <= total and total > 1 else None


def clock(seconds: float) -> str:
    """Return a time as 0:42 or 12:05:00."""
    whole = int(seconds)
    if whole >= 3600:
        return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
    return f"{whole // 60}:{whole % 60:02d}"
