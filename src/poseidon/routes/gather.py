"""Step 3, factors on GPUs: like ``factors.py``, but the rows travel between devices by NCCL's all-gather.

NCCL alone uses a link better than several transports that compete for it, and nothing crosses into host memory. In
return, a collective needs one size and one order on all workers: the plan fixes the size (rows up to ``capacity``;
missing rows are zeros, which add nothing to a product), the schedule the order. A worker with more rows than planned,
or rows of another type, sets its flags; the unit then travels again by direct messages, which have no such limits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from poseidon.routes.allreduce import average_now
from poseidon.routes.base import Brought, Context, Exchange, Exchanger, Flag, LiveItem
from poseidon.routes.factors import FactorsExchanger, add_gradients, fill_rows, rebuild, row_dtype
from poseidon.team.team import Team

# Renamed in torch 2.13.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class GatherExchanger(Exchanger):
    """Exchanges the factors of linear units on GPUs; calls must come in the same order on all workers."""

    def __init__(self, context: Context) -> None:
        self._team = context.team
        self._fallback = FactorsExchanger(context)

    def start(self, item: LiveItem, brought: Sequence[Brought], step: int) -> Exchange:
        """Send up to the planned number of rows of factors, with values of the planned size."""
        return _GatherExchange(self._team, self._fallback, item, brought[0], step)


class _GatherExchange(Exchange):
    def __init__(self, team: Team, fallback: FactorsExchanger, item: LiveItem, brought: Brought, step: int) -> None:
        self._team = team
        self._fallback = fallback
        self._item = item
        self._brought = brought
        self._step = step
        unit, load = item.unit, item.item.load
        assert load is not None, "a unit travels by all-gather only if the plan knows its load"
        capacity, value_bytes = math.ceil(load.rows), load.value_bytes
        self._dtype = row_dtype(unit, brought)
        count = sum(x.shape[0] for x, _ in brought.pieces)
        fits = self._fits = count <= capacity and self._dtype.itemsize == value_bytes
        self.flags = (Flag.HAS_DENSE if brought.has_dense else Flag(0)) | (Flag(0) if fits else Flag.MISFIT)
        shape = (capacity, sum(unit.weight.shape) * value_bytes)
        mine = torch.zeros(shape, dtype=torch.uint8, device=unit.weight.device)
        if fits:
            fill_rows(mine.view(self._dtype), brought.take_pieces())
        self._everybody = torch.empty(team.size * shape[0], shape[1], dtype=torch.uint8, device=mine.device)
        self._work = _all_gather(self._everybody, mine, group=team.group, async_op=True)

    def heed(self, flags: Sequence[int]) -> None:
        self._has_dense = any(flag & Flag.HAS_DENSE for flag in flags)
        self._is_misfit = any(flag & Flag.MISFIT for flag in flags)

    def finish(self, is_used: bool) -> None:
        unit = self._item.unit
        self._team.wait_for(self._work, self._everybody, unit.name)
        if self._is_misfit:
            self._rescue_pieces()
            self._fallback.start(self._item, [self._brought], self._step).finish(is_used)
            return
        if not is_used:
            return
        if self._has_dense:
            average_now(self._team, unit.parameters, unit.name)
        add_gradients(unit, rebuild(self._team, unit, self._everybody.view(self._dtype)))

    def join_stream(self) -> None:
        if self._everybody.is_cuda:
            self._work.wait()

    def _rescue_pieces(self) -> None:
        """Read this worker's own rows back, if they were released on the assumption that all workers' rows fit."""
        if self._fits:
            capacity = self._everybody.shape[0] // self._team.size
            first = self._team.rank * capacity
            rows: Tensor = self._everybody[first : first + capacity].view(self._dtype)
            inputs = self._item.unit.weight.shape[1]
            self._brought.give(rows[:, :inputs], rows[:, inputs:])
