"""Which message leaves next for one peer, and on which connection. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Outgoing:
    """A message on its way out."""

    head: bytes
    payload: memoryview
    priority: int = 0
    on_sent: Callable[[], None] | None = field(default=None)


class Outbox:
    """Messages waiting for one peer, most urgent first, and the bytes in flight on its connections.

    A message handed to a connection can no longer be overtaken. So a connection with ``in_flight_bytes`` or more in
    flight gets nothing new, and an urgent message waits behind little more than that.
    """

    def __init__(self, streams: int, in_flight_bytes: int) -> None:
        self._limit = in_flight_bytes
        self._busy = [0] * streams
        self._heap: list[tuple[int, int, Outgoing]] = []
        self._count = 0

    def put(self, message: Outgoing) -> None:
        """Queue a message behind others of the same priority."""
        heapq.heappush(self._heap, (message.priority, self._count, message))
        self._count += 1

    def take(self) -> tuple[int, Outgoing] | None:
        """Return the next message and the stream to carry it; None if nothing waits or all streams are busy."""
        if not self._heap:
            return None
        stream = min(range(len(self._busy)), key=self._busy.__getitem__)
        if self._busy[stream] >= self._limit:
            return None
        _, _, message = heapq.heappop(self._heap)
        self._busy[stream] += message.payload.nbytes
        return stream, message

    def release(self, stream: int, size_bytes: int) -> None:
        """Note that ``stream`` has sent ``size_bytes``."""
        self._busy[stream] -= size_bytes

    @property
    def waiting(self) -> bool:
        """Whether any message waits."""
        return bool(self._heap)

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is in flight."""
        return not self._heap and not any(self._busy)
