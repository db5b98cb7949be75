"""Sums over all workers that may run in any order: a tag identifies what belongs together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from poseidon.engine.outside import Array
from poseidon.errors import MismatchError
from poseidon.team.mail import Tag
from poseidon.team.team import Team


class TaggedSums:
    """Small blocking sums of float64, identified by tags; many may run at once, in a different order on each worker.

    The constructor is collective.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._subject = team.mail.new_channel()
        self._counts: Counter[int] = Counter()
        """By tag: sums so far. Those of one tag come one after the other."""

    def sum(self, tag: int, run: int, array: Array, what: str) -> Array:
        """Return the sum of all workers' arrays of this tag, bit-identical on all of them; blocks.

        Raises MismatchError unless all are of the same run, e.g. after a run that failed on some worker.
        """
        team = self._team
        mine = np.concatenate([[float(run)], array.reshape(-1)])
        parts = [mine if rank == team.rank else np.empty_like(mine) for rank in range(team.size)]
        name = Tag(self._subject, tag << 32 | self._counts[tag])
        self._counts[tag] += 1
        others = [rank for rank in range(team.size) if rank != team.rank]
        coming = [team.mail.expect(peer, name, parts[peer].data.cast("B")) for peer in others]
        leaving = [team.mail.send(peer, name, mine.data.cast("B")) for peer in others]
        for arrival in coming:
            team.result(arrival, what)
        for sent in leaving:
            team.result(sent, what)
        check_runs([int(part[0]) for part in parts], what)
        total = parts[0][1:].copy()
        for part in parts[1:]:  # all workers add in rank order
            total += part[1:]
        summed: Array = total.reshape(array.shape)
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
