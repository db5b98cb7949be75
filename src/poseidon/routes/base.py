"""Step 3 of the journey: what moves bytes for a route, and the model as routes see it.

Before: ``engine/backward.py`` finds that an item is ready. After: the exchanger of its route (``allreduce.py``,
``sharded.py``, ``factors.py``, ``gather.py``, ``rows.py``) moves it and leaves the mean over all workers in ``.grad``.
What a route is, apart from that, says ``planning/route.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from poseidon.planning.cluster import Cluster
from poseidon.planning.schedule import Item
from poseidon.routes.buckets import Bucket
from poseidon.team.team import Team
from poseidon.units import Unit

if TYPE_CHECKING:
    from poseidon.routes.pairs import Pairs

FactorPair = tuple[Tensor, Tensor]
"""Input (rows x N) and gradient of the output (rows x M) of one call of a linear layer."""


class Flag(IntFlag):
    """What is out of the ordinary about a worker's part of an item; landing it may then need all workers at once."""

    HAS_DENSE = 1
    """``.grad`` holds a local part that came as a full gradient although the unit travels in a short form."""
    MISFIT = 2
    """The part did not fit what was planned."""


@dataclass(frozen=True, eq=False)
class LiveUnit:
    """A unit with its tensors. It does not change; what a backward brings for it is in :class:`Brought`."""

    index: int
    """Place in the model, equal on all workers."""
    spec: Unit
    module: nn.Module | None
    parameters: tuple[nn.Parameter, ...]
    """In the order of ``spec.parameters``."""

    @property
    def name(self) -> str:
        """The unit's name."""
        return self.spec.name

    @property
    def weight(self) -> nn.Parameter:
        """The weight of a linear or embedding unit."""
        return self.parameters[0]


class Brought:
    """What one backward has brought for one unit so far, besides what is in ``.grad``."""

    __slots__ = ("_pieces", "factor_dtype", "has_dense", "kept")

    def __init__(self, factor_dtype: torch.dtype | None = None) -> None:
        self._pieces: list[FactorPair] = []
        self.factor_dtype = factor_dtype
        """Type of the last factors seen, for a backward that brings none."""
        self.has_dense = False
        """``.grad`` holds a full gradient that autograd made in this backward."""
        self.kept: Tensor | None = None
        """Rows: what ``.grad`` held before this backward."""

    def give(self, x: Tensor, g: Tensor) -> None:
        """Add the factors of one call."""
        self.factor_dtype = x.dtype
        self._pieces.append((x, g))

    @property
    def pieces(self) -> Sequence[FactorPair]:
        """The factors of all calls so far."""
        return self._pieces

    def take_pieces(self) -> list[FactorPair]:
        """Return the factors of all calls and keep none: they need memory until they have left."""
        pieces, self._pieces = self._pieces, []
        return pieces


@dataclass(frozen=True, eq=False)
class LiveItem:
    """An item of the schedule with its tensors."""

    item: Item
    units: tuple[LiveUnit, ...]
    parameters: tuple[nn.Parameter, ...]
    """In the order of ``item.parameters``."""
    bucket: Bucket | None
    """Where gradients that travel together lie; None where the unit travels in a short form."""

    @property
    def name(self) -> str:
        """The item's name, for errors."""
        return self.item.name

    @property
    def unit(self) -> LiveUnit:
        """The unit of an item that is one unit."""
        return self.units[0]

    def pack(self) -> Tensor:
        """Return all gradients as one flat tensor; a missing gradient counts as zero."""
        assert self.bucket is not None
        return self.bucket.pack()


SERVED_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""Types of values that the parameter server can add up."""


def can_be_served(parameter: Tensor) -> bool:
    """Whether the parameter server can carry this parameter's gradient."""
    return parameter.dtype in SERVED_DTYPES


@dataclass(frozen=True, eq=False)
class Context:
    """What exchangers are opened for: one team, its cluster, and what its routes share."""

    team: Team
    cluster: Cluster
    is_cuda: bool
    """Whether any parameter is on a CUDA device."""

    @cached_property
    def pairs(self) -> Pairs:
        """Direct messages between workers; made when first asked for, which is collective."""
        from poseidon.routes.pairs import Pairs

        return Pairs(self.team, pin_memory=self.is_cuda)

    def close(self) -> None:
        """Let what is queued leave, and end the threads."""
        pairs = self.__dict__.pop("pairs", None)
        if pairs is not None:
            pairs.close()


class Exchange(ABC):
    """An item under way between the workers.

    One thread calls ``start`` of the exchanger, then :meth:`finish`, once, perhaps from another thread. Between the two
    the exchanger may read the tensors it was given and nobody may write them.
    """

    flags = Flag(0)
    """What is out of the ordinary about this worker's part, known when it has started."""

    def heed(self, flags: Sequence[int]) -> None:  # noqa: B027 - most need not know before they finish
        """Hear what all workers said about the item; called before :meth:`finish` where flags are compared."""

    @abstractmethod
    def finish(self, is_used: bool) -> None:
        """Block until the mean has arrived, identical on every worker, and leave it where the item's gradients lie.

        That is the tensor that ``LiveItem.pack`` returned, or ``.grad`` for units in a short form. If no worker
        ``is_used`` the unit in this step, ``.grad`` stays as it was. On CUDA it is enough that the work is queued on
        the current stream. Raises :class:`poseidon.errors.WorkerLostError` if a worker does not answer in time.
        """

    def join_stream(self) -> None:  # noqa: B027 - nothing to do is the rule
        """On CUDA, make the current stream wait for the exchange and do nothing else; elsewhere do nothing."""


class Exchanger(ABC):
    """A route that was opened for one team: the only code that moves a gradient's bytes."""

    def prepare(self, items: Sequence[LiveItem]) -> None:  # noqa: B027 - most need no preparation
        """Get ready for the items of a new schedule, in the order they become ready, instead of earlier ones.

        Collective, and called only where the schedule has items of this route.
        """

    @abstractmethod
    def start(self, item: LiveItem, brought: Sequence[Brought], step: int) -> Exchange:
        """Begin to exchange an item and return at once. ``brought`` has one entry for each of the item's units."""

    def close(self) -> None:  # noqa: B027 - most have no threads
        """Let what is queued leave, and end the exchanger's threads."""
