"""A limit on bytes per second: token buckets that refill at the permitted rate.

``TokenBucket`` is pure: the caller passes the time. ``SharedBucket`` is for several threads.
"""

from __future__ import annotations

import threading
import time

from poseidon.errors import ConfigError

FRAMING = 1.023
"""Bytes charged per byte handed to TCP. With the usual MTU of 1500 a full segment has 1514 bytes for 1448 of payload,
4.6 % more; but an interface that segments by itself counts the headers once per 64 KB. Half of it keeps either count
within 2.5 % of the cap."""


class TokenBucket:
    """Tokens for bytes, earned at ``rate_mbit`` and kept for at most ``burst_s``.

    A message leaves as soon as there is any credit and is charged in full, so a large one puts the bucket into debt,
    and the average holds for any sizes. Packet headers are charged too: the cap holds at the interface, not just above
    TCP.
    """

    def __init__(self, rate_mbit: float, now_s: float, burst_s: float = 0.02) -> None:
        if not rate_mbit > 0:
            raise ConfigError(f"a bandwidth cap of {rate_mbit:g} Mbit/s lets nothing through; it must be positive")
        self._rate = rate_mbit * 1e6 / 8
        self._most = self._rate * burst_s
        self._saved = self._most
        self._when_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Return how long the next message must wait from now; 0 if it may leave."""
        self._refill(now_s)
        return 0.0 if self._saved > 0 else max(-self._saved / self._rate, 1e-6)

    def charge(self, size_bytes: int, now_s: float) -> None:
        """Charge a message of ``size_bytes`` that leaves now."""
        self._refill(now_s)
        self._saved -= size_bytes * FRAMING

    def _refill(self, now_s: float) -> None:
        self._saved = min(self._most, self._saved + (now_s - self._when_s) * self._rate)
        self._when_s = now_s


class SharedBucket:
    """A token bucket for several threads, on the monotonic clock."""

    def __init__(self, rate_mbit: float) -> None:
        self._bucket = TokenBucket(rate_mbit, time.monotonic())
        self._lock = threading.Lock()

    def spend(self, size_bytes: int) -> None:
        """Block until a message of ``size_bytes`` may leave, and charge it."""
        while True:
            with self._lock:
                now_s = time.monotonic()
                wait_s = self._bucket.wait_s(now_s)
                if not wait_s:
                    self._bucket.charge(size_bytes, now_s)
                    return
            time.sleep(wait_s)
