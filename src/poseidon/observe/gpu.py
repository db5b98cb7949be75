"""How busy this process's GPU is, as the driver's own library says: nothing needs to be installed for it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
"""Comes with the driver."""
UNKNOWN = -1.0


class _Utilization(ctypes.Structure):
    """Per cent of the last sampling period, a sixth of a second to a second."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class GpuGauge:
    """Asks about one GPU, named by its UUID: numbers differ between processes that see different GPUs."""

    def __init__(self, uuid: str, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        self._library: Any = None
        self._handle = ctypes.c_void_p()
        try:
            library = load(LIBRARY)
            is_found = library.nvmlInit_v2() == 0 and (
                library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(self._handle)) == 0
            )
        except (OSError, AttributeError):  # no driver, or an older one
            return
        if is_found:
            self._library = library

    def share_used(self) -> float:
        """Return the share of time in which the GPU computed; ``UNKNOWN`` where the driver does not say."""
        if self._library is None:
            return UNKNOWN
        found = _Utilization()
        if self._library.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(found)) != 0:
            return UNKNOWN
        return float(found.gpu) / 100


@cache
def gauge_of(uuid: str) -> GpuGauge:
    """Return the gauge of a GPU; the driver's library is opened once."""
    return GpuGauge(uuid)
