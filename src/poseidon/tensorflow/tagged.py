"""Sums over all workers that need no order among them: what belongs together is found by a number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from poseidon.engine.outside import Array
from poseidon.errors import MismatchError
from poseidon.team.team import Team


class TaggedSums:
    """Small blocking sums of float64, each known by a tag; many may be under way, in another order on each worker.

    Making one is collective.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._group = team.new_group()

    def sum(self, tag: int, run: int, array: Array, what: str) -> Array:
        """Return the sum of everybody's array of this tag, the same bits everywhere; blocks.

        Raises MismatchError unless all are of the same run, as after one that some worker gave up halfway.
        """
        team, group = self._team, self._group
        mine = torch.from_numpy(np.concatenate([[float(run)], array.reshape(-1)]))
        parts = [mine if rank == team.rank else torch.empty_like(mine) for rank in range(team.size)]
        works = []
        for peer in range(team.size):
            if peer != team.rank:
                works.append((peer, dist.irecv(parts[peer], team.global_rank(peer), group, tag)))
                works.append((peer, dist.isend(mine, team.global_rank(peer), group, tag)))
        for peer, work in works:
            team.wait(work, what, peer)
        check_runs([int(part[0]) for part in parts], what)
        total = parts[0][1:].clone()
        for part in parts[1:]:  # everybody adds in the order of ranks
            total += part[1:]
        summed: Array = total.numpy().reshape(array.shape)
        return summed

    def of(self, tag: int, run: int) -> OneSum:
        """Return the sums of one tag in one run."""
        return OneSum(self, tag, run)


class OneSum:
    """The sums of one tag in one run, one at a time."""

    def __init__(self, sums: TaggedSums, tag: int, run: int) -> None:
        self._sums = sums
        self._tag = tag
        self._run = run

    def sum(self, array: Array, what: str) -> Array:
        """Return the sum of everybody's array, the same bits everywhere; blocks."""
        return self._sums.sum(self._tag, self._run, array, what)


def check_runs(runs: Sequence[int], what: str) -> None:
    """Raise unless what the workers have sent, by rank, is of the same run. Pure."""
    for rank, run in enumerate(runs):
        if run != runs[0]:
            raise MismatchError(
                f"rank 0 sent {what} in its training run {runs[0]}, rank {rank} in its run {run}: a run failed on some "
                "worker, or was left out; let all workers make the same runs"
            )
