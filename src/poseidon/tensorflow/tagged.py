"""Sums over all workers that need no order among them: what belongs together is found by a number."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from poseidon.engine.outside import Array
from poseidon.team.team import Team


class TaggedSums:
    """Small blocking sums, each known by a tag; many may be under way, in another order on each worker.

    Making one is collective.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._group = team.new_group()

    def sum(self, tag: int, array: Array, what: str) -> Array:
        """Return the sum of everybody's array of this tag, the same bits everywhere; blocks."""
        team, group = self._team, self._group
        mine = torch.from_numpy(np.array(array, order="C"))
        parts = [mine if rank == team.rank else torch.empty_like(mine) for rank in range(team.size)]
        works = []
        for peer in range(team.size):
            if peer != team.rank:
                works.append((peer, dist.irecv(parts[peer], team.global_rank(peer), group, tag)))
                works.append((peer, dist.isend(mine, team.global_rank(peer), group, tag)))
        for peer, work in works:
            team.wait(work, what, peer)
        total = parts[0].clone()
        for part in parts[1:]:  # everybody adds in the order of ranks
            total += part
        summed: Array = total.numpy()
        return summed

    def of(self, tag: int) -> OneSum:
        """Return the sums of one tag."""
        return OneSum(self, tag)


class OneSum:
    """The sums of one tag, one at a time."""

    def __init__(self, sums: TaggedSums, tag: int) -> None:
        self._sums = sums
        self._tag = tag

    def sum(self, array: Array, what: str) -> Array:
        """Return the sum of everybody's array, the same bits everywhere; blocks."""
        return self._sums.sum(self._tag, array, what)
