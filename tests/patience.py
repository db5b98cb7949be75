"""Waiting in tests for what other threads and processes bring about."""

from __future__ import annotations

import time
from collections.abc import Callable


def comes_true(condition: Callable[[], object], limit_s: float = 60.0) -> bool:
    """Return whether a condition holds, or comes to hold before the limit."""
    deadline = time.monotonic() + limit_s
    while not (is_so := bool(condition())) and time.monotonic() < deadline:
        time.sleep(0.002)
    return is_so
