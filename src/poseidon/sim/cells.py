"""Predictions for a benchmark's cells: the systems it measures, on the links it emulates."""

from __future__ import annotations

from dataclasses import dataclass, replace

from poseidon.planning.cluster import Cluster, Link
from poseidon.planning.planner import server_beats_nccl, server_rivals_nccl
from poseidon.planning.profile import Profile
from poseidon.sim.media import LAB_PAYLOAD, transports_of
from poseidon.sim.setting import Setting
from poseidon.sim.steps import simulate
from poseidon.sim.systems import SYSTEMS

LAB_LATENCY_S = 50e-6
"""Latency between programs on two emulated machines, on an idle transports."""
SIMULATED = {
    "linear": "linear",
    "ddp": "ddp",
    "ddp-gloo": "ddp",
    "poseidon": "poseidon",
    "poseidon-distribute": "distribute",
    "poseidon-distribute:update=server": "served",
}
"""The benchmark's systems, and what simulates each."""
CHOOSING = {"poseidon": ("ddp",), "poseidon-distribute": ("ddp", "poseidon")}
"""Systems that choose among plans, and others whose plans are among them."""


@dataclass(frozen=True)
class Bench:
    """What a benchmark knows about a cell once only the linear system has run."""

    profile: Profile
    """One worker's profile while all compute; it is scaled to the linear measurement."""
    linear_s: float
    """Step time of the linear system, which only computes."""
    machines: int
    rate_bits: float
    is_gpu: bool
    """Workers share a GPU, and NCCL carries their collectives."""
    cores: int
    """Cores of the host, shared by all machines."""
    flops: float
    """One worker's matrix rate while all compute."""
    compacts: bool = False
    """Devices compact what goes through the parameter server."""
    precision: str = "float32"
    """What forward computes in."""
    uses_cores: bool = False
    """Workers compute on the host's cores; false where a GPU computes, or computation is paced."""
    tries: bool = False
    """Poseidon's systems try several plans, among them those that take the other's routes, and keep the fastest."""


def predict_ms(bench: Bench, system: str) -> float | None:
    """Return the predicted step time; None for a system that is not simulated, and on links without a rate."""
    if system not in SIMULATED or bench.rate_bits <= 0:
        return None
    return min(simulate(setting).step_s for setting in _choices(bench, system)) * 1e3


def _choices(bench: Bench, system: str) -> list[Setting]:
    """Return the simulations among which the fastest counts: those of the plans that a system may keep."""
    made = make_bench_setting(bench, system)
    if not bench.tries or system not in CHOOSING:
        return [made]
    others = [make_bench_setting(bench, other) for other in CHOOSING[system]]
    offered = [replace(one, offers_server=True) for one in (made, *others) if server_rivals_nccl(one.cluster)]
    return [made, *others, *offered]


def make_bench_setting(bench: Bench, system: str) -> Setting:
    """Return the simulation of one system in one cell."""
    is_nccl = bench.is_gpu and system != "ddp-gloo"
    cores = bench.cores / bench.machines
    cluster = Cluster(bench.machines, between=Link(bench.rate_bits, LAB_LATENCY_S), flops=bench.flops)
    simulated = SYSTEMS[SIMULATED[system]]
    transports = transports_of(is_nccl, cores, bench.uses_cores)
    return Setting(
        profile=bench.profile.scaled_to(bench.linear_s),
        cluster=cluster,
        system=simulated,
        collectives=transports.collectives,
        messages=transports.messages,
        contention=transports.contention,
        issue_s=bench.profile.issue_s or transports.issue_s,
        sharing=bench.machines if bench.is_gpu else 1.0,
        payload=LAB_PAYLOAD,
        offers_server=not is_nccl or server_beats_nccl(cluster, simulated.overlaps_forward),
        compacts=bench.compacts,
        precision=bench.precision,
        gathers_factors=is_nccl,
    )
