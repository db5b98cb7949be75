"""Step 3, factors on GPUs: as ``factors.py``, but the rows go from device to device by NCCL's all-gather.

NCCL keeps a link fuller than several planes of traffic that compete for it, and nothing crosses into host memory.
In return a collective needs one size on all workers and one order: the size is the plan's (rows up to ``capacity``;
missing rows are zeros, which add nothing to a product), the order is the scheduler's. A worker that has more rows
than planned, or rows of another type, says so in :meth:`GatherExchange.flags`; then the unit goes once more by
direct messages, which carry anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntFlag
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from poseidon.routes.allreduce import average_now
from poseidon.routes.base import Exchange, LiveUnit
from poseidon.routes.factors import FactorsRoute, add_gradients, fill_rows, rebuild
from poseidon.team.team import Team

# Renamed in torch 2.13.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Flag(IntFlag):
    """What a worker has to say about its part of a gather."""

    HAS_DENSE = 1
    """``.grad`` holds a local part that came as a full gradient."""
    MISFIT = 2
    """The rows did not fit what was planned."""


class GatherRoute:
    """Exchanges the factors of linear units on GPUs; calls must come in the same order on all workers."""

    def __init__(self, team: Team, fallback: FactorsRoute) -> None:
        self._team = team
        self._fallback = fallback

    def start(self, unit: LiveUnit, step: int, capacity: int, value_bytes: int) -> GatherExchange:
        """Send up to ``capacity`` rows of factors with values of ``value_bytes`` bytes."""
        return GatherExchange(self._team, self._fallback, unit, step, (capacity, value_bytes))


class GatherExchange(Exchange):
    """One unit's gather under way."""

    def __init__(self, team: Team, fallback: FactorsRoute, unit: LiveUnit, step: int, planned: tuple[int, int]) -> None:
        self._team = team
        self._fallback = fallback
        self._unit = unit
        self._step = step
        capacity, value_bytes = planned
        self._dtype = unit.row_dtype
        count = sum(x.shape[0] for x, _ in unit.pieces)
        fits = self._fits = count <= capacity and self._dtype.itemsize == value_bytes
        self.flags = (Flag.HAS_DENSE if unit.has_dense else Flag(0)) | (Flag(0) if fits else Flag.MISFIT)
        shape = (capacity, sum(unit.weight.shape) * value_bytes)
        mine = torch.zeros(shape, dtype=torch.uint8, device=unit.weight.device)
        if fits:
            fill_rows(mine.view(self._dtype), unit.pieces)
        self._everybody = torch.empty(team.size * shape[0], shape[1], dtype=torch.uint8, device=mine.device)
        self._work = _all_gather(self._everybody, mine, group=team.group, async_op=True)
        if fits:
            unit.pieces = []

    def heed(self, flags: Sequence[int]) -> None:
        """Take note of what all workers said about this unit; to be called before :meth:`finish`."""
        self._has_dense = any(flag & Flag.HAS_DENSE for flag in flags)
        self._is_misfit = any(flag & Flag.MISFIT for flag in flags)

    def finish(self) -> None:  # noqa: D102 - as in the contract
        self._team.wait_for(self._work, self._everybody, self._unit.name)
        unit = self._unit
        if self._is_misfit:
            self._rescue_pieces()
            self._fallback.start(unit, self._step).finish()
            return
        if not unit.is_used:
            return
        if self._has_dense:
            average_now(self._team, unit.parameters, unit.name)
        add_gradients(unit, rebuild(self._team, unit, self._everybody.view(self._dtype)))

    def join_stream(self) -> None:  # noqa: D102 - as in the contract
        if self._everybody.is_cuda:
            self._work.wait()

    def _rescue_pieces(self) -> None:
        """Read this worker's own rows back, if they were given away in the belief that everybody's would fit."""
        if self._fits:
            capacity = self._everybody.shape[0] // self._team.size
            first = self._team.rank * capacity
            rows: Tensor = self._everybody[first : first + capacity].view(self._dtype)
            inputs = self._unit.weight.shape[1]
            self._unit.pieces = [(rows[:, :inputs], rows[:, inputs:])]
