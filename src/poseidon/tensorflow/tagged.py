"""Sums over all workers that may run in any order: a tag identifies what belongs together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from poseidon.engine.outside import Array
from poseidon.errors import MismatchError
from poseidon.team.team import Team


class TaggedSums:
    """Small blocking sums of float64, identified by tags; many may run at once, in a different order on each worker.

    The constructor is collective.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._group = team.new_group()

    def sum(self, tag: int, run: int, array: Array, what: str) -> Array:
        """Return the sum of all workers' arrays of this tag, bit-identical on all of them; blocks.

        Raises MismatchError unless all are of the same run, e.g. after a run that failed on some worker.
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
        for part in parts[1:]:  # all workers add in rank order
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
        """Return the sum of all workers' arrays, bit-identical on all of them; blocks."""
        return self._sums.sum(self._tag, self._run, array, what)


def check_runs(runs: Sequence[int], what: str) -> None:
    """Raise unless all workers' messages, given by rank, are of the same run. Pure."""
    for rank, run in enumerate(runs):
        if run != runs[0]:
            raise MismatchError(
                f"rank 0 sent {what} in its training run {runs[0]}, rank {rank} in its run {run}: a run failed on some "
                "worker, or was skipped; let all workers make the same runs"
            )
