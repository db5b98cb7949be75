"""The lossy routes, as planner and simulator see them. Pure until one is opened.

They are among a model's routes only where the user asks for them (``planning/lossy.py``), and NumPy is imported only
then. All go over the wire and through the parameter server's protocol (``sums/``): chunks, owners, priorities and
overlap are those of ``sharded``. Here workers of one machine do not combine first: each keeps what its own gradients
lack.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from poseidon.planning.cluster import Cluster
from poseidon.planning.costs import Cost, parts_cost
from poseidon.planning.lossy import LossyChoice, as_matrix
from poseidon.planning.schedule import Item
from poseidon.planning.transfers import Conditions, Leg, Transfer
from poseidon.routes.catalogue import ShardedRoute
from poseidon.units import Load, Unit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poseidon.planning.route import Route
    from poseidon.routes.base import Context, Exchanger
    from poseidon.sums.lossy import LossyCodec

CHUNK_BYTES = 1 << 20
"""Of the values of a chunk in float32. Fixed, as all that decides who rounds what: see ``Route.is_lossy``."""
_BUCKET_BYTES = 8 << 20
_LOW_RANK_BUCKET_BYTES = 16 << 20
"""Larger: it travels in far fewer bytes, in four hops."""
_PRODUCTS = 4
"""Of each matrix with one of r columns: both factors, what is left, and the mean."""


@dataclass(frozen=True)
class LossyRoute(ShardedRoute):
    """Full gradients through the parameter server, in fewer bits, with error feedback."""

    is_lossy = True
    refuses = "sparse gradients or values of 8 bytes"
    note = ""

    def accepts(self, unit: Unit) -> bool:
        """Return true for everything in float32 or shorter but sparse gradients."""
        return not unit.is_sparse and unit.is_served and all(parameter.itemsize <= 4 for parameter in unit.parameters)

    def is_offered(self, cluster: Cluster) -> bool:  # noqa: ARG002 - as in the contract
        """Return false: the planner never chooses loss."""
        return False

    def chunk_bytes_on(self, cluster: Cluster) -> int:  # noqa: ARG002 - as in the contract
        """Return the size of a chunk, the same on all links."""
        return CHUNK_BYTES

    def limit_bytes(self, asked_bytes: int | None, defers: bool, cluster: Cluster) -> int:  # noqa: ARG002
        """Return a size that depends on nothing measured."""
        return _BUCKET_BYTES if asked_bytes is None else asked_bytes

    @abstractmethod
    def share(self, unit: Unit) -> float:
        """Return the bytes that travel, in each direction, per byte of a gradient."""

    def cost(self, unit: Unit, load: Load | None, cluster: Cluster) -> Cost:
        """Count the bytes of ``sharded`` in short; every worker of a machine sends its own."""
        return parts_cost(unit, load, cluster, self.share(unit))

    def transfers(self, item: Item, conditions: Conditions) -> list[Transfer]:
        """Send short parts to the owners, and short sums back."""
        return super().transfers(item, replace(conditions, compacts=False, wire_share=1.0))

    def _shares(self, item: Item, is_compacted: bool, conditions: Conditions) -> tuple[float, float]:  # noqa: ARG002
        share = self._item_share(item)
        return share, share

    def _inside_s(self, size_bytes: float, shares: tuple[float, float], conditions: Conditions) -> float:
        return conditions.parts_s(size_bytes * shares[0])

    def _item_share(self, item: Item) -> float:
        whole = sum(unit.size_bytes for unit in item.specs)
        return sum(self.share(unit) * unit.size_bytes for unit in item.specs) / max(whole, 1)


@dataclass(frozen=True)
class RoundedRoute(LossyRoute):
    """Every chunk is encoded by itself, by its sender and, once it is summed, by its owner."""

    @property
    @abstractmethod
    def codec(self) -> LossyCodec:
        """How."""

    def share(self, unit: Unit) -> float:
        """Return that of a large chunk."""
        return self.codec.sizes(CHUNK_BYTES // 4).start / (CHUNK_BYTES // 4) * unit.numel / max(unit.size_bytes, 1)

    def open(self, context: Context) -> Exchanger:
        """See ``rounded.py``."""
        from poseidon.routes.rounded import RoundedExchanger

        return RoundedExchanger(context, self.name, self.codec)


@dataclass(frozen=True)
class Bf16Route(RoundedRoute):
    """Rounded to bf16, both ways; summed in float32."""

    name = "bf16"
    summary = "lossy: full gradients rounded to bf16, and their sums likewise"
    refuses = "sparse gradients, or values that are not float32"

    def accepts(self, unit: Unit) -> bool:
        """Return true for float32 only: shorter values need no rounding."""
        return super().accepts(unit) and all(parameter.itemsize == 4 for parameter in unit.parameters)

    @property
    def codec(self) -> LossyCodec:
        """Two bytes a value."""
        from poseidon.sums.lossy import Bf16Codec

        return Bf16Codec()


@dataclass(frozen=True)
class Int8Route(RoundedRoute):
    """In about 8 bits, with a scale for each block, both ways."""

    block_size: int = 256

    name = "int8"
    summary = "lossy: full gradients in 8 bits with a scale for each block, and their sums likewise"

    @property
    def codec(self) -> LossyCodec:
        """Less than a byte a value."""
        from poseidon.sums.lossy import Int8Codec

        return Int8Codec(self.block_size)


@dataclass(frozen=True)
class TopKRoute(RoundedRoute):
    """The largest values of each chunk and their places, both ways."""

    density: float = 0.01

    name = "topk"
    summary = "lossy: the largest values of full gradients and their places, and those of their sums"

    @property
    def codec(self) -> LossyCodec:
        """6 bytes for each value that travels."""
        from poseidon.sums.lossy import TopKCodec

        return TopKCodec(self.density)


@dataclass(frozen=True)
class LowRankRoute(LossyRoute):
    """Matrices as products of two narrow ones (PowerSGD); what is no matrix, or too small, as it is."""

    rank: int = 4

    name = "lowrank"
    summary = "lossy: matrices as the product of two narrow ones, summed one after the other (PowerSGD)"
    refuses = "sparse gradients, or values that are not float32"

    def accepts(self, unit: Unit) -> bool:
        """Return true for float32."""
        return not unit.is_sparse and all(parameter.itemsize == 4 for parameter in unit.parameters)

    def limit_bytes(self, asked_bytes: int | None, defers: bool, cluster: Cluster) -> int:  # noqa: ARG002
        """Return a size for few round trips."""
        return _LOW_RANK_BUCKET_BYTES if asked_bytes is None else asked_bytes

    def values(self, unit: Unit) -> tuple[int, int]:
        """Return how many values travel first, and how many once these are summed."""
        first = second = 0
        for parameter in unit.parameters:
            matrix = as_matrix(parameter.shape, self.rank)
            first += parameter.numel if matrix is None else self.rank * min(matrix)
            second += 0 if matrix is None else self.rank * max(matrix)
        return first, second

    def loses(self, unit: Unit) -> bool:
        """Return whether any of its tensors is a matrix that is large enough."""
        return any(as_matrix(parameter.shape, self.rank) is not None for parameter in unit.parameters)

    def share(self, unit: Unit) -> float:
        """Return that of both together; the second ones have two bytes a value."""
        first, second = self.values(unit)
        return (first + second / 2) / max(unit.numel, 1)

    def cost(self, unit: Unit, load: Load | None, cluster: Cluster) -> Cost:
        """Count the products too."""
        cost = super().cost(unit, load, cluster)
        products_s = 2 * _PRODUCTS * self.rank * unit.numel / cluster.flops
        return Cost(cost.wire_bytes, cost.wire_s + 2 * cluster.crossing.latency_s, cost.compute_s + products_s)

    def transfers(self, item: Item, conditions: Conditions) -> list[Transfer]:
        """Send the first factors to their owners and back, then the second ones."""
        machines = conditions.cluster.machines
        counts = [self.values(unit) for unit in item.specs]
        # Of a unit of which only some parameters are in this bucket, count as much as there is of it.
        there = item.numel / max(sum(unit.numel for unit in item.specs), 1)
        ways = there * conditions.cluster.workers_per_machine * (machines - 1) / machines
        first, second = 4.0 * sum(one[0] for one in counts), 2.0 * sum(one[1] for one in counts)
        sizes = [size * ways for size in (first, first, second, second)]
        return [
            Transfer(
                name=item.name,
                units=item.units,
                route=self.name,
                legs=tuple(Leg(size) for size in sizes),
                is_collective=False,
                is_whole=True,
                # All in float32: the first ones out and in, the second ones out, and in with what they lack.
                staged_bytes=there * (2 * first + 3 * 2 * second) / 4,
                priority=item.priority,
                inside_s=conditions.parts_s(there * (first + second), messages=2),
                messages=self.owners(conditions.cluster),
            )
        ]

    def open(self, context: Context) -> Exchanger:
        """See ``lowrank.py``."""
        from poseidon.routes.lowrank import LowRankExchanger

        return LowRankExchanger(context, self.rank)


def lossy_routes(choice: LossyChoice | None) -> Sequence[Route]:
    """Return the routes that a user's choice may need."""
    if choice is None:
        return ()
    return (
        Bf16Route(),
        Int8Route(block_size=choice.block_size),
        TopKRoute(density=choice.density),
        LowRankRoute(rank=choice.rank),
    )
