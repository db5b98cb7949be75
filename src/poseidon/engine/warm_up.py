"""A lossy job's warm-up: its first steps lose nothing. Counts them, and agrees on how many are left."""

from __future__ import annotations

from poseidon.routes.feedback import Feedback
from poseidon.team.team import Team


class WarmUp:
    """What is left of ``steps`` exact steps; ``feedback`` says, in checkpoints too, how many were taken."""

    def __init__(self, steps: int, feedback: Feedback | None) -> None:
        self.is_under_way = steps > 0
        """Lossy routes are not in use yet."""
        self._left = steps
        self._steps = steps
        self._feedback = feedback
        self._is_agreed = steps == 0

    @property
    def lasts_one_more(self) -> bool:
        """Whether lossy routes take over as soon as a backward has landed."""
        return self.is_under_way and self._left <= 1

    def agree(self, team: Team) -> bool:
        """Go on where the worker is that has taken most steps; return whether the warm-up turns out to be over.

        A worker that came later has taken none, and one of more workers than a checkpoint had may know of none.
        Collective the first time, which is before the first backward: only then is everything loaded.
        """
        if self._is_agreed:
            return False
        self._is_agreed = True
        assert self._feedback is not None
        counts = team.gather_ints([self._feedback.exact_steps], "the exact first steps")
        self._left = max(self._steps - max(row[0] for row in counts), 0)
        self.is_under_way = self._left > 0
        return not self.is_under_way

    def count(self) -> None:
        """Record a step; all workers take it, so they need not agree again."""
        if self.is_under_way:
            assert self._feedback is not None
            self._left = max(self._left - 1, 0)
            self._feedback.exact_steps = self._steps - self._left

    @property
    def is_due_to_end(self) -> bool:
        """Whether all exact steps were taken."""
        return self.is_under_way and self._left == 0

    def end(self) -> None:
        """Record that lossy routes are in use."""
        self.is_under_way = False
