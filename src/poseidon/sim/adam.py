"""Project Adam's scheme for fully connected layers, for comparison: factors up to one machine, the matrix back down.

The route can only be simulated; it also shows how little a simulated route must define.
"""

from __future__ import annotations

from poseidon.planning.cluster import Cluster
from poseidon.planning.costs import Cost, factors_cost
from poseidon.planning.planner import PlanEntry
from poseidon.planning.route import Route
from poseidon.planning.schedule import Item
from poseidon.planning.transfers import Conditions, Leg, Transfer
from poseidon.units import Load, Unit


class FactorPush(Route):
    """Factors go to the machine that owns the unit, and the whole matrix goes back to all workers."""

    name = "factor-push"
    summary = "a linear layer's factors to one owner, the whole matrix back (Project Adam; simulated only)"
    delivers = "factors"

    def accepts(self, unit: Unit) -> bool:
        """Linear layers."""
        return unit.kind == "linear"

    def cost(self, unit: Unit, load: Load | None, cluster: Cluster) -> Cost | None:
        """Return the cost of factors; the planner does not choose this route."""
        return None if load is None else factors_cost(unit, load, cluster)

    def transfers(self, item: Item, conditions: Conditions) -> list[Transfer]:
        """Return two legs, both through the owner's network card."""
        machines = conditions.cluster.machines
        cost = self.cost(item.specs[0], item.load, conditions.cluster)
        factors = (0.0 if cost is None else cost.wire_bytes) / max(machines - 1, 1)
        rows, columns = item.specs[0].matrix
        matrix = 4.0 * rows * columns
        return [
            Transfer(
                name=item.name,
                units=item.units,
                route=self.name,
                legs=(
                    Leg(factors, owner_bytes=(0.0, (machines - 1) * factors), others_in_bytes=0.0),
                    Leg(0.0, owner_bytes=((machines - 1) * matrix, 0.0), others_in_bytes=matrix),
                ),
                is_collective=False,
                owner=item.priority % machines,
                staged_bytes=matrix,
            )
        ]


def pays_pushed(entry: PlanEntry, cluster: Cluster) -> bool:
    """Return whether Project Adam would push a unit's factors: if they are smaller than the matrix."""
    if entry.kind != "linear" or not entry.rows:
        return False
    rows, columns = entry.shape[0]
    return entry.costs["factors"].wire_bytes / max(cluster.machines - 1, 1) < 4.0 * rows * columns
