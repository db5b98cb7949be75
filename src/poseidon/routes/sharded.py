"""Step 3, sharded: full gradients, summed by a parameter server that is sharded over the workers.

Every worker owns some chunks of each bucket. A worker sends its part of each chunk to the owner, which adds all parts
in rank order and sends the sum to all workers (``sums/``, step 5, over ``wire/``, step 4). It moves as many bytes as a
ring, but messages need no common order, so what the next forward needs first overtakes what it needs last.

On CUDA devices, the devices sum large buckets of float32 and bf16 if all workers support it (``sums/device.py``); the
rest goes through pinned memory (``staging.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from poseidon.planning.transfers import SentBits
from poseidon.routes.base import Brought, Context, Exchange, Exchanger, LiveItem
from poseidon.routes.levels import Levels, LevelsExchange, open_level_board
from poseidon.routes.split import RowSender, SplitExchange, row_width
from poseidon.routes.staging import StagedExchange, Stager
from poseidon.sums.arithmetic import Adder
from poseidon.sums.device import DeviceAdder, DeviceArithmetic, find_compactor, is_compacted
from poseidon.sums.host import host_adders
from poseidon.sums.server import SumServer
from poseidon.sums.slots import Slot, chunk_bytes_for, make_slots
from poseidon.team.membership import PeerLostError
from poseidon.team.team import Team
from poseidon.team.wiring import connect_wire
from poseidon.wire.formats import Array
from poseidon.wire.settings import WireSettings

FORMATS: dict[torch.dtype, tuple[str, torch.dtype | None]] = {
    torch.float32: ("float32", None),
    torch.float64: ("float64", None),
    torch.float16: ("float16", None),
    torch.bfloat16: ("bfloat16", torch.uint16),
}
"""Name of each dtype in the server, and the NumPy dtype that holds it."""


def combines_first(team: Team, is_cuda: bool) -> bool:
    """Return whether the workers of a machine combine what travels to other machines."""
    return team.topology.has_levels and team.topology.is_even and not is_cuda and not team.encrypts


class ShardedExchanger(Exchanger):
    """Averages buckets over the team; calls may come in any order, unless the workers of a machine combine first."""

    def __init__(self, context: Context, chunk_bytes: int | None = None) -> None:
        team = self._team = context.team
        is_cuda, link = context.is_cuda, context.cluster.between
        use_levels = combines_first(team, is_cuda)
        self._members = team.topology.counterparts(team.rank) if use_levels else tuple(range(team.size))
        self._chunk_bytes = chunk_bytes or chunk_bytes_for(link.bytes_per_s)
        self._transport = connect_wire(team, self._members, link=link, route="sharded")
        self._server = SumServer(self._transport)
        self._transport.listen_lost(lambda peer, why: self._server.fail(PeerLostError(self._members[peer], why)))
        self._device = agree_on_device(team, self._transport.settings, is_cuda)
        self._levels = Levels(team, open_level_board(team)) if use_levels else None
        self._stager = Stager() if is_cuda else None
        self._rows = RowSender(self._server)
        self._slots: dict[LiveItem, Slot] = {}
        self._booked = 0
        """Slots booked so far; slot numbers are never reused."""
        self._compacted: frozenset[int] = frozenset()

    def prepare(self, items: Sequence[LiveItem]) -> None:
        """Agree on a server slot for each bucket. Earlier slots are released as soon as they have landed."""
        dtypes = [item.parameters[0].dtype for item in items]
        sizes, widths = [item.item.numel for item in items], [row_width(item) for item in items]
        self._slots = dict(zip(items, self.book(sizes, dtypes, widths), strict=True))

    def book(
        self, sizes: Sequence[int], dtypes: Sequence[torch.dtype], widths: Sequence[int] | None = None
    ) -> list[Slot]:
        """Agree on slots for buckets of these sizes, in the order in which they become ready. Collective.

        ``widths``: values in a row of the table whose touched rows follow, or 0.
        """
        if self._levels is not None:
            sizes = [self._levels.share_of(size) for size in sizes]
        itemsizes = [dtype.itemsize for dtype in dtypes]
        slots = make_slots(self._booked, sizes, itemsizes, len(self._members), self._chunk_bytes)
        slots = [replace(slot, width=width) for slot, width in zip(slots, widths or [0] * len(slots), strict=True)]
        self._booked += len(slots)
        self._assign(slots, dtypes)
        if self._stager is not None:
            self._stager.forget()
        # Nobody may send before all workers know the slots.
        self._team.gather_ints([len(slots)], "the parameter server")
        return slots

    def compacts(self, slot: Slot) -> bool:
        """Return whether the devices sum a slot of the latest booking."""
        return slot.number in self._compacted

    def start(self, item: LiveItem, brought: Sequence[Brought], step: int) -> Exchange:
        """Replace the bucket by its mean over the team, in place; of a table, send what the head has not sent."""
        slot = self._slots[item]
        if not slot.width:
            return self.average(item.pack(), slot, step, item.name)
        (mine,), unit = brought, item.unit
        found = rest = unit.weight.grad
        unit.weight.grad = None
        if mine.early is None:
            if mine.head is None:
                mine.head = torch.zeros_like(unit.weight)
            if rest is not None and not rest.is_sparse:
                mine.give_head(rest)
                rest = None
            self.start_early(item, mine, step)
        self._rows.send(slot, step, rest)
        assert mine.early is not None
        return SplitExchange(unit, mine, found, mine.early)

    def start_early(self, item: LiveItem, brought: Brought, step: int) -> None:
        """Begin to replace the head's gradient by the mean of the whole, in place."""
        assert brought.head is not None
        brought.early = self.average(brought.head.view(-1), self._slots[item], step, item.name)

    def average(self, flat: Tensor, slot: Slot, step: int, name: str) -> Exchange:
        """Replace ``flat`` by its mean over the team, in place."""
        if self.compacts(slot):
            return StagedExchange(self._team, self._server.start(flat, slot, step), name, flat.device)
        # Reserved now, because a later plan may be booked before the values are ready.
        between = _Between(self._server.reserve(slot, step))
        if self._levels is not None:
            # Inside a machine sums keep their dtype and must not overflow; between machines the server divides.
            flat.div_(self._team.size // len(self._members))
            return LevelsExchange(self._team, self._levels.start(flat, name, between), name)
        if self._stager is not None:
            return self._stager.start(flat, slot.number, between.start, self._team, name)
        return HostExchange(self._team, between.start(flat), name)

    def sent_bits(self) -> SentBits:
        """Return what the server has counted."""
        return self._server.tally.bits()

    def close(self) -> None:
        """Stop the threads and close the connections."""
        self._rows.close()
        if self._levels is not None:
            self._levels.close()
        if self._stager is not None:
            self._stager.close()
        if self._device is not None:
            self._device.close()
        self._transport.close()

    def _assign(self, slots: Sequence[Slot], dtypes: Sequence[torch.dtype]) -> None:
        """Assign each slot an adder on the device or the host."""
        rank, size, device = self._transport.rank, self._transport.size, self._device
        kinds = list(zip(slots, dtypes, strict=True))
        on_device = [kind for kind in kinds if device is not None and is_compacted(*kind)]
        self._compacted = frozenset(slot.number for slot, _ in on_device)
        on_host = [(slot, FORMATS[dtype][0]) for slot, dtype in kinds if not self.compacts(slot)]
        host = [slot for slot, _ in on_host]
        booked: list[tuple[Slot, Adder]] = []
        booked += zip(host, host_adders(host, [name for _, name in on_host], rank, size), strict=True)
        if device is not None:
            booked += [(slot, DeviceAdder(slot, rank, size, device, size, dtype)) for slot, dtype in on_device]
        self._server.book(booked)


def agree_on_device(team: Team, settings: WireSettings, is_cuda: bool) -> DeviceArithmetic | None:
    """Let buckets travel compacted if all workers support it. Collective."""
    compactor = find_compactor(settings) if is_cuda else None
    all_can = all(row[0] for row in team.gather_ints([int(compactor is not None)], "the parameter server"))
    return DeviceArithmetic(compactor) if compactor is not None and all_can else None


@dataclass(frozen=True)
class _Between:
    """The part of an exchange between machines."""

    sum: Callable[[Array], Future[None]]

    def start(self, values: Tensor) -> Future[None]:
        return self.sum(as_numpy(values))

    def __call__(self, values: Tensor, team: Team, name: str) -> None:
        team.result(self.start(values), name)


class HostExchange(Exchange):
    """An exchange in host memory; its values are in place when its future is done."""

    def __init__(self, team: Team, future: Future[None], name: str) -> None:
        self._team = team
        self._future = future
        self._name = name

    def finish(self, is_used: bool) -> None:  # noqa: ARG002
        """Wait for it."""
        self._team.result(self._future, self._name)


def as_numpy(flat: Tensor) -> Array:
    """Return a tensor's memory as the server takes it."""
    held = FORMATS[flat.dtype][1]
    array: Array = (flat if held is None else flat.view(held)).numpy()
    return array
