"""Step 3, factors on GPUs: like ``factors.py``, but the rows travel between devices by NCCL's all-gather.

NCCL alone uses a link better than several transports that compete for it, and nothing crosses into host memory. In
return, a collective needs one size, one type and one order on all workers. A unit's first exchange under a plan goes by
direct messages, which have no such limits and tell all workers how many rows each of them has; from then on there is
room for that many (missing rows are zeros, which add nothing to a product), or for their values that are not zero
(``room.py``). A worker with more rows, more of such values, or rows of a wider type, sets its flags; the unit then
travels again by messages, and gets more room. Where the workers' rows are too uneven for one size, as those of a
mixture's experts often are, messages remain.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from poseidon.planning.shipments import LEAST_SAVED_S
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
from poseidon.routes.room import Room
from poseidon.routes.zeros import drop_zeros, restore_zeros
from poseidon.team.team import Team

# Renamed in torch 2.13.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class GatherExchanger(Exchanger):
    """Exchanges the factors of linear units on GPUs; calls must come in the same order on all workers."""

    def __init__(self, context: Context) -> None:
        self._team = context.team
        self._messages = FactorsExchanger(context)
        cluster = context.cluster
        crossings = cluster.workers_per_machine * (cluster.machines - 1)
        # Devices of one machine may have links of their own, faster than any that was measured.
        self._least_saved = LEAST_SAVED_S * cluster.between.bytes_per_s / crossings if crossings else math.inf
        """How many bytes of each worker's rows must be saved for zeros to be left out."""
        self._rooms: dict[int, Room | None] = {}
        """By unit."""
        self._fitted: Counter[int] = Counter()
        """By unit: exchanges in its room since the last that did not fit."""
        self._sent_bytes = 0
        context.team.meter(self.sent_by_route)

    def prepare(self, items: Sequence[LiveItem]) -> None:  # noqa: ARG002
        """Forget how many rows the units had under the last plan."""
        self._rooms.clear()
        self._fitted.clear()

    def start(self, item: LiveItem, brought: Sequence[Brought], step: int) -> Exchange:
        """Send the rows of factors: in the room there is for them, or by messages."""
        room = self._rooms.get(item.unit.index)
        if room is not None and room.rows:
            self._fitted[item.unit.index] += 1
            exchange = _GatherExchange(self._team, self, room, item, brought[0], step)
            self._sent_bytes += exchange.sent_bytes * (self._team.size - 1)
            return exchange
        if room is not None:
            return self._messages.start(item, brought, step)
        return _FirstExchange(self, item, self.start_messages(item, brought[0], step))

    def sent_by_route(self) -> dict[str, int]:
        """Return the bytes sent so far by all-gathers, room that is not used included."""
        return {"factors": self._sent_bytes}

    def start_messages(self, item: LiveItem, brought: Brought, step: int) -> FactorsExchange:
        """Send any number of rows, and count what comes, for :meth:`learn`."""
        return self._messages.start(item, [brought], step, counts_values=True)

    def learn(self, item: LiveItem, factors: Factors) -> None:
        """Make room for what all workers brought; called for the same exchanges on all workers."""
        unit = item.unit.index
        fitted = self._fitted.pop(unit, 0)
        room = Room.after(self._rooms.get(unit), factors.counts, factors.rows.dtype, factors.values, fitted)
        if room is not None and room.values:
            room = room.unless_useless(sum(item.unit.weight.shape), self._least_saved)
        self._rooms[unit] = room


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
        fits = room.holds(self._count, row_dtype(unit, brought.pieces))
        self._known_flags = Flag.HAS_DENSE if brought.has_dense else Flag(0)
        if not fits:
            self._known_flags |= Flag.MISFIT
        # Kept until the exchange is over: torch forgets what a collective reads with the first wait for it, whichever
        # stream waits. And some worker's rows may not fit; then these travel again.
        make = torch.empty if fits and self._count == room.rows else torch.zeros
        self._rows = rows = make(room.rows, self._width, dtype=room.dtype, device=unit.weight.device)
        self._fits = fits
        if fits:
            fill_rows(rows, brought.take_pieces())
        self._mine = rows.view(-1).view(torch.uint8)
        self.has_late_flags = bool(room.values)
        if room.values:
            self._mine, filled = drop_zeros(room.layout(self._width), rows)
            self._filled = _later(filled)
        self.sent_bytes = self._mine.nbytes
        # As bytes: not every backend knows every type.
        self._everybody = self._mine.new_empty(team.size * self._mine.numel())
        self._work = _all_gather(self._everybody, self._mine, group=team.group, async_op=True)

    @property
    def _width(self) -> int:
        return sum(self._item.unit.weight.shape)

    @property
    def flags(self) -> Flag:  # type: ignore[override]
        if self.has_late_flags and self._filled() > self._room.values:
            return self._known_flags | Flag.MISFIT
        return self._known_flags

    def heed(self, flags: Sequence[int]) -> None:
        self._has_dense = any(flag & Flag.HAS_DENSE for flag in flags)
        self._is_misfit = any(flag & Flag.MISFIT for flag in flags)

    def finish(self, is_used: bool) -> None:
        unit = self._item.unit
        self._team.wait_for(self._work, self._everybody, unit.name)
        if self._everybody.is_cuda:
            # Made on the stream of a hook, and read on this one.
            for tensor in (self._everybody, self._mine, self._rows):
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        if self._is_misfit:
            if self._fits and self._count:
                self._give_again()
            exchange = self._exchanger.start_messages(self._item, self._brought, self._step)
            self._exchanger.learn(self._item, exchange.finish_factors(is_used))
            return
        if not is_used:
            return
        if self._has_dense:
            average_now(self._team, unit.parameters, unit.name)
        add_gradients(unit, rebuild(self._team, unit, self._all_rows()))

    def join_stream(self) -> None:
        if self._everybody.is_cuda:
            self._work.wait()

    def _all_rows(self) -> Tensor:
        if self._room.values:
            return restore_zeros(self._room.layout(self._width), self._everybody)
        return self._everybody.view(self._room.dtype).view(-1, self._width)

    def _give_again(self) -> None:
        """Bring this worker's own rows, which were taken on the assumption that all workers' rows fit."""
        inputs = self._item.unit.weight.shape[1]
        rows = self._rows[: self._count]
        self._brought.give(rows[:, :inputs], rows[:, inputs:])


def _later(count: Tensor) -> Callable[[], int]:
    """Return what waits for the device, if any, and returns the number that it has computed."""
    if not count.is_cuda:
        return lambda: int(count)
    host = torch.empty((), dtype=count.dtype, device="cpu", pin_memory=True)
    host.copy_(count, non_blocking=True)
    done = torch.cuda.Event(blocking=True)
    # Not on the current device's: a backward of several devices starts what another one of them computes.
    done.record(torch.cuda.current_stream(count.device))

    def wait() -> int:
        done.synchronize()
        return int(host)

    return wait
