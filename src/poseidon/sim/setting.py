"""Everything one simulation depends on."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from poseidon.errors import ConfigError
from poseidon.planning.cluster import Cluster
from poseidon.planning.lossy import LossyChoice
from poseidon.planning.profile import Profile
from poseidon.planning.transfers import SentBits
from poseidon.sim.media import ETHERNET_PAYLOAD, MEDIA, Medium
from poseidon.sim.systems import System
from poseidon.sums.slots import chunk_bytes_for


@dataclass(frozen=True)
class Setting:
    """A model's profile on a cluster, trained by a system."""

    profile: Profile
    cluster: Cluster
    system: System
    collectives: Medium = MEDIA["nccl"]
    messages: Medium = MEDIA["messages"]
    payload: float = ETHERNET_PAYLOAD
    """Share of the cluster's link rate that carries data; 1 if programs measured the rate."""
    offers_server: bool = False
    """The planner may choose the parameter server, as in the engine without NCCL or where it beats NCCL."""
    gathers_factors: bool = True
    """Factors travel by collectives where full gradients do, as between GPUs; else by messages, as rows always do."""
    chunk_bytes: int | None = None
    """Chunk size of the sharded route; None: the engine's choice for the link."""
    in_flight_bytes: int = 1024 * 1024
    """Bytes queued in a card, which nothing can overtake."""
    staging_bytes_per_s: float = math.inf
    """Rate between a device and the host memory that messages are sent from; copies and sends alternate."""
    incast_exponent: float = 0.0
    """A burst from all machines at once (no exchange during backward) is slower by the machine count to this power."""
    wire_share: float = 1.0
    """Bytes on the wire per byte of a full gradient: 0.5 for bf16, which is lossy."""
    compacts: bool = False
    """Devices compact what goes through the parameter server, without loss."""
    precision: str = "float32"
    """What gradients are computed in, which is what compacting depends on; or "bf16" or "fp16", under autocast."""
    sent_bits: SentBits = field(default_factory=SentBits)
    """What values took through the parameter server, where that was measured; else it follows from the precision."""
    contention: float = 0.0
    """Seconds by which a second of processor time for exchanges delays computation: 0 on a GPU or with spare cores."""
    issue_s: float = 0.0
    """Interpreter time to issue a unit's forward to a device that has nothing else to do."""
    sharing: float = 1.0
    """Workers that share one device, and thus its time for compacting."""
    switch_bits_per_s: float = math.inf
    """Total rate of the switch."""
    slowdowns: tuple[float, ...] = ()
    """Compute-time factor of each machine; empty: all equal."""
    link_shares: tuple[float, ...] = ()
    """Share of the cluster's link rate that each machine has; empty: all of it."""
    straggle: float = 0.0
    """Spread (sigma) of a log-normal factor with mean 1, drawn for each machine and step."""
    seed: int = 0
    steps: int = 5
    overrides: dict[str, str] = field(default_factory=dict)
    """Forced routes, as input for the planner."""
    lossy: LossyChoice | None = None
    """Layers for which loss is allowed, where the planner decides how full gradients travel."""

    def __post_init__(self) -> None:
        if self.chunk_bytes is not None and self.chunk_bytes < 1:
            raise ConfigError(f"chunk_bytes is {self.chunk_bytes}; it must be positive")
        for name in ("payload", "in_flight_bytes", "staging_bytes_per_s", "wire_share"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be positive")
        if not self.switch_bits_per_s > 0:
            raise ConfigError(f"the switch's rate is {self.switch_bits_per_s} bit/s; it must be positive")
        if self.steps < 2:
            raise ConfigError(
                f"steps is {self.steps}; a step is timed from one end to the next, so it must be at least 2"
            )
        if not 0 <= self.straggle < 3:
            raise ConfigError(f"straggle is {self.straggle}; it is a spread from 0 up to 3")
        for name in ("slowdowns", "link_shares"):
            given: Sequence[float] = getattr(self, name)
            if given and (len(given) != self.cluster.machines or not all(value > 0 for value in given)):
                raise ConfigError(
                    f"{name} has {len(given)} values for {self.cluster.machines} machines; "
                    "give one positive number for each"
                )

    @property
    def is_symmetric(self) -> bool:
        """Whether all machines do the same at the same time, so that one stands for all."""
        return not (self.slowdowns or self.link_shares or self.straggle) and self.system.special != "factor-push"

    @property
    def simulated_machines(self) -> int:
        """Number of machines that must be simulated individually."""
        return 1 if self.is_symmetric or self.system.dense == "none" else self.cluster.machines

    @property
    def least_chunk_bytes(self) -> int:
        """Chunk size, unless the simulation uses larger ones to save events."""
        lands_whole = not self.system.overlaps_forward
        return self.chunk_bytes or chunk_bytes_for(self.cluster.between.bytes_per_s, lands_whole)

    @property
    def uses_gathers(self) -> bool:
        """Whether this system's factors travel by collectives."""
        return self.gathers_factors and self.system.dense != "sharded"

    @property
    def latency_s(self) -> float:
        """Latency from one machine to another; 0 with a single machine."""
        return self.cluster.between.latency_s if self.cluster.machines > 1 else 0.0

    def wire_bytes_per_s(self, machine: int) -> float:
        """Return the rate of one machine's link, limited by the switch."""
        share = self.link_shares[machine] if self.link_shares else 1.0
        rate = min(self.cluster.between.bits_per_s * share, self.switch_bits_per_s / self.cluster.machines)
        return rate * self.payload / 8

    def factors_of(self, machine: int) -> list[float]:
        """Return each step's compute time on a machine, as a factor of the profile's."""
        slow = self.slowdowns[machine] if self.slowdowns else 1.0
        draw = random.Random(f"{self.seed} {machine}")
        centre = -(self.straggle**2) / 2
        return [
            slow * (draw.lognormvariate(centre, self.straggle) if self.straggle else 1.0) for _ in range(self.steps)
        ]

    def with_rate(self, bits_per_s: float) -> Setting:
        """Return the same setting with another link rate."""
        return replace(
            self, cluster=replace(self.cluster, between=replace(self.cluster.between, bits_per_s=bits_per_s))
        )
