"""What a solver needs from the other workers; ``SoleWorker`` stands in where there are none.

``poseidon.caffe.distributed`` implements it for workers in step, ``poseidon.caffe.drifting`` for workers with bounded
staleness. Every call here is collective: all workers make it, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Protocol

import torch


class Action(IntEnum):
    """What a signal makes a solver do after the current iteration; with several workers the largest wins."""

    NONE = 0
    SNAPSHOT = 1
    STOP = 2


ActionFunction = Callable[[], Action]


class Workers(Protocol):
    """The workers of a job, as the solver of one of them sees them."""

    @property
    def is_root(self) -> bool:
        """Whether this worker writes files and logs."""

    def begin_iteration(self) -> None:
        """Prepare for the passes of one iteration."""

    def begin_backward(self, is_last: bool) -> None:
        """Prepare for a backward pass; during the last one of an iteration, complete gradients are exchanged."""

    def end_iteration(self) -> None:
        """Wait until every diff is ready for the update: for workers in step, the mean over all of them."""

    def end_update(self) -> None:
        """Note that this worker's solver has updated its parameters."""

    def average(self, values: Sequence[float]) -> list[float]:
        """Return the means of the values over all workers."""

    def ask(self, wanted: ActionFunction) -> ActionFunction:
        """Start agreeing on an action; calling the result returns it."""

    def take_from_root(self, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return the root's numbers and make the tensors equal to the root's."""

    def settle(self) -> None:
        """Make equal what passes change on each worker separately, such as running averages."""

    def close(self) -> None:
        """Leave the job; called once, at the end."""


class SoleWorker:
    """A single worker: every call is a no-op."""

    is_root = True

    def begin_iteration(self) -> None:
        """Do nothing."""

    def begin_backward(self, is_last: bool) -> None:
        """Do nothing."""

    def end_iteration(self) -> None:
        """Do nothing."""

    def end_update(self) -> None:
        """Do nothing."""

    def average(self, values: Sequence[float]) -> list[float]:
        """Return the values."""
        return list(values)

    def ask(self, wanted: ActionFunction) -> ActionFunction:
        """Return ``wanted`` itself, so that it is called as late as possible."""
        return wanted

    def take_from_root(self, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[int]:  # noqa: ARG002
        """Return the numbers."""
        return list(numbers)

    def settle(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
