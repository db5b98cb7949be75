"""Memory for coming messages: kept by the process, not asked from the system each time."""

from __future__ import annotations

import ctypes
import logging

_log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 << 20


def keep_memory(size_bytes: int) -> bool:
    """Let the C library keep up to ``size_bytes`` of freed memory per arena; say whether it took the advice.

    ZeroMQ allocates every large message. Without this, each allocation is a mapping of its own, and the system
    clears every page of it again: a third of the time it takes to receive. Affects the whole process.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        _log.debug("the C library has no mallopt; memory for messages is not kept")
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD) and mallopt(_M_TRIM_THRESHOLD, size_bytes))
