"""Step 3 of the journey: the contract for moving a route's bytes, and the model as routes see it.

Before: ``engine/backward.py`` finds that an item is ready. After: the exchanger of its route (``allreduce.py``,
``sharded.py``, ``factors.py``, ``gather.py``, ``rows.py``) moves it and leaves the mean over all workers in ``.grad``.
``planning/route.py`` defines the rest of a route.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from poseidon.planning.cluster import Cluster
from poseidon.planning.schedule import Item
from poseidon.planning.transfers import SentBits
from poseidon.routes.buckets import Bucket
from poseidon.team.team import Team
from poseidon.units import Unit

if TYPE_CHECKING:
    from poseidon.routes.feedback import Feedback
    from poseidon.routes.pairs import Pairs

FactorPair = tuple[Tensor, Tensor]
"""Input (rows x N) and output gradient (rows x M) of one call of a linear layer with an M x N weight."""


class Flag(IntFlag):
    """Exceptional conditions of a worker's part of an item; landing it may then be collective."""

    HAS_DENSE = 1
    """``.grad`` holds a local part: autograd made a full gradient although the unit travels in a short form."""
    MISFIT = 2
    """The part exceeds the planned size or has another type."""
    HOLDS_BEFORE = 4
    """That local part holds what ``.grad`` was before this backward, too; so must those of all workers."""


@dataclass(frozen=True, eq=False)
class LiveUnit:
    """A unit with its tensors. Immutable; what a backward brings for it is in :class:`Brought`."""

    index: int
    """Position in the model, equal on all workers."""
    spec: Unit
    module: nn.Module | None
    parameters: tuple[nn.Parameter, ...]
    """In the order of ``spec.parameters``."""
    head: nn.Module | None = None
    """Tied: the linear layer; ``module`` is the table."""
    is_transposed: bool = False
    """Linear: the weight is inputs x outputs, so input and output gradient change places."""

    @property
    def name(self) -> str:
        """The unit's name."""
        return self.spec.name

    @property
    def weight(self) -> nn.Parameter:
        """The weight of a unit that is not dense."""
        return self.parameters[0]


class Brought:
    """What one backward has brought for one unit so far, besides what is in ``.grad``."""

    __slots__ = ("_pieces", "early", "has_dense", "head", "holds_before", "kept", "streams")

    def __init__(self) -> None:
        self._pieces: list[FactorPair] = []
        self.streams: list[torch.cuda.Stream] = []
        """On which a device computes what was given."""
        self.has_dense = False
        """``.grad`` holds a full gradient that autograd made in this backward."""
        self.kept: Tensor | None = None
        """Rows: what ``.grad`` held before this backward."""
        self.holds_before = False
        """Rows: ``.grad`` holds it still, because this backward had added to it when the exchange began."""
        self.head: Tensor | None = None
        """Tied: the full gradient of the linear layer so far..."""
        self.early: Exchange | None = None
        """... and its exchange, if that has left before the rest of the unit's gradient."""

    def give(self, x: Tensor, g: Tensor) -> None:
        """Add the factors of one call, which the current stream computes."""
        self._pieces.append((x, g))
        self._note_stream(g)

    def give_head(self, gradient: Tensor) -> None:
        """Add the full gradient of one call of a tied unit's linear layer, which becomes this object's own."""
        assert self.early is None, "the gradient of the head has left already"
        self.head = gradient if self.head is None else self.head.add_(gradient)
        self._note_stream(gradient)

    def _note_stream(self, tensor: Tensor) -> None:
        if tensor.is_cuda:
            self.streams.append(torch.cuda.current_stream(tensor.device))

    def join_streams(self) -> None:
        """Let the current stream wait for what was given, and keep its memory from others until it has used it.

        Autograd does so for gradients. It knows of none here, and runs the hooks that start an exchange on the stream
        on which the model was wrapped, which need not be the one that computes.
        """
        for stream in self.streams:
            current = torch.cuda.current_stream(stream.device)
            if current != stream:
                current.wait_stream(stream)
                given = [tensor for piece in self._pieces for tensor in piece]
                for tensor in given if self.head is None else [*given, self.head]:
                    tensor.record_stream(current)
        self.streams.clear()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was given."""
        return not self._pieces and self.head is None and self.early is None

    @property
    def pieces(self) -> Sequence[FactorPair]:
        """The factors of all calls so far."""
        return self._pieces

    def take_pieces(self) -> list[FactorPair]:
        """Return the factors of all calls and drop them here, to free their memory as soon as they are sent."""
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
    """Holds gradients that travel together; None where the unit travels in a short form."""

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
"""Dtypes that the parameter server can sum."""


def can_be_served(parameter: Tensor) -> bool:
    """Whether the parameter server can carry this parameter's gradient."""
    return parameter.dtype in SERVED_DTYPES


@dataclass(frozen=True, eq=False)
class Context:
    """What exchangers share: one team, its cluster, and the connections between its workers."""

    team: Team
    cluster: Cluster
    is_cuda: bool
    """Whether any parameter is on a CUDA device."""
    rounded: set[nn.Parameter] = field(default_factory=set)
    """Parameters that the model only uses rounded to bf16 (``served.py``)."""
    kept: Feedback | None = None
    """What lossy routes keep; None where none was asked for."""

    @property
    def feedback(self) -> Feedback:
        """What lossy routes keep, for one of them."""
        assert self.kept is not None, "a lossy route is opened that nobody asked for"
        return self.kept

    @cached_property
    def pairs(self) -> Pairs:
        """Direct messages between workers. The first access connects and is collective."""
        from poseidon.routes.pairs import Pairs

        return Pairs(self.team, self.cluster.between, pin_memory=self.is_cuda)

    def close(self) -> None:
        """Flush what is queued, and stop the threads."""
        pairs = self.__dict__.pop("pairs", None)
        if pairs is not None:
            pairs.close()


class Exchange(ABC):
    """An item under way between the workers.

    One thread calls the exchanger's ``start``; then one thread, perhaps another, calls :meth:`finish` once. In between,
    the exchanger may read the tensors it was given and nobody may write to them.
    """

    flags = Flag(0)
    """Flags of this worker's part, known once it has started..."""
    has_late_flags = False
    """... or later, equal on all workers: to read them waits until the device has come so far."""

    def heed(self, flags: Sequence[int]) -> None:  # noqa: B027 - a no-op for most
        """Receive all workers' flags for the item; called before :meth:`finish` where flags are compared."""

    @abstractmethod
    def finish(self, is_used: bool) -> None:
        """Block until the mean has arrived, identical on every worker, and store it where the item's gradients lie.

        That is the tensor that ``LiveItem.pack`` returned, or ``.grad`` for units in a short form. Without ``is_used``
        no worker used the unit in this step, and ``.grad`` stays unchanged. On CUDA it suffices to queue the work on
        the current stream. Raises :class:`poseidon.errors.WorkerLostError` if a worker does not answer in time.

        Workers may finish items in different orders, so this must not be collective. The exception is an item for which
        some worker raised a flag: then all workers finish everything in one order.
        """

    def take_back(self, used: Sequence[bool]) -> None:  # noqa: B027 - a no-op for exact routes
        """Keep what came for those of the item's parameters that no worker used in this step, after :meth:`finish`.

        ``.grad`` of these stays unchanged, so a route that sends what it kept of earlier steps would lose it.
        """

    def join_stream(self) -> None:  # noqa: B027 - a no-op for most
        """Make the current stream wait for the exchange, on CUDA; a no-op elsewhere."""


class Exchanger(ABC):
    """A route opened for one team: the only code that moves a gradient's bytes."""

    def prepare(self, items: Sequence[LiveItem]) -> None:  # noqa: B027 - most need no preparation
        """Prepare for the items of a new schedule, in the order they become ready; they replace earlier ones.

        Collective, and called only if the schedule has items of this route.
        """

    @abstractmethod
    def start(self, item: LiveItem, brought: Sequence[Brought], step: int) -> Exchange:
        """Start exchanging an item; never blocks. ``brought`` has one entry for each of the item's units."""

    def start_early(self, item: LiveItem, brought: Brought, step: int) -> None:  # noqa: B027 - a head may wait
        """Let the full gradient of a tied unit's head leave before the item starts, and note it in ``brought.early``.

        Called at most once, and only for routes to which a front end delivers a head. Where nothing leaves early,
        :meth:`start` finds it in ``brought.head``.
        """

    def sent_bits(self) -> SentBits:
        """Return how many bits the values of full gradients have taken, as far as that varies."""
        return SentBits()

    def close(self) -> None:  # noqa: B027 - most have no threads
        """Flush what is queued, and stop the exchanger's threads."""
