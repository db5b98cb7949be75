"""Step 3, allreduce: full gradients, averaged by the collectives of torch.distributed.

Gradients are divided before they are summed, as PyTorch's own DDP does, so that half-precision sums do not overflow;
NCCL does it as it reads them. On gloo, workers that share a machine combine inside it first, and each carries its share
of the traffic between machines; NCCL knows the topology and does the same by itself. If all workers share one machine,
gradients on the CPU are summed in memory that they share (``local.py``), and divided afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from poseidon.routes.base import Brought, Context, Exchange, Exchanger, LiveItem
from poseidon.routes.levels import Levels, LevelsExchange, open_level_board
from poseidon.routes.local import LocalSums, padded, suits_local_sums
from poseidon.team.board import open_board
from poseidon.team.team import Team
from poseidon.team.tensors import sum_tensors


class AllreduceExchanger(Exchanger):
    """Averages buckets over the team; calls must come in the same order on all workers."""

    def __init__(self, context: Context) -> None:
        team = self._team = context.team
        self._is_nccl = team.is_nccl
        use_levels = team.topology.has_levels and team.topology.is_even and not self._is_nccl
        self._levels = Levels(team, open_level_board(team)) if use_levels else None
        self._counterparts = team.new_group(team.topology.counterparts(team.rank)) if use_levels else None
        self._is_local = len(team.topology.machines) == 1 and not context.is_cuda
        """Whether sums need no network, as far as is known."""
        self._local: LocalSums | None = None
        self._reduced_bytes = self._reduced_between_bytes = 0
        """Handed to collectives of all workers, and of the counterparts on all machines."""
        team.meter(self.sent_by_route)

    def prepare(self, items: Sequence[LiveItem]) -> None:
        """Share memory between the workers of the only machine: for whole steps that are small, else for a thread."""
        if not self._is_local:
            return
        step_bytes = sum(padded(item.item.numel * item.parameters[0].element_size()) for item in items)
        if not suits_local_sums(step_bytes, self._team.size):
            if self._levels is None:
                board = open_level_board(self._team)
                self._levels = None if board is None else Levels(self._team, board)
                self._is_local = board is not None
        elif self._local is None:
            board = open_board(self._team, 2 * step_bytes)
            self._local = None if board is None else LocalSums(self._team, board)
            self._is_local = board is not None

    def close(self) -> None:
        """Stop the background thread, if any."""
        if self._levels is not None:
            self._levels.close()
        if self._local is not None:
            self._local.close()

    def start(self, item: LiveItem, brought: Sequence[Brought], step: int) -> Exchange:  # noqa: ARG002
        """Replace the bucket by its mean over the team, in place."""
        flat, name = item.pack(), item.name
        local = None if self._local is None else self._local.start(flat, name, step)
        if local is not None:
            return local
        levels = None if flat.is_cuda else self._levels
        if levels is not None and self._counterparts is None:
            return LevelsExchange(self._team, levels.start_mean(flat, name), name)
        averages = self._is_nccl and flat.is_cuda
        if not averages:
            flat.div_(self._team.size)
        if levels is not None:
            return LevelsExchange(self._team, levels.start(flat, name, self._between), name)
        self._reduced_bytes += flat.nbytes
        return _FlatExchange(self._team, flat, name, _options(dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM))

    def sent_by_route(self) -> dict[str, int]:
        """Return the bytes sent so far, as a ring sends them: each worker every value twice, but for its share."""
        machines = len(self._team.topology.machines)
        sent = sum(
            2 * size_bytes * (count - 1) // count
            for size_bytes, count in ((self._reduced_bytes, self._team.size), (self._reduced_between_bytes, machines))
        )
        return {"allreduce": sent}

    def _between(self, mine: Tensor, team: Team, name: str) -> None:
        self._reduced_between_bytes += mine.nbytes
        team.wait(dist.all_reduce(mine, group=self._counterparts, async_op=True), name)


class _FlatExchange(Exchange):
    def __init__(self, team: Team, flat: Tensor, name: str, options: dist.AllreduceOptions) -> None:
        self._team = team
        self._flat = flat
        self._name = name
        # Not by way of dist.all_reduce, whose checks and logs take longer than to start a small one.
        # Nor does the group itself know complex numbers.
        self._work = team.group.allreduce([torch.view_as_real(flat) if flat.is_complex() else flat], options)

    def finish(self, is_used: bool) -> None:  # noqa: ARG002
        self.wait()

    def wait(self) -> None:
        self._team.wait_for(self._work, self._flat, self._name)

    def join_stream(self) -> None:
        if self._flat.is_cuda and self._team.is_nccl:
            self._work.wait()


@functools.cache
def _options(operation: Any) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = operation
    if hasattr(options, "asyncOp"):  # since torch 2.7
        options.asyncOp = True
    return options


def average_now(team: Team, parameters: Sequence[Tensor], name: str) -> None:
    """Average ``.grad`` of a few parameters, blocking: for the rare part that no other route carries."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.copy_(sum_tensors(team, parameter.grad.contiguous().div(team.size), name))
