"""Simulated time: a deterministic event queue."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Agenda:
    """A queue of future calls; calls due at the same time run in the order they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._entries: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        """Calls added so far, as a measure of a simulation's cost."""

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Run ``call`` when ``seconds`` of simulated time have passed."""
        heapq.heappush(self._entries, (self.now + seconds, self.count, call))
        self.count += 1

    def run(self) -> None:
        """Run until the queue is empty."""
        while self._entries:
            self.now, _, call = heapq.heappop(self._entries)
            call()
