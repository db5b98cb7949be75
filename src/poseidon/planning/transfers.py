"""An item's exchange as the simulator moves it: legs of bytes between machines, and their other costs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from poseidon.planning.cluster import Cluster, Link
from poseidon.units import Load


@dataclass(frozen=True)
class Leg:
    """A part of a transfer that must finish everywhere before the next begins."""

    out_bytes: float
    """Bytes that leave each machine; as many arrive."""
    owner_bytes: tuple[float, float] | None = None
    """Bytes that leave and reach the one machine that owns the unit, if they differ from the others'."""
    others_in_bytes: float | None = None
    """Bytes that reach each of the other machines in that case."""


@dataclass(frozen=True)
class Transfer:
    """Units that travel together."""

    name: str
    units: tuple[int, ...]
    """All must be ready before it starts."""
    route: str
    legs: tuple[Leg, ...]
    is_collective: bool
    """Runs one at a time, in one order on all machines."""
    is_whole: bool = False
    """Full gradients, which a lossy format would shorten."""
    owner: int = 0
    staged_bytes: float = 0.0
    """Bytes that cross between device and host in each leg."""
    priority: int = 0
    """Lower is more urgent, in systems that use priorities."""
    hops: int = 1
    """Sequential messages in each leg, each with the link's latency."""
    inside_s: float = 0.0
    """Time on the link inside each machine and for its own work, once before and once after."""
    message_s: float = 0.0
    """The part of it that is processor time for direct messages."""
    awaits_step: bool = False
    """The second leg begins once all workers have called the optimizer's ``step()``, at the end of backward."""
    is_early: bool = False
    """Leaves when the first of all gradients is final, although the unit's own is not: the part of a tied table that
    its linear layer makes."""
    messages: float = 0.0
    """Other messages that each machine sends in each leg, as far as they cost processor time beyond their bytes."""
    is_compacted: bool = False
    """Devices compact these messages."""

    @property
    def out_bytes(self) -> float:
        """Total bytes a machine (the owner, if there is one) sends."""
        return sum(leg.out_bytes if leg.owner_bytes is None else leg.owner_bytes[0] for leg in self.legs)


@dataclass(frozen=True)
class SentBits:
    """How many bits a value took through the parameter server: as a part, and as what came back; None: not known."""

    compacted: tuple[float, float] | None = None
    """Where devices compact."""
    plain: tuple[float, float] | None = None
    """Elsewhere."""


@dataclass(frozen=True)
class Conditions:
    """What a transfer depends on besides its item: the cluster, and the software that moves the bytes."""

    cluster: Cluster
    collective_hops: int = 1
    """Sequential messages in one allreduce."""
    message_s: float = 0.0
    """Host work for one unit's direct messages to one peer."""
    packing_s: tuple[float, float] = (0.0, 0.0)
    """Until a device has handed over the rows of tables that travel together; longer if it looks for repeated ones."""
    wire_share: float = 1.0
    """Bytes on the wire per byte of a full gradient: 0.5 for bf16, which is lossy."""
    compacts: bool = False
    """Devices compact what goes through the parameter server, without loss."""
    precision: str = "float32"
    """What gradients are computed in: autocast, "bf16" or "fp16", leaves fewer bits in them than their dtype has."""
    loads: Mapping[str, Load] = field(default_factory=dict)
    """By unit: in a table's gradient only the rows that a step touched have values."""
    sent_bits: SentBits = SentBits()
    """What was measured, in place of what is expected of the precision."""
    rounds: int = 400
    """About the most rounds of chunks to cut a model into: finer ones change little and cost much."""
    model_bytes: int = 0
    """Bytes of all items of the same route."""

    def combine_s(self, size_bytes: float) -> float:
        """Return the time for the workers of one machine to combine their parts, or to share the result."""
        return self._inside_s(size_bytes, self.cluster.combining)

    def relay_s(self, size_bytes: float) -> float:
        """Return the time for the workers of one machine to hand each other messages of this size."""
        return self._inside_s(size_bytes, self.cluster.inside)

    def parts_s(self, size_bytes: float, messages: int = 1) -> float:
        """Return the time for workers that do not combine first to reach the owners on their own machine.

        Each sends these a part of its own; ``size_bytes`` go to all owners. What leaves together shares the latency.
        """
        cluster = self.cluster
        near = cluster.workers_per_machine - 1
        if near == 0:
            return 0.0
        return near / cluster.workers * size_bytes / cluster.inside.bytes_per_s + messages * cluster.inside.latency_s

    def _inside_s(self, size_bytes: float, link: Link) -> float:
        members = self.cluster.workers_per_machine
        return (members - 1) / members * size_bytes / link.bytes_per_s + (members - 1) * link.latency_s
