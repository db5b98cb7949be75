"""Step 3, lossy: full gradients in few bits, summed by the owners of their chunks, with error feedback at both ends.

As ``sharded.py``, but chunks are encoded (``sums/lossy.py``) and what that leaves out stays where it was encoded
(``sums/feedback.py``). The host does it; CUDA tensors come and go through pinned memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from poseidon.routes.base import Brought, Context, Exchange, Exchanger, LiveItem
from poseidon.routes.feedback import Feedback
from poseidon.routes.lossy import CHUNK_BYTES
from poseidon.routes.sharded import FORMATS, HostExchange, as_numpy
from poseidon.routes.staging import Stager
from poseidon.sums.feedback import LossyAdder
from poseidon.sums.lossy import LossyCodec
from poseidon.sums.server import SumServer
from poseidon.sums.slots import Slot, make_slots
from poseidon.team.membership import PeerLostError
from poseidon.team.wiring import connect_wire
from poseidon.wire.formats import find_format
from poseidon.wire.pool import Pool


class RoundedExchanger(Exchanger):
    """Averages buckets lossily over the team; calls may come in any order."""

    def __init__(self, context: Context, name: str, codec: LossyCodec) -> None:
        team = self._team = context.team
        self._codec = codec
        self._feedback = context.feedback
        self._transport = connect_wire(team, range(team.size), link=context.cluster.between, route=name)
        self._server = SumServer(self._transport)
        self._transport.listen_lost(lambda peer, why: self._server.fail(PeerLostError(peer, why)))
        self._stager = Stager() if context.is_cuda else None
        self._slots: dict[LiveItem, Slot] = {}
        self._booked = 0

    def prepare(self, items: Sequence[LiveItem]) -> None:
        """Agree on a slot for each bucket, and make room for what it leaves out."""
        team, pool = self._team, Pool()
        slots = fixed_slots(self._booked, items, [item.item.numel for item in items], team.size)
        self._booked += len(slots)
        booked = []
        for item, slot in zip(items, slots, strict=True):
            kept = self._feedback.flat_of(item, torch.device("cpu")).numpy()
            number_format = find_format(FORMATS[item.parameters[0].dtype][0])
            adder = LossyAdder(slot, team.rank, self._codec, kept, number_format, pool, team.size)
            booked.append((slot, adder))
        self._server.book(booked)
        self._slots = dict(zip(items, slots, strict=True))
        if self._stager is not None:
            self._stager.forget()
        # Nobody may send before all workers know the slots.
        team.gather_ints([len(slots)], "the parameter server")

    def start(self, item: LiveItem, brought: Sequence[Brought], step: int) -> Exchange:  # noqa: ARG002
        """Replace the bucket by its mean over the team, in place."""
        flat, slot = item.pack(), self._slots[item]
        begin = self._server.reserve(slot, step)
        if self._stager is not None and flat.is_cuda:
            inner = self._stager.start(flat, slot.number, lambda host: begin(as_numpy(host)), self._team, item.name)
        else:
            inner = HostExchange(self._team, begin(as_numpy(flat)), item.name)
        return RoundedExchange(inner, item, flat, self._feedback)

    def close(self) -> None:
        """Stop the threads and close the connections."""
        if self._stager is not None:
            self._stager.close()
        self._transport.close()


class RoundedExchange(Exchange):
    """A bucket that comes back shorter of some bits."""

    def __init__(self, inner: Exchange, item: LiveItem, flat: Tensor, feedback: Feedback) -> None:
        self._inner = inner
        self._item = item
        self._flat = flat
        self._feedback = feedback

    def finish(self, is_used: bool) -> None:
        """Wait for the mean."""
        self._inner.finish(is_used)

    def take_back(self, used: Sequence[bool]) -> None:
        """Keep what came of gradients that nobody uses."""
        take_back(self._item, self._flat, self._feedback, used)


def take_back(item: LiveItem, flat: Tensor, feedback: Feedback, used: Sequence[bool]) -> None:
    """Keep the means of parameters that no worker used in this step: they are of earlier steps, and go nowhere now.

    Every worker keeps one mean, so all together keep the sum. Where it is not finite, because it travelled in one block
    with a gradient that overflowed, what was sent is dropped, as that step is.
    """
    assert item.bucket is not None
    for parameter, mean, is_used in zip(item.parameters, item.bucket.views_of(flat), used, strict=True):
        if not is_used:
            rest = feedback.rest_of(parameter)
            rest.add_(mean.to(rest.device).nan_to_num(0.0, 0.0, 0.0))


def fixed_slots(
    first: int, items: Sequence[LiveItem], sizes: Sequence[int], owners: int, chunk_bytes: int = CHUNK_BYTES
) -> list[Slot]:
    """Return a slot for each item, whose chunks and owners depend on the item alone, not on its number."""
    slots = []
    for place, (item, size) in enumerate(zip(items, sizes, strict=True)):
        (slot,) = make_slots(item.item.parameters[0], [size], [4], owners, chunk_bytes)
        chunks = tuple(replace(chunk, slot=first + place) for chunk in slot.chunks)
        slots.append(replace(slot, number=first + place, chunks=chunks, priority=len(items) - place))
    return slots
