"""A worker's share of the samples of a step, and the means that a train_step of the user's own keeps.

A step that updates ``keras.metrics.Mean`` with the loss of its batch counts every batch once. The parts of a batch must
then count as much as they have samples, so that the sums over all workers are those of the whole batch.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras

from poseidon.engine.outside import step_weight
from poseidon.team.gathering import PendingGather
from poseidon.team.team import Team


class StepWeight:
    """A worker's weight in each step: its share of all samples times the number of workers."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._samples = 0
        self._counts: PendingGather | None = None
        self._value = 1.0
        self._lock = threading.Lock()

    def begin(self, samples: int) -> None:
        """Announce how many samples this worker adds in a new step; never blocks."""
        self._samples = samples
        self._counts = self._team.start_gather([samples])

    def get(self) -> float:
        """Return the factor of this worker's gradients; waits until every worker has begun the step."""
        with self._lock:
            if self._counts is not None:
                counts = [row[0] for row in self._counts("the others to begin the step")]
                self._counts = None
                self._value = step_weight(self._samples, counts)
            return self._value

    @property
    def share(self) -> float:
        """The part of this worker in the samples of the last step; waits until every worker has begun it."""
        return self.get() / self._team.size


@contextlib.contextmanager
def weighing_means(share: Callable[[], Any]) -> Iterator[None]:
    """Let every scalar that a ``Mean`` is given without a weight count by this worker's share."""
    plain = keras.metrics.Mean.update_state

    def update_state(metric: Any, values: Any, sample_weight: Any = None) -> Any:
        if sample_weight is None and _is_scalar(values):
            sample_weight = share()
        return plain(metric, values, sample_weight)

    keras.metrics.Mean.update_state = update_state
    try:
        yield
    finally:
        keras.metrics.Mean.update_state = plain


def _is_scalar(values: Any) -> bool:
    shape = getattr(values, "shape", None)
    if shape is None:
        return isinstance(values, (int, float))
    return getattr(shape, "rank", 0) is not None and len(shape) == 0
