"""Step 3, sharded: full gradients, summed by a parameter server that is cut into shards over the workers.

Every worker owns a shard of each bucket. A worker pushes each chunk to its owner, which adds up all workers' parts in
rank order (``sums/shard.py``, step 5) and sends the sum to everybody (``wire/``, step 4). The bytes are those of a
ring; but messages need no common order, so what the next forward needs first overtakes what it needs last.

Sums land where the parts lay: an owner can only answer what has left this worker completely.

On CUDA devices large buckets of float32 go another way where all workers can (``compact.py``); the rest is staged in
pinned memory (``staging.py``).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poseidon.errors import FrameError
from poseidon.planning.cluster import Link
from poseidon.planning.packing import limit_served
from poseidon.routes.base import Exchange
from poseidon.routes.compact import Compactor, CompactSum, can_compact, is_compacted
from poseidon.routes.levels import Levels, LevelsExchange
from poseidon.routes.staging import StagedExchange, Stager
from poseidon.sums.chunks import Chunk, owned_by
from poseidon.sums.service import ShardService
from poseidon.sums.shard import Shard
from poseidon.sums.slots import Slot, chunk_bytes_for, make_slots
from poseidon.team.team import PeerLostError, Team
from poseidon.team.wiring import connect_wire
from poseidon.wire.message import Header, Kind

_log = logging.getLogger(__name__)

_FORMATS: dict[torch.dtype, tuple[str, torch.dtype | None]] = {
    torch.float32: ("float32", None),
    torch.float64: ("float64", None),
    torch.float16: ("float16", None),
    torch.bfloat16: ("bfloat16", torch.uint16),
}
"""Name of each type in the server, and the type under which NumPy can hold it."""


class ShardedRoute:
    """Averages flat tensors over the team; calls may come in any order.

    Making one and :meth:`book` are collective.
    """

    def __init__(self, team: Team, is_cuda: bool, link: Link) -> None:
        self._team = team
        topology = team.topology
        use_levels = topology.has_levels and topology.is_even and not is_cuda
        self._members = topology.counterparts(team.rank) if use_levels else tuple(range(team.size))
        self._exchange = _ShardedSum(team, self._members, link, is_cuda)
        self._levels = Levels(team) if use_levels else None
        self._stager = Stager() if is_cuda else None

    @property
    def needs_order(self) -> bool:
        """Whether calls must come in one order after all, because workers of a machine combine first."""
        return self._levels is not None

    def limit_bucket(self, asked_bytes: int | None) -> int:
        """Return the most bytes that shall travel together; what was asked for counts."""
        return limit_served(asked_bytes, len(self._members), self._exchange.chunk_bytes)

    def book(self, sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Slot]:
        """Agree on slots for buckets of these sizes, in the order in which they become ready. Collective."""
        if self._levels is not None:
            sizes = [self._levels.share_of(size) for size in sizes]
        slots = self._exchange.book(sizes, dtypes)
        if self._stager is not None:
            self._stager.forget()
        # Nobody may push before everybody knows what the numbers mean.
        self._team.gather_ints([len(slots)], "the parameter server")
        return slots

    def start(self, flat: Tensor, slot: Slot, step: int, name: str) -> Exchange:
        """Replace ``flat`` by its mean over the team, in place."""
        flat.div_(self._team.size)
        if self._levels is not None:
            between = _Between(self._exchange, slot, step)
            return LevelsExchange(self._team, self._levels.start(flat, name, between), name)
        if self._exchange.compacts(slot):
            return StagedExchange(self._team, self._exchange.start_compacted(flat, slot, step), name, flat.device)
        if self._stager is not None:
            between = _Between(self._exchange, slot, step)
            return self._stager.start(flat, slot.number, between.start, self._team, name)
        return _SumExchange(self._team, self._exchange.start(_as_numpy(flat), slot, step), name)

    def close(self) -> None:
        """End the threads and connections."""
        if self._levels is not None:
            self._levels.close()
        if self._stager is not None:
            self._stager.close()
        self._exchange.close()


class _ShardedSum:
    """Sums arrays over ``members`` through their shards."""

    def __init__(self, team: Team, members: Sequence[int], link: Link, is_cuda: bool) -> None:
        self._team = team
        self._members = members
        self.chunk_bytes = chunk_bytes_for(link.bytes_per_s)
        self._transport = connect_wire(team, members, link=link)
        self._rank = self._transport.rank
        self._slots = 0
        self._priorities: dict[int, int] = {}
        self._chunks: dict[int, tuple[Chunk, ...]] = {}
        self._under_way: dict[int, _Sum] = {}
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._compact: CompactSum | None = None
        self._shard = Shard([], range(len(members)))
        self._service = ShardService(
            self._transport,
            self._shard,
            on_error=self._fail,
            on_result=self._land,
            priority=self._priorities.__getitem__,
        )
        self._transport.listen(Kind.RESULT, self._receive, self._place)
        self._transport.listen_lost(self._lost)
        self._try_to_compact(is_cuda)

    def book(self, sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Slot]:
        itemsizes = [dtype.itemsize for dtype in dtypes]
        slots = make_slots(self._slots, sizes, itemsizes, len(self._members), self.chunk_bytes)
        self._slots += len(slots)
        formats = {slot.number: _FORMATS[dtype][0] for slot, dtype in zip(slots, dtypes, strict=True)}
        for slot in slots:
            self._priorities[slot.number] = slot.priority
            self._chunks[slot.number] = slot.chunks
        if self._compact is not None:
            self._compact.include(
                [slot for slot, dtype in zip(slots, dtypes, strict=True) if is_compacted(slot, dtype)]
            )
        others = [slot.chunks for slot in slots if not self.compacts(slot)]
        self._shard.include(owned_by(self._rank, others), formats)
        return slots

    def compacts(self, slot: Slot) -> bool:
        """Return whether a bucket travels compacted."""
        return self._compact is not None and self._compact.holds(slot)

    def start_compacted(self, flat: Tensor, slot: Slot, step: int) -> Future[Any]:
        """Begin to replace ``flat``, on a CUDA device, by its sum; the future brings an event."""
        assert self._compact is not None
        return self._compact.start(flat, slot, step)

    def _try_to_compact(self, is_cuda: bool) -> None:
        """Let buckets travel compacted if all workers can do that. Collective."""
        compactor = _find_compactor(len(self._members)) if is_cuda and can_compact(self._transport.settings) else None
        all_can = all(row[0] for row in self._team.gather_ints([int(compactor is not None)], "the parameter server"))
        if compactor is not None and all_can:
            priority = self._priorities.__getitem__
            self._compact = CompactSum(self._transport, compactor, priority=priority, on_error=self._fail)
            if self._failure is not None:  # while it was made
                self._compact.fail(self._failure)

    def start(self, values: np.ndarray[Any, Any], slot: Slot, step: int) -> Future[Any]:
        """Begin to replace ``values`` by its sum."""
        total = _Sum(values, len(slot.chunks))
        with self._lock:
            if self._failure is not None:
                total.future.set_exception(self._failure)
                return total.future
            self._under_way[slot.number] = total
        for chunk in slot.chunks:
            part = values[chunk.start : chunk.stop]
            if chunk.owner == self._rank:
                self._service.contribute(slot.number, chunk.index, step, part)
            else:
                header = Header(Kind.PUSH, self._rank, slot.number, chunk.index, step, part.nbytes)
                self._transport.send(chunk.owner, header, part, priority=slot.priority)
        return total.future

    def close(self) -> None:
        if self._compact is not None:
            self._compact.close()
        self._transport.close()

    def _place(self, header: Header) -> memoryview:
        """Let a sum be received where this worker's own part lies, which its owner must have had to make it."""
        total = self._under_way.get(header.unit)
        chunks = self._chunks.get(header.unit, ())
        if total is None or header.chunk >= len(chunks):
            raise FrameError("out of turn", f"{header} came, but no such sum is under way")
        return total.part(chunks[header.chunk]).data.cast("B")

    def _receive(self, header: Header, _: memoryview) -> None:
        self._count(header.unit)

    def _land(self, number: int, index: int, _: int, result: np.ndarray[Any, Any]) -> None:
        np.copyto(self._under_way[number].part(self._chunks[number][index]), result)
        self._count(number)

    def _count(self, number: int) -> None:
        with self._lock:
            total = self._under_way.get(number)
            if total is None:  # it failed meanwhile
                return
            total.missing -= 1
            if total.missing:
                return
            del self._under_way[number]
        total.future.set_result(None)

    def _lost(self, peer: int, why: str) -> None:
        self._fail(PeerLostError(self._members[peer], why))

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error
            waiting, self._under_way = list(self._under_way.values()), {}
        for total in waiting:
            total.future.set_exception(error)
        if self._compact is not None:
            self._compact.fail(error)


class _Sum:
    def __init__(self, values: np.ndarray[Any, Any], missing: int) -> None:
        self.values = values
        self.missing = missing
        self.future: Future[None] = Future()
        if missing == 0:
            self.future.set_result(None)

    def part(self, chunk: Chunk) -> np.ndarray[Any, Any]:
        return self.values[chunk.start : chunk.stop]


@dataclass(frozen=True)
class _Between:
    """The part of an exchange that goes between machines."""

    total: _ShardedSum
    slot: Slot
    step: int

    def start(self, values: Tensor) -> Future[Any]:
        return self.total.start(_as_numpy(values), self.slot, self.step)

    def __call__(self, values: Tensor, team: Team, name: str) -> None:
        team.result(self.start(values), name, grace_s=0)


class _SumExchange(Exchange):
    def __init__(self, team: Team, future: Future[None], name: str) -> None:
        self._team = team
        self._future = future
        self._name = name

    def finish(self, is_used: bool) -> None:  # noqa: ARG002
        self._team.result(self._future, self._name, grace_s=0)


def _as_numpy(flat: Tensor) -> np.ndarray[Any, Any]:
    held = _FORMATS[flat.dtype][1]
    array: np.ndarray[Any, Any] = (flat if held is None else flat.view(held)).numpy()
    return array


def _find_compactor(workers: int) -> Compactor | None:
    """Return the current CUDA device as a compactor; None, with a word of why, where it cannot be one after all."""
    try:
        from poseidon.routes.cuda_compactor import CudaCompactor

        return CudaCompactor(workers)
    except Exception as error:
        _log.warning("gradients travel as they are, with an eighth more bytes: Triton does not work here (%s)", error)
        return None
