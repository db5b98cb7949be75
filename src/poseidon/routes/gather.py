"""Step 3, factors on GPUs: like ``factors.py``, but the rows travel between devices by NCCL's all-gather.

NCCL alone uses a link better than several transports that compete for it, and nothing crosses into host memory. In
return, a collective needs one size, one type and one order on all workers. A unit's first exchange under a plan goes by
direct messages, which have no such limits and tell all workers how many rows each of them has; from then on there is
room for that many (missing rows are zeros, which add nothing to a product). A worker with more rows, or rows of a wider
type, sets its flags; the unit then travels again by messages, and gets more room. Where the workers' rows are too
uneven for one size, as those of a mixture's experts often are, messages remain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from poseidon.routes.allreduce import average_now
from poseidon.routes.base import Brought, Context, Exchange, Exchanger, Flag, LiveItem
from poseidon.routes.factors import (
    Factors,
    FactorsExchange,
    FactorsExchanger,
    add_gradients,
    count_rows,
    fill_rows,
    rebuild,
    row_dtype,
)
from poseidon.team.team import Team

# Renamed in torch 2.13.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_SPARE = 1.25
"""Room for rows, once a unit has had more than expected."""
_EMPTIEST = 0.5
"""Share of the room that must be filled on average; with less, messages carry fewer bytes."""
_MISFITS = 3
"""After so many under one plan, a unit stays with messages."""


@dataclass(frozen=True)
class Room:
    """How many rows of one unit each worker may bring to an all-gather, and of which type; equal on all workers."""

    rows: int
    """Zero: the unit travels by messages."""
    dtype: torch.dtype
    misfits: int = 0

    @classmethod
    def after(cls, before: Room | None, counts: Sequence[int], dtype: torch.dtype) -> Room | None:
        """Return the room after an exchange by messages of so many rows per worker; None: not known yet."""
        most = max(counts)
        if before is None:
            if most == 0:
                return None
            rows, misfits = most, 0
        else:
            rows, misfits = math.ceil(most * _SPARE), before.misfits + 1
        if misfits == _MISFITS or sum(counts) < _EMPTIEST * rows * len(counts):
            rows = 0
        return cls(rows, dtype, misfits)

    def holds(self, count: int, dtype: torch.dtype) -> bool:
        """Return whether a worker's rows fit."""
        return count == 0 or (count <= self.rows and torch.promote_types(dtype, self.dtype) is self.dtype)


class GatherExchanger(Exchanger):
    """Exchanges the factors of linear units on GPUs; calls must come in the same order on all workers."""

    def __init__(self, context: Context) -> None:
        self._team = context.team
        self._messages = FactorsExchanger(context)
        self._rooms: dict[int, Room | None] = {}
        """By unit."""
        self._sent_bytes = 0
        context.team.meter(self.sent_by_route)

    def prepare(self, items: Sequence[LiveItem]) -> None:  # noqa: ARG002
        """Forget how many rows the units had under the last plan."""
        self._rooms.clear()

    def start(self, item: LiveItem, brought: Sequence[Brought], step: int) -> Exchange:
        """Send the rows of factors: in the room there is for them, or by messages."""
        room = self._rooms.get(item.unit.index)
        if room is not None and room.rows:
            width = sum(item.unit.weight.shape) * room.dtype.itemsize
            self._sent_bytes += room.rows * width * (self._team.size - 1)
            return _GatherExchange(self._team, self, room, item, brought[0], step)
        exchange = self.start_messages(item, brought[0], step)
        return exchange if room is not None else _FirstExchange(self, item, exchange)

    def sent_by_route(self) -> dict[str, int]:
        """Return the bytes sent so far by all-gathers, room that is not used included."""
        return {"factors": self._sent_bytes}

    def start_messages(self, item: LiveItem, brought: Brought, step: int) -> FactorsExchange:
        """Send any number of rows."""
        return self._messages.start(item, [brought], step)

    def learn(self, item: LiveItem, factors: Factors) -> None:
        """Make room for what all workers brought; called for the same exchanges on all workers."""
        unit = item.unit.index
        self._rooms[unit] = Room.after(self._rooms.get(unit), factors.counts, factors.rows.dtype)


class _FirstExchange(Exchange):
    """By messages, to learn how much room a unit needs."""

    def __init__(self, exchanger: GatherExchanger, item: LiveItem, exchange: FactorsExchange) -> None:
        self._exchanger = exchanger
        self._item = item
        self._exchange = exchange
        self.flags = exchange.flags

    def finish(self, is_used: bool) -> None:
        self._exchanger.learn(self._item, self._exchange.finish_factors(is_used))


class _GatherExchange(Exchange):
    def __init__(
        self, team: Team, exchanger: GatherExchanger, room: Room, item: LiveItem, brought: Brought, step: int
    ) -> None:
        self._team = team
        self._exchanger = exchanger
        self._room = room
        self._item = item
        self._brought = brought
        self._step = step
        unit = item.unit
        self._count = count_rows(brought.pieces)
        fits = self._fits = room.holds(self._count, row_dtype(unit, brought.pieces))
        self.flags = (Flag.HAS_DENSE if brought.has_dense else Flag(0)) | (Flag(0) if fits else Flag.MISFIT)
        # Kept until the exchange is over: torch forgets what a collective reads with the first wait for it, whichever
        # stream waits.
        self._mine = mine = torch.zeros(room.rows, sum(unit.weight.shape), dtype=room.dtype, device=unit.weight.device)
        if fits:
            fill_rows(mine, brought.take_pieces())
        self._everybody = torch.empty(team.size * mine.shape[0], mine.shape[1], dtype=mine.dtype, device=mine.device)
        # As bytes: not every backend knows every type.
        theirs, ours = self._everybody.view(torch.uint8), mine.view(torch.uint8)
        self._work = _all_gather(theirs, ours, group=team.group, async_op=True)

    def heed(self, flags: Sequence[int]) -> None:
        self._has_dense = any(flag & Flag.HAS_DENSE for flag in flags)
        self._is_misfit = any(flag & Flag.MISFIT for flag in flags)

    def finish(self, is_used: bool) -> None:
        unit = self._item.unit
        self._team.wait_for(self._work, self._everybody, unit.name)
        if self._everybody.is_cuda:
            # Made on the stream of a hook, and read on this one.
            self._everybody.record_stream(torch.cuda.current_stream(self._everybody.device))
        if self._is_misfit:
            self._rescue_pieces()
            exchange = self._exchanger.start_messages(self._item, self._brought, self._step)
            self._exchanger.learn(self._item, exchange.finish_factors(is_used))
            return
        if not is_used:
            return
        if self._has_dense:
            average_now(self._team, unit.parameters, unit.name)
        add_gradients(unit, rebuild(self._team, unit, self._everybody))

    def join_stream(self) -> None:
        if self._everybody.is_cuda:
            self._work.wait()

    def _rescue_pieces(self) -> None:
        """Read this worker's own rows back, if they were released on the assumption that all workers' rows fit."""
        if self._fits and self._count:
            first = self._team.rank * self._room.rows
            rows: Tensor = self._everybody[first : first + self._count]
            inputs = self._item.unit.weight.shape[1]
            self._brought.give(rows[:, :inputs], rows[:, inputs:])
