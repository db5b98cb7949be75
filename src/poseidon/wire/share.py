"""Divides the kernel's send buffers among the peers of one machine so that none falls behind. Pure.

A connection's bytes in the kernel determine its share of the link, so a peer with more left to send gets more. Without
this, connections drift apart until a few are busy with what the others finished long ago, and links are idle.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

SMALLEST_PART = 0.25
"""Smallest part of ``each_bytes``. With a half, less was gained."""
EAGERNESS = 4
"""Exponent for how far a peer is behind or ahead. In plain proportion, less was gained."""


class BufferShare:
    """Parts of a link for ``peers``: ``each_bytes`` per peer if equally much waits for all of them.

    A single busy peer gets the parts of all. It needs them: bytes leave the kernel when they are acknowledged, and the
    acknowledgement waits behind whatever that peer sends, so one small buffer does not fill a link.
    """

    def __init__(self, each_bytes: int, peers: Iterable[int]) -> None:
        self._each_bytes = each_bytes
        self._waiting = dict.fromkeys(peers, 0)
        self._lock = threading.Lock()

    def add(self, peer: int, size_bytes: int) -> None:
        """Note that this many more bytes wait for ``peer``; fewer, if negative."""
        if not self._waiting:  # nothing to divide; asked for every message
            return
        with self._lock:
            if peer in self._waiting:
                self._waiting[peer] += size_bytes

    def drop(self, peer: int) -> None:
        """Forget a peer that is gone, and what waits for it."""
        with self._lock:
            self._waiting.pop(peer, None)

    def buffer_bytes(self, peer: int) -> int:
        """Return how large the buffer of a connection to ``peer`` should be now."""
        if not self._waiting:
            return self._each_bytes
        with self._lock:
            waiting, total, peers = self._waiting.get(peer, 0), sum(self._waiting.values()), len(self._waiting)
        part = (peers * waiting / total) ** EAGERNESS if total else 1.0
        # In steps, so that buffers do not change with every message.
        return int(self._each_bytes * round(4 * min(max(part, SMALLEST_PART), max(1, peers))) / 4)
