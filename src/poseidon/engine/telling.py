"""What whoever watches a job is told of an engine's plan."""

from __future__ import annotations

from poseidon.engine.backward import LiveSchedule
from poseidon.observe.recorder import Recorder
from poseidon.planning.cluster import Cluster
from poseidon.planning.planner import Plan
from poseidon.team.team import Team


class PlanTelling:
    """Tells of plans, and knows the last that it told of."""

    def __init__(self, team: Team, cluster: Cluster, is_async: bool) -> None:
        self._team = team
        self._cluster = cluster
        self.told: Plan | None = None
        """The last one."""
        if team.watch.recorder is not None:
            team.watch.recorder.is_async = is_async

    def tell(self, plan: Plan | None, planned: LiveSchedule | None, step: int) -> None:
        """Tell which items travel, by which route, with the times that the planner expects."""
        self.told, recorder = plan, self._team.watch.recorder
        if recorder is not None and plan is not None and planned is not None and self._team.rank == 0:
            self._record(recorder, plan, planned, step)

    def _record(self, recorder: Recorder, plan: Plan, planned: LiveSchedule, step: int) -> None:
        costs = {entry.unit: entry.cost for entry in plan.entries}
        rows = []
        for live in planned.items:
            found = [costs[spec.name] for spec in live.item.specs if spec.name in costs]
            wire_bytes, wire_s = sum(one.wire_bytes for one in found), sum(one.wire_s for one in found)
            rows.append((live.item.route, live.item.name, wire_bytes, wire_s))
        link = self._cluster.between if len(self._team.topology.machines) > 1 else None
        recorder.tell_plan(plan.name, step, rows, 0.0 if link is None else 8 * link.bytes_per_s)
