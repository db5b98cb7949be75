"""Who is taken for dead: somebody who stays silent through several complaints of one rank that waits. Pure.

Complaints are counted, not timed: when a whole machine stands still for a while, nobody has complained meanwhile, and
what the others sent is heard before anybody complains again.
"""

from __future__ import annotations

from collections import Counter

COMPLAINTS = 4
"""How many of one rank in a row make an end of the rank they are about."""


class Doubts:
    """The complaints that count at present."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[int, int]] = Counter()

    def hear(self, rank: int) -> None:
        """Note that ``rank`` did something: complaints about it so far do not count any more."""
        for pair in [pair for pair in self._counts if pair[0] == rank]:
            del self._counts[pair]

    def complain(self, about: int, by: int) -> bool:
        """Note that ``by`` still waits for ``about``; return whether the latter is to be given up."""
        self._counts[about, by] += 1
        return self._counts[about, by] >= COMPLAINTS
