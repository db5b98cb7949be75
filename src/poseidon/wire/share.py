"""How much of what one machine sends may lie in the kernel, shared among its peers so that none falls behind. Pure.

What a connection has in the kernel is its share of the link, so whoever has more left to send gets more. Left alone,
connections drift apart, until in the end a few are busy with what the others had done long ago, and links stand idle.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

SMALLEST_PART = 0.25
"""Of ``each_bytes``. With a half, less was gained."""
EAGERNESS = 4
"""The power of how far a peer is behind or ahead. In mere proportion to it, less was gained."""


class BufferShare:
    """Parts of a link for ``peers``: ``each_bytes`` where as much waits for every one of them.

    A peer alone has the parts of all. It needs them: bytes leave the kernel when their acknowledgement has come, which
    waits behind whatever that peer sends, so that a small buffer alone fills no link.
    """

    def __init__(self, each_bytes: int, peers: Iterable[int]) -> None:
        self._each_bytes = each_bytes
        self._waiting = dict.fromkeys(peers, 0)
        self._lock = threading.Lock()

    def add(self, peer: int, size_bytes: int) -> None:
        """Take note that so many bytes more wait for ``peer``; fewer, if negative."""
        with self._lock:
            if peer in self._waiting:
                self._waiting[peer] += size_bytes

    def drop(self, peer: int) -> None:
        """Forget a peer that is gone, and what waits for it."""
        with self._lock:
            self._waiting.pop(peer, None)

    def buffer_bytes(self, peer: int) -> int:
        """Return how large the buffer of a connection to ``peer`` shall be now."""
        with self._lock:
            waiting, total, peers = self._waiting.get(peer, 0), sum(self._waiting.values()), len(self._waiting)
        part = (peers * waiting / total) ** EAGERNESS if total else 1.0
        # In steps, so that buffers need not be changed for every message.
        return int(self._each_bytes * round(4 * min(max(part, SMALLEST_PART), max(1, peers))) / 4)
