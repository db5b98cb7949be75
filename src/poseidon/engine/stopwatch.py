"""Measures when items become ready and land in one backward, and how long steps take, on the device's own clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)
_Moment = float | torch.cuda.Event


class Stopwatch(Generic[Key]):
    """Marks times since its creation; on CUDA, times on the device, not on the host."""

    def __init__(self, device: torch.device) -> None:
        self._observer = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._start = self._now()
        self._ready: dict[Key, _Moment] = {}
        self._landed: dict[Key, _Moment] = {}

    def mark_ready(self, key: Key) -> None:
        """Record when ``key`` is ready on the current stream."""
        self._ready[key] = self._now()

    def mark_landed(self, key: Key, wait: Callable[[], None]) -> None:
        """Record when ``wait()``, which makes the current stream wait for ``key``, completes; CUDA only."""
        if self._observer is None:
            return
        with torch.cuda.stream(self._observer):
            wait()
            self._landed[key] = self._now()

    def ready_s(self, key: Key) -> float:
        """Return the seconds from the start until ``key`` was ready; on CUDA this synchronizes with the device."""
        return self._seconds(self._ready[key])

    def wire_s(self, keys: Sequence[Key]) -> list[float] | None:
        """Return how long each of ``keys`` took on a wire that carried them one at a time; None if unknown."""
        if any(key not in self._landed for key in keys):
            return None
        times = []
        free_s = 0.0
        for key in keys:
            landed_s = self._seconds(self._landed[key])
            times.append(max(0.0, landed_s - max(free_s, self.ready_s(key))))
            free_s = landed_s
        return times

    def _now(self) -> _Moment:
        return _now(self._observer is not None)

    def _seconds(self, moment: _Moment) -> float:
        return _between(self._start, moment)


class Laps:
    """Times from one mark to the next."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[_Moment] = []

    def restart(self) -> None:
        """Forget all marks."""
        self._marks.clear()

    def mark(self) -> None:
        """End a lap and begin the next; the first mark only begins one."""
        self._marks.append(_now(self._is_cuda))

    def seconds(self) -> list[float]:
        """Return the laps; on CUDA this synchronizes with the device."""
        return list(map(_between, self._marks, self._marks[1:]))

    def median_s(self) -> float:
        """Return the median lap; on CUDA this synchronizes with the device."""
        return statistics.median(self.seconds())


def _now(is_cuda: bool) -> _Moment:
    if not is_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: _Moment, end: _Moment) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
    assert isinstance(start, float)
    assert isinstance(end, float)
    return end - start
