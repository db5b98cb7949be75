"""Several plans tried one after the other, each for some steps: a state machine. Pure.

All workers see the same steps and the same flags of them, so all switch plans in the same step. A plan's first
backwards still allocate memory, select kernels and find the order of collectives; after these, times are marked between
one step and the next. When enough are marked, the next backward is the plan's last: it lands at its end in any mode, so
that no forward is under way while the plan changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

WARM_BACKWARDS = 3
"""Backwards of a new plan before its steps are marked; the last of them is timed."""
MOST_ODD = 12
"""After this many steps unlike the others (another batch size, a worker without input) nothing more is tried."""


class Turn(Enum):
    """What to do after a backward has settled."""

    WAIT = "wait"
    RESTART = "restart"
    """Forget the marks of this plan: one of its steps was unlike the others."""
    MARK = "mark"
    """A step ends here."""
    SWITCH = "switch"
    """The plan's turn is over: call :meth:`Trial.finish`, and run :attr:`Trial.current`."""


class Trial:
    """Tries ``order``, numbers of plans, while the plan ``running`` is in use and has run ``WARM_BACKWARDS``."""

    def __init__(self, order: Sequence[int], laps: int, running: int) -> None:
        self.current = running
        self.is_over = list(order) == [running]
        """Nothing is left to try, and :attr:`current` stays."""
        self.is_last_backward = not self.is_over and order[0] != running
        """Whether the plan's turn ends with the next regular backward, which must land at its end."""
        self.measured_s: dict[int, float] = {}
        """By plan: how long its steps took."""
        self._is_decided = len(order) == 1
        self._left = list(order) if self.is_last_backward else list(order)[1:]
        self._first = running
        self._laps = laps
        self._seen = WARM_BACKWARDS
        self._marks = 0
        self._odd = 0

    def settled(self, is_regular: bool) -> Turn:
        """Record that a backward of the current plan has settled, on all workers; return what to do."""
        assert not self.is_over, "the trial is over"
        if not is_regular:
            self._odd += 1
            if self.is_last_backward:
                return Turn.WAIT
            self._marks = 0
            self.is_last_backward = self.was_given_up
            return Turn.RESTART
        if self.is_last_backward:
            return Turn.SWITCH
        self._seen += 1
        if self._seen < WARM_BACKWARDS:
            return Turn.WAIT
        self._marks += 1
        self.is_last_backward = self._marks > self._laps
        return Turn.MARK

    @property
    def was_given_up(self) -> bool:
        """Whether too many steps were unlike the others."""
        return self._odd > MOST_ODD

    @property
    def is_measured(self) -> bool:
        """Whether the current plan has all its marks; not if it was never to be tried, or the trial was given up."""
        return self._marks > self._laps

    def finish(self, seconds: float | None) -> bool:
        """End the current plan's turn, with the time of its steps if measured, and return whether the trial is over."""
        if seconds is not None:
            self.measured_s[self.current] = seconds
        self._seen = self._marks = 0
        self.is_last_backward = False
        if not self.was_given_up and self._left:
            self.current = self._left.pop(0)
            # A single plan, whose prediction was clearly the best, is used without being measured.
            self.is_over = self._is_decided
            return self.is_over
        self.is_over = True
        self.current = min(self.measured_s, key=self.measured_s.__getitem__, default=self._first)
        return True
