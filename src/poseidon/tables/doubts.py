"""Decides which rank is considered dead: one that stays silent through several complaints of a waiting rank. Pure.

Complaints are counted, not timed: when a whole machine freezes for a while, no complaints pile up, and messages that
arrived meanwhile are processed before the next complaint.
"""

from __future__ import annotations

from collections import Counter

COMPLAINTS = 4
"""This many complaints of one rank in a row condemn the rank they are about."""


class Doubts:
    """The complaints that currently count."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[int, int]] = Counter()

    def hear(self, rank: int) -> None:
        """Note a message from ``rank``: earlier complaints about it no longer count."""
        for pair in [pair for pair in self._counts if pair[0] == rank]:
            del self._counts[pair]

    def complain(self, about: int, by: int) -> bool:
        """Note that ``by`` still waits for ``about``; return whether to give up the latter."""
        self._counts[about, by] += 1
        return self._counts[about, by] >= COMPLAINTS
