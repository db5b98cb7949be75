"""An item's exchange as the simulator moves it: legs of bytes between machines, and what they cost besides. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from poseidon.planning.cluster import Cluster


@dataclass(frozen=True)
class Leg:
    """A part of a transfer that must be over everywhere before the next begins."""

    out_bytes: float
    """Leaves every machine, and as much arrives."""
    owner_bytes: tuple[float, float] | None = None
    """What leaves and what reaches the one machine that holds the unit, where it differs from the others."""
    others_in_bytes: float | None = None
    """What reaches each of the others then."""


@dataclass(frozen=True)
class Transfer:
    """Units that travel together."""

    name: str
    units: tuple[int, ...]
    """All must be ready."""
    route: str
    legs: tuple[Leg, ...]
    is_collective: bool
    """Goes in one order on all machines, one after the other."""
    owner: int = 0
    staged_bytes: float = 0.0
    """What crosses between device and host in each leg."""
    priority: int = 0
    """Lower is more urgent, where a system heeds it."""
    hops: int = 1
    """Messages that follow each other in each leg, every one with the link's latency."""
    inside_s: float = 0.0
    """On the link inside each machine and for its own work, once before and once after."""

    @property
    def out_bytes(self) -> float:
        """What a machine (the owner, where there is one) sends in all."""
        return sum(leg.out_bytes if leg.owner_bytes is None else leg.owner_bytes[0] for leg in self.legs)


@dataclass(frozen=True)
class Conditions:
    """What a transfer depends on besides its item: the cluster, and the software that moves the bytes."""

    cluster: Cluster
    collective_hops: int = 1
    """Messages that follow each other in one allreduce."""
    message_s: float = 0.0
    """Host work for what one unit sends to one peer by messages of its own."""
    wire_share: float = 1.0
    """Bytes that travel for each byte of a whole gradient: 0.5 for bf16, which is lossy."""
    compacts: bool = False
    """Devices compact what goes through the parameter server, without loss."""
    rounds: int = 400
    """Into about as many rounds of chunks a model is cut at most: finer ones change little and cost much."""
    model_bytes: int = 0
    """Of all that goes through the parameter server."""

    def inside_s(self, size_bytes: float) -> float:
        """Return the time for the workers of one machine to combine, or to share what came."""
        members, link = self.cluster.workers_per_machine, self.cluster.inside
        return (members - 1) / members * size_bytes / link.bytes_per_s + (members - 1) * link.latency_s
