"""Step 3 of the journey: the contract of a route, and the unit as the routes see it.

Before: ``engine/scheduler.py`` finds that something is ready to travel and by which route. After: the route's own
file moves it (``allreduce.py``, ``factors.py``, ``rows.py``) and leaves the mean over all workers in ``.grad``.

A route has ``start``, which returns at once and hands back an :class:`Exchange`. ``factors`` and ``rows`` start
with one unit, ``allreduce`` with a bucket of them; everything after that is the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from poseidon.units import Unit

Factors = tuple[Tensor, Tensor]
"""Input (rows x N) and gradient of the output (rows x M) of one call of a linear layer."""


@dataclass(eq=False)
class LiveUnit:
    """A unit with its tensors, and what this backward has brought for it so far."""

    index: int
    """Place in the model, equal on all workers."""
    spec: Unit
    module: nn.Module | None
    parameters: tuple[nn.Parameter, ...]
    """In the order of ``spec.parameters``."""
    pieces: list[Factors] = field(default_factory=list)
    """Factors of this backward's calls."""
    factor_dtype: torch.dtype | None = None
    """Type of the last factors seen, for a backward that brings none."""
    has_dense: bool = False
    """``.grad`` holds a part of this backward that came as a full gradient although the unit travels otherwise."""
    is_used: bool = True
    """Whether any worker uses the unit in this step; if none does, ``.grad`` stays as it was."""
    kept: Tensor | None = None
    """Rows route: what ``.grad`` held before this backward."""

    @property
    def name(self) -> str:
        """The unit's name."""
        return self.spec.name

    @property
    def weight(self) -> nn.Parameter:
        """The weight of a linear or embedding unit."""
        return self.parameters[0]

    def give(self, x: Tensor, g: Tensor) -> None:
        """Add the factors of one call."""
        self.factor_dtype = x.dtype
        self.pieces.append((x, g))

    @property
    def row_dtype(self) -> torch.dtype:
        """Type in which rows of factors travel."""
        return self.factor_dtype or self.weight.dtype


SERVED_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""Types of values that the parameter server can add up."""


def can_be_served(parameter: Tensor) -> bool:
    """Whether the parameter server can carry this parameter's gradient."""
    return parameter.dtype in SERVED_DTYPES


class Exchange(ABC):
    """Something under way between the workers.

    The thread that runs backward calls ``start`` of the route, then :meth:`finish`, once. Between the two the route may
    read the tensors it was given and nobody may write them.
    """

    @abstractmethod
    def finish(self) -> None:
        """Block until the mean has arrived and put it into ``.grad``, identical on every worker.

        On CUDA it is enough that the work is queued on the current stream. Raises
        :class:`poseidon.errors.WorkerLostError` if a worker it waits for does not answer in time.
        """

    def join_stream(self) -> None:  # noqa: B027 - nothing to do is the rule
        """On CUDA, make the current stream wait for the exchange and do nothing else; elsewhere do nothing."""
