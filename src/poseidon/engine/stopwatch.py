"""Measures when things become ready in one backward, on the device's own clock."""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Generic, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)


class Stopwatch(Generic[Key]):
    """Marks moments since it was made; on CUDA these are moments of the current stream, not of the host."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._start = self._now()
        self._marks: dict[Key, float | torch.cuda.Event] = {}

    def mark(self, key: Key) -> None:
        """Take the time for ``key``."""
        self._marks[key] = self._now()

    def read_s(self, key: Key) -> float:
        """Return the seconds between the start and the mark; on CUDA this waits for the device."""
        start, end = self._start, self._marks[key]
        if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start

    def _now(self) -> float | torch.cuda.Event:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
