"""Everything one simulation depends on."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from poseidon.errors import ConfigError
from poseidon.planning.cluster import Cluster
from poseidon.planning.profile import Profile
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
    """Share of the cluster's link rate that is data; 1 where the rate was measured by programs."""
    offers_server: bool = False
    """The planner may choose the parameter server, as the engine lets it without NCCL and where it beats NCCL."""
    gathers_factors: bool = True
    """Factors go by collectives, as between GPUs, where whole gradients do; else by messages, as rows always do."""
    chunk_bytes: int | None = None
    """Size of a chunk of the sharded route; None: as the engine chooses for the link."""
    in_flight_bytes: int = 1024 * 1024
    """What a card has been given and cannot be overtaken any more."""
    staging_bytes_per_s: float = math.inf
    """Between a device and the host memory from which messages are sent; taken by turns with sending."""
    incast_exponent: float = 0.0
    """A burst from all machines at once (no exchange during backward) slows down as machines to this power."""
    wire_share: float = 1.0
    """Bytes that travel for each byte of a whole gradient: 0.5 for bf16, which is lossy."""
    compacts: bool = False
    """Devices compact what goes through the parameter server, without loss."""
    switch_bits_per_s: float = math.inf
    """What the switch carries in all."""
    slowdowns: tuple[float, ...] = ()
    """How much longer each machine computes; empty: all alike."""
    link_shares: tuple[float, ...] = ()
    """What part of the cluster's link rate each machine has; empty: all of it."""
    straggle: float = 0.0
    """Spread (sigma) of a log-normal factor of mean 1 on every machine's every step."""
    seed: int = 0
    steps: int = 5
    overrides: dict[str, str] = field(default_factory=dict)
    """Routes insisted on, as the planner takes them."""

    def __post_init__(self) -> None:
        if self.chunk_bytes is not None and self.chunk_bytes < 1:
            raise ConfigError(f"chunk_bytes is {self.chunk_bytes}; it must be positive")
        for name in ("payload", "in_flight_bytes", "staging_bytes_per_s", "wire_share"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be positive")
        if not self.switch_bits_per_s > 0:
            raise ConfigError(f"the switch's rate is {self.switch_bits_per_s} bit/s; it must be positive")
        if self.steps < 2:
            raise ConfigError(f"steps is {self.steps}; a step's time shows between two ends, so at least 2")
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
        """How many machines have to be followed one by one."""
        return 1 if self.is_symmetric or self.system.dense == "none" else self.cluster.machines

    @property
    def least_chunk_bytes(self) -> int:
        """Size of a chunk, unless the simulation takes larger ones to save events."""
        return self.chunk_bytes or chunk_bytes_for(self.cluster.between.bytes_per_s)

    @property
    def uses_gathers(self) -> bool:
        """Whether this system's factors go by collectives."""
        return self.gathers_factors and self.system.dense != "sharded"

    @property
    def latency_s(self) -> float:
        """From one machine to another; none where there is only one."""
        return self.cluster.between.latency_s if self.cluster.machines > 1 else 0.0

    def wire_bytes_per_s(self, machine: int) -> float:
        """Return the rate of one machine's link, as far as the switch lets it."""
        share = self.link_shares[machine] if self.link_shares else 1.0
        rate = min(self.cluster.between.bits_per_s * share, self.switch_bits_per_s / self.cluster.machines)
        return rate * self.payload / 8

    def factors_of(self, machine: int) -> list[float]:
        """Return how much longer than the profile each step's computation takes on a machine."""
        slow = self.slowdowns[machine] if self.slowdowns else 1.0
        draw = random.Random(f"{self.seed} {machine}")
        centre = -(self.straggle**2) / 2
        return [
            slow * (draw.lognormvariate(centre, self.straggle) if self.straggle else 1.0) for _ in range(self.steps)
        ]

    def with_rate(self, bits_per_s: float) -> Setting:
        """Return the same on other links."""
        return replace(
            self, cluster=replace(self.cluster, between=replace(self.cluster.between, bits_per_s=bits_per_s))
        )
