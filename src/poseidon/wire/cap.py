"""A limit on bytes per second, as a bucket that refills at the permitted rate.

``TokenBucket`` is pure: the caller brings the time. ``SharedBucket`` is one that several threads draw from.
"""

from __future__ import annotations

import threading
import time

from poseidon.errors import ConfigError

FRAMING = 1.023
"""Bytes charged for each byte handed to TCP. With the usual MTU of 1500 a full segment is 1514 bytes, of which 1448 are
payload, 4.6 % more; but interfaces that cut segments themselves count the headers once per 64 KB. Half of it keeps
either count within 2.5 % of the cap."""


class TokenBucket:
    """Permission to send, earned at ``rate_mbit`` and saved up for at most ``burst_s``.

    A message leaves as soon as anything is saved up and is charged in full, so the bucket goes into debt for a large
    one and the average holds whatever the sizes. What the link adds (packet headers) is charged too: the cap is kept
    at the interface, not just above TCP.
    """

    def __init__(self, rate_mbit: float, now_s: float, burst_s: float = 0.02) -> None:
        if not rate_mbit > 0:
            raise ConfigError(f"a bandwidth cap of {rate_mbit:g} Mbit/s lets nothing through; give a positive one")
        self._rate = rate_mbit * 1e6 / 8
        self._most = self._rate * burst_s
        self._saved = self._most
        self._when_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Return how long from now the next message must wait; 0 when it may leave."""
        self._refill(now_s)
        return 0.0 if self._saved > 0 else max(-self._saved / self._rate, 1e-6)

    def charge(self, size_bytes: int, now_s: float) -> None:
        """Take note that a message of ``size_bytes`` leaves."""
        self._refill(now_s)
        self._saved -= size_bytes * FRAMING

    def _refill(self, now_s: float) -> None:
        self._saved = min(self._most, self._saved + (now_s - self._when_s) * self._rate)
        self._when_s = now_s


class SharedBucket:
    """A token bucket for several threads, by the clock."""

    def __init__(self, rate_mbit: float) -> None:
        self._bucket = TokenBucket(rate_mbit, time.monotonic())
        self._lock = threading.Lock()

    def wait_s(self) -> float:
        """Return how long the next message must wait; 0 when it may leave."""
        with self._lock:
            return self._bucket.wait_s(time.monotonic())

    def charge(self, size_bytes: int) -> None:
        """Take note that a message of ``size_bytes`` leaves."""
        with self._lock:
            self._bucket.charge(size_bytes, time.monotonic())

    def spend(self, size_bytes: int) -> None:
        """Wait until a message of ``size_bytes`` may leave, and charge it."""
        while True:
            with self._lock:
                now_s = time.monotonic()
                wait_s = self._bucket.wait_s(now_s)
                if not wait_s:
                    self._bucket.charge(size_bytes, now_s)
                    return
            time.sleep(wait_s)
