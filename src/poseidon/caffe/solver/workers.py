"""What a solver asks of the other workers; ``SoleWorker`` answers where there are none.

``poseidon.caffe.distributed`` answers for several workers in step, ``poseidon.caffe.drifting`` for those that may drift
apart. Every call here is collective: all workers make it, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Protocol

import torch


class Action(IntEnum):
    """What a signal asks a solver to do after the iteration under way; with several workers the largest counts."""

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
        """Wait until every diff is what the update needs: the mean over all workers, where they stay in step."""

    def end_update(self) -> None:
        """Take note that this worker's solver has changed its parameters."""

    def average(self, values: Sequence[float]) -> list[float]:
        """Return the means of the values over all workers."""

    def ask(self, wanted: ActionFunction) -> ActionFunction:
        """Begin to agree on an action; calling the result gives it."""

    def take_from_root(self, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return the root's numbers and make the tensors equal to the root's."""

    def settle(self) -> None:
        """Make equal what passes have changed on each worker by itself, such as running averages."""

    def close(self) -> None:
        """Leave the others; called once, at the end."""


class SoleWorker:
    """One worker: nothing to exchange, nobody to ask."""

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
        """Return the question itself, so that it is asked as late as possible."""
        return wanted

    def take_from_root(self, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[int]:  # noqa: ARG002
        """Return the numbers."""
        return list(numbers)

    def settle(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
