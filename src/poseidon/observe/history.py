"""A job's past in a bounded number of points: when there are too many, neighbours merge and each covers twice the time.

So a job of a million steps keeps as much as one of a thousand. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from poseidon.observe.records import Record

MOST_POINTS = 240
FIRST_WIDTH_S = 1.0


@dataclass
class PastPoint:
    """What happened in one stretch of time."""

    steps: float = 0.0
    """Of one worker, on average."""
    samples: int = 0
    """Of all workers."""
    loss: float | None = None
    """The last one told."""
    memory_bytes: list[int] = field(default_factory=list)
    """By worker: the most."""

    def merge(self, later: PastPoint) -> PastPoint:
        """Return both as one."""
        return PastPoint(
            self.steps + later.steps,
            self.samples + later.samples,
            self.loss if later.loss is None else later.loss,
            [max(pair) for pair in zip(self.memory_bytes, later.memory_bytes, strict=True)],
        )


class History:
    """Adds records to the point of their time."""

    def __init__(self, workers: int, most: int = MOST_POINTS) -> None:
        self._workers = workers
        self._most = most
        self.width_s = FIRST_WIDTH_S
        self.points: list[PastPoint] = []

    def add(self, rank: int, record: Record, elapsed_s: float) -> None:
        """Add a worker's record that arrived so long after the job's start."""
        point = self._point(elapsed_s)
        point.steps += record.steps / self._workers
        point.samples += record.samples
        point.memory_bytes[rank] = max(point.memory_bytes[rank], record.memory_bytes)

    def add_loss(self, loss: float, elapsed_s: float) -> None:
        """Note the loss of a moment."""
        self._point(elapsed_s).loss = loss

    def _point(self, elapsed_s: float) -> PastPoint:
        number = int(max(0.0, elapsed_s) / self.width_s)
        while number >= self._most:
            self.points = [_merged(self.points[at : at + 2]) for at in range(0, len(self.points), 2)]
            self.width_s *= 2
            number = int(elapsed_s / self.width_s)
        while len(self.points) <= number:
            self.points.append(self._empty())
        return self.points[number]

    def _empty(self) -> PastPoint:
        return PastPoint(memory_bytes=[0] * self._workers)

    def pack(self) -> dict[str, Any]:
        """Return it as plain data: columns, rounded."""
        points = self.points
        return {
            "width_s": self.width_s,
            "steps": [round(point.steps, 2) for point in points],
            "samples": [point.samples for point in points],
            "loss": [point.loss for point in points],
            "memory_bytes": [[point.memory_bytes[rank] for point in points] for rank in range(self._workers)],
        }


def _merged(points: Sequence[PastPoint]) -> PastPoint:
    return points[0] if len(points) == 1 else points[0].merge(points[1])
