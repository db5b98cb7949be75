"""The routes that come with Poseidon, as planner, simulator and documentation see them. Pure until one is opened.

``planning/costs.py`` holds the cost formulas; the file that :meth:`Route.open` imports moves the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from poseidon.planning.cluster import Cluster
from poseidon.planning.costs import (
    INDEX_BYTES,
    Cost,
    allreduce_cost,
    factors_cost,
    rows_cost,
    sharded_cost,
    split_cost,
    tied_cost,
    touched_bytes,
)
from poseidon.planning.packing import limit_served
from poseidon.planning.route import Route, Routes
from poseidon.planning.schedule import Item
from poseidon.planning.shipments import LEAST_SAVED_S, PLACE_BYTES, SLACK, SLOW_BYTES_PER_S, share_without_zeros
from poseidon.planning.transfers import Conditions, Leg, Transfer
from poseidon.routes.bits import change_bits, gradient_bits, rounded_share
from poseidon.sums.chunks import Chunk
from poseidon.sums.compact import HALVES_SHARE, is_worth_compacting
from poseidon.sums.slots import chunk_bytes_for, make_slots
from poseidon.units import Load, Unit

if TYPE_CHECKING:
    from poseidon.routes.base import Context, Exchanger

COLLECTIVES = "collectives"
"""The queue of all collectives: they keep one order on all workers, whatever they carry."""
COMBINED = "combined"
"""The queue of items that a machine's workers combine before the parameter server sums them."""


@dataclass(frozen=True)
class AllreduceRoute(Route):
    """Full gradients, averaged by the collectives of torch.distributed."""

    name = "allreduce"
    summary = "full gradients, packed into buckets, averaged by gloo's or NCCL's allreduce"

    @property
    def queue(self) -> str:
        """A collective."""
        return COLLECTIVES

    def accepts(self, unit: Unit) -> bool:
        """Return true for everything but sparse gradients."""
        return not unit.is_sparse

    def cost(self, unit: Unit, load: Load | None, cluster: Cluster) -> Cost:
        """Count a ring or a tree."""
        return allreduce_cost(unit, load, cluster)

    def transfers(self, item: Item, conditions: Conditions) -> list[Transfer]:
        """One collective."""
        machines = conditions.cluster.machines
        size = item.size_bytes * conditions.wire_share
        return [
            Transfer(
                name=item.name,
                units=item.units,
                route=self.name,
                legs=(Leg(2 * size * (machines - 1) / machines),),
                is_collective=True,
                is_whole=True,
                hops=conditions.collective_hops,
                inside_s=conditions.combine_s(size),
            )
        ]

    def open(self, context: Context) -> Exchanger:
        """See ``allreduce.py``."""
        from poseidon.routes.allreduce import AllreduceExchanger

        return AllreduceExchanger(context)


@dataclass(frozen=True)
class ShardedRoute(Route):
    """Full gradients, summed by a parameter server that is sharded over the workers."""

    offered: bool = False
    """The planner may choose this route without being asked."""
    combines_first: bool = False
    """Workers of a machine combine before anything travels between machines, which requires one order."""
    chunk_bytes: int | None = None
    """Size of a chunk; None: chosen for the link."""
    is_alone: bool = False
    """No other route carries full gradients, whatever the cluster."""

    name = "sharded"
    summary = "full gradients, cut into chunks that their owners among the workers sum; the most urgent first"
    note = "fewer hops than a ring"
    uses_wire = True

    @property
    def awaits_step(self) -> bool:
        """Whether weights come back, once the optimizer's step is called."""
        return False

    @property
    def queue(self) -> str | None:
        """One queue if workers combine first; messages alone need no order."""
        return COMBINED if self.combines_first else None

    def accepts(self, unit: Unit) -> bool:
        """Return true for everything but sparse gradients and types that the server does not know."""
        return not unit.is_sparse and unit.is_served

    def cost(self, unit: Unit, load: Load | None, cluster: Cluster) -> Cost | None:
        """Count the bytes of a ring, in two hops."""
        return sharded_cost(unit, load, cluster)

    def is_offered(self, cluster: Cluster) -> bool:
        """Return whether there are several machines and ``offered`` is set, or there is no other way."""
        return self.is_alone or (self.offered and cluster.machines > 1)

    def owners(self, cluster: Cluster) -> int:
        """Return how many workers share the sums of one bucket."""
        return cluster.machines if self.combines_first else cluster.workers

    def chunk_bytes_on(self, cluster: Cluster) -> int:
        """Return the size of a chunk on the cluster's links."""
        return self.chunk_bytes or chunk_bytes_for(cluster.between.bytes_per_s)

    def limit_bytes(self, asked_bytes: int | None, defers: bool, cluster: Cluster) -> int:  # noqa: ARG002
        """Return a size that gives every owner whole chunks."""
        return limit_served(asked_bytes, self.owners(cluster), self.chunk_bytes_on(cluster))

    def transfers(self, item: Item, conditions: Conditions) -> list[Transfer]:
        """Send parts to the owners, and sums back. A round of chunks, one per owner, ends at about the same time."""
        machines = conditions.cluster.machines
        chunk_bytes = max(
            self.chunk_bytes_on(conditions.cluster), conditions.model_bytes // (conditions.rounds * machines)
        )
        (slot,) = make_slots(0, [item.numel], [item.itemsize], machines, chunk_bytes)
        is_compacted = (
            conditions.compacts
            and item.itemsize == 4
            and conditions.wire_share == 1  # values that were shortened are no longer float32
            and is_worth_compacting(slot.chunks)
        )
        shares = self._shares(item, is_compacted, conditions)
        rounds = [slot.chunks[at : at + machines] for at in range(0, len(slot.chunks), machines)]
        return [self._round(item, chunks, shares, is_compacted, conditions) for chunks in rounds]

    def _shares(self, item: Item, is_compacted: bool, conditions: Conditions) -> tuple[float, float]:
        """Return the shares of their bytes in which parts travel, and what comes back."""
        part, total = HALVES_SHARE if self._has_halves(item, conditions) else 1.0, 1.0
        if is_compacted:
            owners = self.owners(conditions.cluster)
            bits = gradient_bits(item.specs, conditions.loads, conditions.precision, owners)
            part, total = bits[0] / 32, bits[1] / 32
        seen = conditions.sent_bits.compacted if is_compacted else conditions.sent_bits.plain
        if seen is not None and item.itemsize == 4 and conditions.wire_share == 1:
            part, total = seen[0] / 32, seen[1] / 32
        return part, self._weight_share(item, is_compacted, conditions) if self.awaits_step else total

    def _weight_share(self, item: Item, is_compacted: bool, conditions: Conditions) -> float:
        """Return the share of their bytes in which weights travel, which devices send as changes."""
        if is_compacted:
            return change_bits(item.specs, conditions.precision) / 32
        rounded = rounded_share(item.specs, conditions.precision) if self._has_halves(item, conditions) else 0.0
        return 1 - rounded + HALVES_SHARE * rounded

    def _has_halves(self, item: Item, conditions: Conditions) -> bool:
        """Return whether the lower halves of gradients are zero, so that the host leaves them out."""
        return conditions.precision == "bf16" and item.itemsize == 4 and conditions.wire_share == 1

    def _round(
        self,
        item: Item,
        chunks: tuple[Chunk, ...],
        shares: tuple[float, float],
        is_compacted: bool,
        conditions: Conditions,
    ) -> Transfer:
        cluster = conditions.cluster
        machines = cluster.machines
        size = sum(chunk.length for chunk in chunks) * item.itemsize * conditions.wire_share
        senders = self.owners(cluster) // machines
        return Transfer(
            name=f"{item.specs[-1].name} [{chunks[0].index}]",
            units=item.units,
            route=self.name,
            legs=tuple(Leg(senders * size * share * (machines - 1) / machines) for share in shares),
            is_collective=False,
            is_whole=True,
            staged_bytes=size,
            priority=item.priority,
            inside_s=self._inside_s(size, shares, conditions),
            awaits_step=self.awaits_step,
            is_compacted=is_compacted,
            # Many rounds may be simulated as one.
            messages=senders * max(len(chunks), size / self.chunk_bytes_on(cluster)) * (machines - 1) / machines,
        )

    def _inside_s(self, size_bytes: float, shares: tuple[float, float], conditions: Conditions) -> float:  # noqa: ARG002
        """Return the time on the link inside each machine, once before and once after."""
        return conditions.combine_s(size_bytes)

    def open(self, context: Context) -> Exchanger:
        """See ``sharded.py``."""
        from poseidon.routes.sharded import ShardedExchanger

        return ShardedExchanger(context, self.chunk_bytes_on(context.cluster))


@dataclass(frozen=True)
class ServedRoute(ShardedRoute):
    """Full gradients to the owners of their chunks, and weights back; for ``update="server"`` only."""

    name = "served"
    summary = "full gradients to the owners of their chunks, which take the optimizer's step and send weights"
    note = ""

    @property
    def awaits_step(self) -> bool:
        """Weights come back."""
        return True

    def is_offered(self, cluster: Cluster) -> bool:  # noqa: ARG002 - as in the contract
        """Return true: it is among the routes only where owners take the step."""
        return True

    def open(self, context: Context) -> Exchanger:
        """See ``served.py``."""
        from poseidon.routes.served import ServedExchanger

        return ServedExchanger(context)


@dataclass(frozen=True)
class BroadcastRoute(Route):
    """Every worker's part of one unit to every other, by direct messages: the base of factors and rows."""

    has_flags = True
    uses_wire = True

    @property
    def is_collective(self) -> bool:
        """Whether the parts travel by an all-gather instead."""
        return self.queue is not None

    @property
    def shares_messages(self) -> bool:  # type: ignore[override]
        """Whether the parts travel by messages."""
        return not self.is_collective

    def _sent_share(self, item: Item, cluster: Cluster) -> float:  # noqa: ARG002 - for routes that depend on it
        """Return the share of the bytes that the planner counts which is sent."""
        return 1.0

    def _packing_s(self, item: Item, conditions: Conditions) -> float:  # noqa: ARG002 - for routes that depend on it
        """Return how long a device takes to hand over what travels together with an item."""
        return 0.0

    def transfers(self, item: Item, conditions: Conditions) -> list[Transfer]:
        """Return one leg, with about the bytes that the planner counts."""
        machines = conditions.cluster.machines
        cost = self.cost(item.specs[0], item.load, conditions.cluster)
        full_bytes = 0.0 if cost is None else cost.wire_bytes
        wire_bytes = full_bytes * self._sent_share(item, conditions.cluster)
        own = wire_bytes / max(machines - 1, 1)
        # Units that share messages share what these cost.
        peers = 0 if self.is_collective else conditions.cluster.workers - 1
        joint = max(len(item.shipment), 1)
        message_s = conditions.message_s * peers / joint
        packing_s = self._packing_s(item, conditions) / joint
        return [
            Transfer(
                name=item.name,
                units=item.units,
                route=self.name,
                legs=(Leg(wire_bytes if machines > 1 else 0.0),),
                is_collective=self.is_collective,
                # A device copies everything; the host leaves out what need not travel.
                staged_bytes=0.0 if self.is_collective else full_bytes / max(machines - 1, 1) * machines,
                hops=machines - 1 if self.is_collective else 1,
                inside_s=conditions.relay_s(own) + message_s + packing_s / 2,  # it is counted on both ends
                message_s=message_s,
            )
        ]


@dataclass(frozen=True)
class FactorsRoute(BroadcastRoute):
    """A linear layer's gradient as the two matrices whose product it is."""

    gathers: bool = False
    """Travel by NCCL's all-gather between devices, with a size fixed in the plan, instead of by messages."""

    name = "factors"
    summary = "a linear layer's input and output gradient, whose product is the weight's gradient"
    delivers = "factors"

    @property
    def queue(self) -> str | None:
        """Set only for the all-gather, which is a collective."""
        return COLLECTIVES if self.gathers else None

    def accepts(self, unit: Unit) -> bool:
        """Linear layers."""
        return unit.kind == "linear" and not unit.is_sparse

    def cost(self, unit: Unit, load: Load | None, cluster: Cluster) -> Cost | None:
        """Count both factors to all workers, and one product of everyone's factors."""
        return None if load is None or load.rows <= 0 else factors_cost(unit, load, cluster)

    def _sent_share(self, item: Item, cluster: Cluster) -> float:
        """Zeros stay at home on slow links, and where a device can leave them out and that saves time."""
        load, rate = item.load, cluster.crossing.bytes_per_s
        if load is None or (cluster.machines == 1 if self.gathers else rate > SLOW_BYTES_PER_S):
            return 1.0
        if not self.gathers:
            return share_without_zeros(load.filled, load.value_bytes)
        share = share_without_zeros(SLACK * load.filled, load.value_bytes)
        cost = factors_cost(item.specs[0], load, cluster)
        return share if (1 - share) * cost.wire_bytes / rate >= LEAST_SAVED_S else 1.0

    def open(self, context: Context) -> Exchanger:
        """See ``factors.py`` and ``gather.py``."""
        from poseidon.routes.factors import FactorsExchanger
        from poseidon.routes.gather import GatherExchanger

        return GatherExchanger(context) if self.gathers else FactorsExchanger(context)


@dataclass(frozen=True)
class RowsRoute(BroadcastRoute):
    """An embedding's gradient as the rows that a step touched."""

    on_device: bool = False
    """Tables lie in the memory of devices."""

    name = "rows"
    summary = "the rows of an embedding that a step touched, and their numbers"
    delivers = "rows"

    def accepts(self, unit: Unit) -> bool:
        """Embeddings."""
        return unit.kind == "embedding"

    def cost(self, unit: Unit, load: Load | None, cluster: Cluster) -> Cost | None:
        """Count the rows to all workers."""
        if not unit.is_sparse and (load is None or load.rows <= 0):
            return None
        return rows_cost(unit, load or Load(rows=0), cluster)

    def _sent_share(self, item: Item, cluster: Cluster) -> float:
        """Rows that repeat each other, as those of a bag do, travel once, all with their places.

        On slow links, and wherever a device finds them and the tables that share messages have enough of them.
        """
        load = item.load
        if load is None or not self._looks(item, cluster):
            return 1.0
        width = item.specs[0].matrix[1] * item.itemsize
        sent = load.bags * width + load.rows * (INDEX_BYTES + PLACE_BYTES)
        return min(1.0, sent / (load.rows * (width + INDEX_BYTES)))

    def _looks(self, item: Item, cluster: Cluster) -> bool:
        """Return whether repeated rows are looked for, and there are some."""
        load, rate = item.load, cluster.crossing.bytes_per_s
        if load is None or not 0 < load.bags < load.rows:
            return False
        if not self.on_device:
            return rate <= SLOW_BYTES_PER_S
        shipped = load.rows * item.specs[0].matrix[1] * item.itemsize * max(len(item.shipment), 1)
        return shipped * (cluster.workers - 1) / rate >= LEAST_SAVED_S

    def _packing_s(self, item: Item, conditions: Conditions) -> float:
        """Device tables: sorted there, and looked through for repeats."""
        if not self.on_device:
            return 0.0
        packing_s, looking_s = conditions.packing_s
        return packing_s + (looking_s if self._looks(item, conditions.cluster) else 0.0)

    def open(self, context: Context) -> Exchanger:
        """See ``rows.py``."""
        from poseidon.routes.rows import RowsExchanger

        return RowsExchanger(context)


@dataclass(frozen=True)
class TiedRoute(BroadcastRoute):
    """The gradient of a table that is a linear layer's weight too, as touched rows and factors."""

    name = "tied"
    summary = "a table's touched rows, and the factors of the linear layer that has the same weight"
    delivers = "rows and factors"
    shares_messages = False

    def accepts(self, unit: Unit) -> bool:
        """Tables that are a linear layer's weight too."""
        return unit.kind == "tied"

    def cost(self, unit: Unit, load: Load | None, cluster: Cluster) -> Cost | None:
        """Count the rows and both factors to all workers, and one product of everyone's factors."""
        return None if load is None or load.rows + load.touched <= 0 else tied_cost(unit, load, cluster)

    def open(self, context: Context) -> Exchanger:
        """See ``tied.py``."""
        from poseidon.routes.tied import TiedExchanger

        return TiedExchanger(context)


@dataclass(frozen=True)
class SplitRoute(ShardedRoute):
    """The gradient of a table that is a linear layer's weight too: in full from that layer, early, and touched rows."""

    exchanger: str = ShardedRoute.name
    """``sharded``, or ``served`` where owners take the step."""

    name = "split"
    summary = "a table's touched rows, and before them the full gradient of the linear layer that has the same weight"
    delivers = "rows and head"
    note = ""

    def accepts(self, unit: Unit) -> bool:
        """Tables of float32 that are a linear layer's weight too, unless something would have to keep an order."""
        return unit.kind == "tied" and unit.parameters[0].itemsize == 4 and not self.combines_first

    @property
    def awaits_step(self) -> bool:
        """Whether the owners take the step."""
        return self.exchanger == ServedRoute.name

    def is_offered(self, cluster: Cluster) -> bool:
        """Return whether the route whose exchanger it uses is."""
        return self.awaits_step or super().is_offered(cluster)

    def cost(self, unit: Unit, load: Load | None, cluster: Cluster) -> Cost | None:
        """Count what leaves after the last gradient.

        A table that pays for its exchange keeps the wire busy for the whole step; sums then only get longer by the
        rows (GPT-2 on 8 GPUs at 10 Gbit/s: 457 ms instead of 437). What owners step waits for ``step()``, so there the
        wire has time for early parts (323 ms instead of 347).
        """
        if load is None or load.rows <= 0:
            return None
        return split_cost(unit, load, cluster, are_parts_hidden=self.exchanger == ServedRoute.name)

    def _shares(self, item: Item, is_compacted: bool, conditions: Conditions) -> tuple[float, float]:
        """Return the shares of parts, which lack the touched rows, and of what comes back."""
        part, _ = super()._shares(item, is_compacted, replace(conditions, loads={}))
        return part, super()._shares(item, is_compacted, conditions)[1]

    def transfers(self, item: Item, conditions: Conditions) -> list[Transfer]:
        """Send the head's parts early; at the end the rows, and sums back, or weights and the rows to look up."""
        rounds = super().transfers(item, conditions)
        machines = conditions.cluster.machines
        touched = 0.0 if item.load is None else touched_bytes(item.specs[0], item.load)
        rows = Leg(touched * (machines - 1) / machines / max(len(rounds), 1))
        early = [replace(one, name=f"{one.name} head", legs=one.legs[:1], is_early=True) for one in rounds]
        fetched = rows.out_bytes if self.awaits_step and conditions.precision == "bf16" else 0.0
        return early + [replace(one, legs=(rows, Leg(one.legs[1].out_bytes + fetched))) for one in rounds]


_ADDED: list[Route] = []


def register(route: Route) -> None:
    """Add a custom route for planner, engine and command line in this process. Call it on every worker."""
    Routes([*standard_routes().values(), route])  # raises if the name is taken
    _ADDED.append(route)


def unregister(name: str) -> None:
    """Remove a registered route."""
    _ADDED[:] = [route for route in _ADDED if route.name != name]


def served_routes(chunk_bytes: int | None = None) -> Routes:
    """Return the routes of ``update="server"``."""
    split = SplitRoute(chunk_bytes=chunk_bytes, exchanger=ServedRoute.name)
    return Routes([ServedRoute(chunk_bytes=chunk_bytes), split])


def standard_routes(
    *,
    offers_server: bool = False,
    gathers_factors: bool = False,
    combines_first: bool = False,
    chunk_bytes: int | None = None,
    encrypts: bool = False,
) -> Routes:
    """Return all routes for these conditions; equal on all workers. In a job that ``encrypts``: those that can."""
    if encrypts:
        whole = ShardedRoute(offered=True, chunk_bytes=chunk_bytes, is_alone=True)
        added = [route for route in _ADDED if route.uses_wire]
        split = SplitRoute(offered=True, chunk_bytes=chunk_bytes)
        return Routes([whole, FactorsRoute(), RowsRoute(), TiedRoute(), split, *added])
    built_in = (
        AllreduceRoute(),
        ShardedRoute(offers_server, combines_first, chunk_bytes),
        FactorsRoute(gathers_factors),
        RowsRoute(gathers_factors),
        TiedRoute(),
        SplitRoute(offers_server, combines_first, chunk_bytes),
    )
    return Routes([*built_in, *_ADDED])
