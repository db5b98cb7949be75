"""What this process sends by each route, and what waits to leave: asked of whoever counts it anyway.

Routes and wires add up what they send, and a recorder asks them a few times a second. One that is gone is forgotten;
what it sent stays counted.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

Sent = Callable[[], dict[str, int]]
"""Returns the bytes sent so far, by the name of the route. Cheap, on any thread."""
Waiting = Callable[[], tuple[int, int]]
"""Returns how many messages wait to leave now, and their bytes. Cheap, on any thread."""


class RouteTraffic(NamedTuple):
    """What was sent since the last look, and what waits now."""

    sent_bytes: dict[str, int]
    queued: int
    queued_bytes: int


class _Source(NamedTuple):
    sent: weakref.WeakMethod[Sent]
    waiting: weakref.WeakMethod[Waiting] | None
    before: Counter[str]


class TrafficMeter:
    """Asks sources; :meth:`add` on any thread, :meth:`look` on one."""

    def __init__(self) -> None:
        self._sources: list[_Source] = []

    def add(self, sent: Sent, waiting: Waiting | None = None) -> None:
        """Ask one more source from now on, by methods of its own, for as long as it lives."""
        left = None if waiting is None else weakref.WeakMethod(waiting)
        self._sources.append(_Source(weakref.WeakMethod(sent), left, Counter()))

    def look(self) -> RouteTraffic:
        """Return what was sent since the last look, and what waits."""
        grown: Counter[str] = Counter()
        queued = queued_bytes = 0
        for source in list(self._sources):
            sent, waiting = source.sent(), None if source.waiting is None else source.waiting()
            if sent is None:
                self._sources.remove(source)
                continue
            for route, total in sent().items():
                grown[route] += max(0, total - source.before[route])
                source.before[route] = total
            if waiting is not None:
                messages, size_bytes = waiting()
                queued, queued_bytes = queued + messages, queued_bytes + size_bytes
        return RouteTraffic({route: count for route, count in grown.items() if count}, queued, queued_bytes)
