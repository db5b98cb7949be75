"""Bounded staleness that chooses its bound: workers publish their step times, and all choose the same from them.

The times lie in rows of the table that holds the parameters: they need no message of their own and arrive under the
same clocks. A worker reads what was published at clock ``c`` at its own clock ``c + bound``, when it may proceed only
if all others have passed ``c``; nobody waits for the choice, and all choose from the same numbers.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from poseidon.planning.staleness import MOST, Prospect, StepTimes, choose_bound, step_towards
from poseidon.ps import Table

WINDOW = 20
"""Steps whose times are published."""
AGAIN = 100
"""Steps from one choice to the next, after the first, which comes as soon as a window is full."""
UNIT_S = 1e-4
"""Times are published as whole multiples of this, which sums of floats keep exactly."""
_LONGEST = 2**22
"""In these units; longer steps count as that long. Differences stay exact in float32."""

_log = logging.getLogger(__name__)


class ChosenBound:
    """Chooses how many clocks the workers of a table may be apart; ``rows`` are the table's, one for each worker.

    Call :meth:`measured` between a step and its clock, and :meth:`clocked` after the clock, before the next read.
    """

    def __init__(self, table: Table, rows: npt.NDArray[np.int64], place: int) -> None:
        assert table.spec.width >= 2 * WINDOW
        assert AGAIN - WINDOW > 2 * MOST, "times must be read before others take their place"
        self.bound = 0
        """The bound in force: none apart, until there is something to choose by."""
        self.prospects: list[Prospect] = []
        """What each bound promised at the last choice, the best first."""
        self._table = table
        self._rows = rows
        self._mine = rows[place : place + 1]
        self._published: npt.NDArray[Any] = np.zeros(table.spec.width, table.spec.dtype)
        self._own: list[float] = []
        self._waited: list[float] = []
        self._travel_s = 0.0
        self._steps = 0
        """Steps so far; a load takes clocks too, but is no step."""
        self._due = -1
        """Clock at which to choose; -1: nothing is published."""
        table.limit(0)

    def measured(self, own_s: float, waited_s: float) -> None:
        """Note this worker's own time of the step that ends now, and how long it waited before that step."""
        self._own.append(own_s)
        self._waited.append(waited_s)
        self._steps += 1
        if self._steps == WINDOW or self._steps % AGAIN == 0:
            self._publish()
            self._due = self._table.now + 1 + self.bound
            self._own.clear()
            self._waited.clear()

    def clocked(self) -> None:
        """Choose, if it is time: the first time freely, then one place up or down."""
        # All workers load after the same step, so they choose at the same clock also where that lies behind.
        if self._due < 0 or self._table.now < self._due:
            return
        self._due = -1
        times = _read_times(self._table.get(self._rows))
        if times is None:
            return
        if self.bound == 0:
            # Only in lockstep does a wait show how long an exchange takes.
            self._travel_s = times.travel_s
        is_first = not self.prospects
        self.prospects = choose_bound(times.own_s, self._travel_s)
        wanted = self.prospects[0].bound
        chosen = wanted if is_first else step_towards(self.bound, wanted)
        if chosen != self.bound:
            _log.info("staleness is %d clocks from clock %d on; it was %d", chosen, self._table.now, self.bound)
            self.bound = chosen
            self._table.limit(chosen)

    def _publish(self) -> None:
        times = np.zeros_like(self._published)
        for start, measured in ((0, self._own), (WINDOW, self._waited)):
            units = np.rint(np.asarray(measured[-WINDOW:]) / UNIT_S)
            times[start : start + WINDOW] = np.clip(units, start == 0, _LONGEST)
        self._table.inc(self._mine, (times - self._published)[None])
        self._published = times


def _read_times(rows: npt.NDArray[Any]) -> StepTimes | None:
    """Return what the workers published; None if it is not of several. One that died early has published nothing."""
    written = rows[rows[:, 0] > 0].astype(np.float64) * UNIT_S
    if len(written) < 2:
        return None
    own, waited = written[:, :WINDOW].tolist(), written[:, WINDOW : 2 * WINDOW].tolist()
    return StepTimes(tuple(tuple(times) for times in own), tuple(tuple(times) for times in waited))
