"""Step 3, allreduce: full gradients, averaged by the collectives of torch.distributed.

Gradients are divided before they are summed, as PyTorch's own DDP does, so that half-precision sums do not
overflow. On gloo, where several workers share a machine, they combine inside it first and each carries its share of
the traffic between machines; NCCL knows the topology and does the like by itself.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from poseidon.routes.base import Exchange
from poseidon.team.team import CLOSE_S, Arrival, Team


class AllreduceRoute:
    """Averages flat tensors over the team; calls must come in the same order on all workers."""

    def __init__(self, team: Team) -> None:
        self._team = team
        use_levels = team.topology.has_levels and team.topology.is_even and not team.is_nccl
        self._levels = _Levels(team) if use_levels else None

    def close(self) -> None:
        """End the background thread, if there is one."""
        if self._levels is not None:
            self._levels.close()

    def start(self, flat: Tensor, name: str) -> Exchange:
        """Replace ``flat`` by its mean over the team, in place."""
        flat.div_(self._team.size)
        if self._levels is not None and not flat.is_cuda:
            return _LevelsExchange(self._team, self._levels.start(flat, name), name)
        return _FlatExchange(self._team, flat, name)


class _FlatExchange(Exchange):
    def __init__(self, team: Team, flat: Tensor, name: str) -> None:
        self._team = team
        self._flat = flat
        self._name = name
        self._work = dist.all_reduce(flat, group=team.group, async_op=True)

    def finish(self) -> None:
        self._team.wait_for(self._work, self._flat, self._name)


class _LevelsExchange(Exchange):
    def __init__(self, team: Team, arrival: Arrival, name: str) -> None:
        self._team = team
        self._arrival = arrival
        self._name = name

    def finish(self) -> None:
        self._arrival.wait(self._team, self._name)


class _Levels:
    """Sum inside the machine, then between machines, then share inside: on a thread, one tensor after the other."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._neighbours = team.topology.neighbours(team.rank)
        self._inside = team.new_group(self._neighbours)
        self._between = team.new_group(team.topology.counterparts(team.rank))
        self._inbox: queue.SimpleQueue[tuple[Tensor, str, Arrival] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work_forever, name="poseidon-levels", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join(timeout=CLOSE_S)

    def start(self, flat: Tensor, name: str) -> Arrival:
        arrival = Arrival()
        self._inbox.put((flat, name, arrival))
        return arrival

    def _work_forever(self) -> None:
        while (job := self._inbox.get()) is not None:
            flat, name, arrival = job
            try:
                self._reduce(flat, name)
            except BaseException as error:
                arrival.fail(error)
            else:
                arrival.succeed(None)

    def _reduce(self, flat: Tensor, name: str) -> None:
        members = len(self._neighbours)
        share = -(-flat.numel() // members)
        padded = (
            flat
            if share * members == flat.numel()
            else torch.nn.functional.pad(flat, (0, share * members - flat.numel()))
        )
        received = torch.empty_like(padded)
        self._team.wait(dist.all_to_all_single(received, padded, group=self._inside, async_op=True), name)
        mine = received.view(members, share).sum(0)
        self._team.wait(dist.all_reduce(mine, group=self._between, async_op=True), name)
        shares = [torch.empty_like(mine) for _ in range(members)]
        self._team.wait(dist.all_gather(shares, mine, group=self._inside, async_op=True), name)
        flat.copy_(torch.cat(shares)[: flat.numel()])


def average_now(team: Team, parameters: Sequence[Tensor], name: str) -> None:
    """Average ``.grad`` of a few parameters at once and blocking: for the rare part that no other route carries."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        flat = parameter.grad.contiguous().div(team.size)
        _FlatExchange(team, flat, name).finish()
        parameter.grad.copy_(flat)
