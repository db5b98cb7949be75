"""A lossy job's warm-up: its first steps lose nothing. Counts them, and agrees on how many are left."""

from __future__ import annotations

from poseidon.routes.feedback import Feedback
from poseidon.team.team import Team


class WarmUp:
    """What is left of ``steps`` exact steps; ``feedback`` says, in checkpoints too, how many were taken."""

    def __init__(self, steps: int, feedback: Feedback) -> None:
        self.left = steps
        self._steps = steps
        self._feedback = feedback
        self._is_agreed = False

    @property
    def lasts_one_more(self) -> bool:
        """Whether lossy routes take over as soon as a backward has landed."""
        return self.left <= 1

    def is_over(self, team: Team) -> bool:
        """Return whether the first backward is lossy already, since others took all steps, or this job did before.

        All go on where the worker is that has taken most: one that came later has taken none, and one of more workers
        than a checkpoint had may know of none. Collective the first time, which is when everything has been loaded.
        """
        if self._is_agreed:
            return False
        self._is_agreed = True
        counts = team.gather_ints([self._feedback.exact_steps], "the exact first steps")
        self.left = max(self._steps - max(row[0] for row in counts), 0)
        return self.left == 0

    def count(self) -> None:
        """Record a step; all workers take it, so they need not agree again."""
        self.left = max(self.left - 1, 0)
        self._feedback.exact_steps = self._steps - self.left
