"""What a plan depends on, and when to replan. Pure: everything here is the same on all workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from poseidon.planning.cluster import Cluster
from poseidon.planning.planner import Plan, make_plan
from poseidon.planning.route import Routes
from poseidon.units import Load, Unit

REPLAN_RATIO = 1.3
"""A batch that grows or shrinks by more than this justifies a new plan..."""
REPLAN_AFTER = 2
"""... if it does so for this many steps in a row: an epoch's last batch is often smaller, the next one is not."""


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
        self._overrides = overrides
        self._planned_batch = 0.0
        self._odd_batches = 0

    def observe(self, unit: str, load: Load) -> None:
        """Record load on a unit in the first backward; loads of several calls accumulate."""
        before = self.loads.get(unit)
        self.loads[unit] = load if before is None else before.plus(load)

    def make(self, loads: Mapping[str, Load], batch: float) -> Plan:
        """Plan for these loads, measured at this mean batch."""
        self.loads = dict(loads)
        self.plan = make_plan(self._units, loads, self._cluster, self._routes, self._overrides)
        self._planned_batch = batch
        self._odd_batches = 0
        return self.plan

    def is_due(self, batch: float) -> bool:
        """Record one more step's mean batch; return whether the batch has changed permanently."""
        ratio = self._ratio(batch)
        self._odd_batches = 0 if 1 / REPLAN_RATIO <= ratio <= REPLAN_RATIO else self._odd_batches + 1
        return self._odd_batches >= REPLAN_AFTER

    @property
    def is_odd(self) -> bool:
        """Whether the last step's batch differed much from the planned one."""
        return self._odd_batches > 0

    def scaled_loads(self, batch: float) -> dict[str, Load]:
        """Return the loads expected for another batch size."""
        ratio = self._ratio(batch)
        return {name: load.scaled(ratio) for name, load in self.loads.items()}

    def _ratio(self, batch: float) -> float:
        return batch / self._planned_batch if self._planned_batch else 1.0
