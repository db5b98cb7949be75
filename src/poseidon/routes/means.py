"""Means of flat tensors over the workers of a team, outside the plan: what workers exchange between local steps.

:class:`ExactMeans` uses the parameter server of the route ``sharded``; :class:`LossyMeans` encodes float32 values, with
error feedback at both ends (``sums/feedback.py``), and leaves all others exact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from poseidon.errors import unknown_name
from poseidon.planning.lossy import DEFAULT_BLOCK
from poseidon.routes.base import Context, Exchange
from poseidon.routes.lossy import CHUNK_BYTES
from poseidon.routes.sharded import FORMATS, HostExchange, ShardedExchanger, as_numpy
from poseidon.routes.staging import Stager
from poseidon.sums.arithmetic import Adder
from poseidon.sums.feedback import LossyAdder
from poseidon.sums.host import host_adders
from poseidon.sums.lossy import Bf16Codec, Int4Codec, Int8Codec, LossyCodec
from poseidon.sums.server import SumServer
from poseidon.sums.slots import Slot, make_slots
from poseidon.team.membership import PeerLostError
from poseidon.team.wiring import connect_wire
from poseidon.wire.formats import find_format
from poseidon.wire.pool import Pool

COMPRESSIONS: dict[str, LossyCodec] = {"bf16": Bf16Codec(), "int8": Int8Codec(DEFAULT_BLOCK), "int4": Int4Codec()}
"""What :class:`LossyMeans` can do, by name."""


class Means(ABC):
    """Replaces flat tensors by their means, each in a slot of its own. Construction is collective."""

    @abstractmethod
    def average(self, place: int, flat: Tensor, step: int, name: str) -> Exchange:
        """Begin to replace a tensor by its mean; one of a place may be under way. Never blocks."""

    def rests(self) -> dict[int, Tensor]:
        """Return what the means still lack of this worker's values, by place; the tensors are those in use."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Flush what is queued, and stop the threads."""


class ExactMeans(Means):
    """Means of what the values are, in rank order."""

    def __init__(self, context: Context, flats: Sequence[Tensor]) -> None:
        self._exchanger = ShardedExchanger(context)
        self._slots = self._exchanger.book([flat.numel() for flat in flats], [flat.dtype for flat in flats])

    def average(self, place: int, flat: Tensor, step: int, name: str) -> Exchange:
        """Begin to replace a tensor by its mean."""
        return self._exchanger.average(flat, self._slots[place], step, name)

    def close(self) -> None:
        """Flush what is queued, and stop the threads."""
        self._exchanger.close()


class LossyMeans(Means):
    """Means in fewer bytes, of the float32 tensors among ``flats`` at the places ``lossy``; the others are exact."""

    def __init__(self, context: Context, flats: Sequence[Tensor], lossy: Sequence[int], compression: str) -> None:
        team = self._team = context.team
        self._transport = connect_wire(team, range(team.size), link=context.cluster.between, route=compression)
        self._server = SumServer(self._transport)
        self._transport.listen_lost(lambda peer, why: self._server.fail(PeerLostError(peer, why)))
        self._stager = Stager() if context.is_cuda else None
        sizes = [flat.numel() for flat in flats]
        self._slots = make_slots(0, sizes, [flat.dtype.itemsize for flat in flats], team.size, CHUNK_BYTES)
        self._rests = {
            place: torch.zeros(sizes[place], dtype=torch.float32, device="cpu")
            for place in lossy
            if flats[place].dtype is torch.float32
        }
        self._server.book(
            [(slot, self._adder(place, slot, flats, compression)) for place, slot in enumerate(self._slots)]
        )
        # Nobody may send before all workers know the slots.
        team.gather_ints([len(flats)], "the parameter server")

    def _adder(self, place: int, slot: Slot, flats: Sequence[Tensor], compression: str) -> Adder:
        team, name = self._team, FORMATS[flats[place].dtype][0]
        if place not in self._rests:
            return host_adders([slot], [name], team.rank, team.size)[0]
        kept, codec = self._rests[place].numpy(), find_codec(compression)
        return LossyAdder(slot, team.rank, codec, kept, find_format(name), Pool(), team.size)

    def average(self, place: int, flat: Tensor, step: int, name: str) -> Exchange:
        """Begin to replace a tensor by its mean."""
        slot = self._slots[place]
        begin = self._server.reserve(slot, step)
        if self._stager is not None and flat.is_cuda:
            return self._stager.start(flat, slot.number, lambda host: begin(as_numpy(host)), self._team, name)
        return HostExchange(self._team, begin(as_numpy(flat)), name)

    def rests(self) -> dict[int, Tensor]:
        """Return what the means still lack of this worker's values, by place; the tensors are those in use."""
        return dict(self._rests)

    def close(self) -> None:
        """Flush what is queued, and stop the threads."""
        if self._stager is not None:
            self._stager.close()
        self._transport.close()


def find_codec(compression: str) -> LossyCodec:
    """Return the encoding of a name."""
    if compression not in COMPRESSIONS:
        raise unknown_name("compress", compression, tuple(COMPRESSIONS))
    return COMPRESSIONS[compression]


def share_of(compression: str | None) -> float:
    """Return what a compression leaves of float32 values."""
    values = 1 << 20
    return 1.0 if compression is None else find_codec(compression).sizes(values)[0] / (4 * values)
