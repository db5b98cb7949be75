"""Whether a job is to end, or to save since it is time: all workers learn it at the same step, and wait for nobody."""

from __future__ import annotations

from collections.abc import Callable

from poseidon.launch.stopping import Stopping
from poseidon.team.team import Team


class EndRequests:
    """Signals to this worker, noted from construction until :meth:`close`, and what workers tell each other of them."""

    def __init__(self, on_signal: bool, is_timed: bool) -> None:
        self._is_timed = is_timed
        self._stopping = Stopping() if on_signal else None
        if self._stopping is not None:
            self._stopping.__enter__()
        self._pending: Callable[[str], list[list[int]]] | None = None
        """Flags on their way from all workers."""

    @property
    def number(self) -> int:
        """The signal that asks this worker to end; 0: none."""
        return 0 if self._stopping is None else self._stopping.number

    def obey(self) -> None:
        """Note that the signal has had its effect."""
        if self._stopping is not None:
            self._stopping.number = 0

    def forget(self) -> None:
        """Forget what workers of the last epoch have said."""
        self._pending = None

    def agree(self, team: Team | None, is_late: bool) -> tuple[list[int], bool]:
        """Return the workers' signals, and whether rank 0's time is over, as of the step before. Collective.

        What is sent now is read at the next step, so nobody waits for it.
        """
        if team is None:
            return [self.number], is_late
        if self._stopping is None and not self._is_timed:
            return [], False
        flags = [] if self._pending is None else self._pending("the workers' agreement on a checkpoint")
        was_late = bool(flags) and bool(flags[0][1])
        # Said once: what was heard now is saved in this step.
        self._pending = team.start_gather([self.number, int(is_late and not was_late)])
        return [row[0] for row in flags], was_late

    def close(self) -> int:
        """Let signals be handled as before; return one that came after the last step, or 0."""
        stopping, self._stopping = self._stopping, None
        if stopping is None:
            return 0
        stopping.__exit__()
        return stopping.number
