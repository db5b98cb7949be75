"""What a plan depends on, and when to replan. Pure: everything here is the same on all workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from poseidon.planning.cluster import Cluster
from poseidon.planning.planner import Plan, make_plan
from poseidon.planning.route import Routes
from poseidon.units import Load, Unit

REPLAN_RATIO = 1.3
"""A batch that grows or shrinks by more than this may deserve a new plan..."""
REPLAN_AFTER = 2
"""... if it does so for this many steps in a row, all of about one size: an epoch's last batch is often smaller, the
next one is not. Every new plan doubles the number, since a batch that changed before is likely to change again."""
MOST_REPLAN_AFTER = 256
"""No more than this many are waited for: batches that grow as training goes on deserve new plans to the end."""
LEAST_GAIN = 0.05
"""Share of the exchange's time that a new plan must save: to adopt it takes some steps."""


class Replanning:
    """The plan in force and the loads behind it."""

    def __init__(
        self, units: Sequence[Unit], cluster: Cluster, routes: Routes, overrides: Mapping[str, str] | None
    ) -> None:
        self.plan: Plan | None = None
        self.loads: dict[str, Load] = {}
        """By unit; this worker's own until the first plan, then the mean of all workers."""
        self._units = units
        self._cluster = cluster
        self._routes = routes
        self.overrides = overrides
        """Routes by unit name or pattern, ahead of what would be cheapest."""
        self._planned_batch = 0.0
        self._after = REPLAN_AFTER
        self._odd_batches = 0
        """In a row, of about one size."""
        self._smallest = self._largest = 0.0
        """Among these."""

    def observe(self, unit: str, load: Load) -> None:
        """Record load on a unit in the first backward; loads of several calls accumulate."""
        before = self.loads.get(unit)
        self.loads[unit] = load if before is None else before.plus(load)

    def make(self, loads: Mapping[str, Load], batch: float) -> Plan:
        """Plan for these loads, measured at this mean batch."""
        self._after = REPLAN_AFTER if self.plan is None else min(2 * self._after, MOST_REPLAN_AFTER)
        self.plan = self._best(loads)
        self.accept(loads, batch)
        return self.plan

    def accept(self, loads: Mapping[str, Load], batch: float) -> None:
        """Take this batch for the usual one from now on, whatever the plan."""
        self.loads = dict(loads)
        self._planned_batch = batch
        self._odd_batches = 0

    def is_due(self, batch: float) -> bool:
        """Record one more step's mean batch; return whether the batch has changed permanently."""
        if self._is_near(batch, self._planned_batch):
            self._odd_batches = 0
            return False
        smallest, largest = min(self._smallest, batch), max(self._largest, batch)
        if self._odd_batches and self._is_near(smallest, largest):
            self._odd_batches, self._smallest, self._largest = self._odd_batches + 1, smallest, largest
        else:
            self._odd_batches, self._smallest, self._largest = 1, batch, batch
        return self._odd_batches >= self._after

    def is_worthwhile(self, loads: Mapping[str, Load]) -> bool:
        """Return whether the best plan for these loads is clearly faster than the one in force would be."""
        assert self.plan is not None
        best, routes = self._best(loads), self.plan.routes
        # A route that is not offered for these loads costs at least as much as the one that was chosen instead.
        staying_s = sum(entry.costs.get(routes[entry.unit], entry.cost).seconds for entry in best.entries)
        return staying_s - sum(entry.cost.seconds for entry in best.entries) > LEAST_GAIN * staying_s

    @property
    def is_odd(self) -> bool:
        """Whether the last step's batch differed much from the planned one."""
        return self._odd_batches > 0

    def scaled_loads(self, batch: float) -> dict[str, Load]:
        """Return the loads expected for another batch size."""
        ratio = self._ratio(batch)
        return {name: load.scaled(ratio) for name, load in self.loads.items()}

    def _best(self, loads: Mapping[str, Load]) -> Plan:
        return make_plan(self._units, loads, self._cluster, self._routes, self.overrides)

    def _is_near(self, batch: float, other: float) -> bool:
        return not other or 1 / REPLAN_RATIO <= batch / other <= REPLAN_RATIO

    def _ratio(self, batch: float) -> float:
        return batch / self._planned_batch if self._planned_batch else 1.0
