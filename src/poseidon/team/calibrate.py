"""How fast are the links and devices of this job? Measured in about a second, so that the plan rests on facts.

A file, given as the ``cluster`` argument or in ``POSEIDON_CLUSTER`` on rank 0, replaces the measurement and makes plans
reproducible; if there is no such file yet, the measured figures are written to it.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from poseidon.planning.cluster import Cluster, Link
from poseidon.team.team import Team

_PROBE_BYTES = 2 * 2**20
_PINGS = 6
_LATENCY_FLOOR_S = 1e-6


def find_cluster(team: Team, device: torch.device, given: Cluster | str | Path | None = None) -> Cluster:
    """Return the cluster that was given, or read it from the file that was named, or measure it. Collective."""
    if isinstance(given, Cluster):
        return given
    path = given or os.environ.get("POSEIDON_CLUSTER")
    mine = Cluster.load(path).to_dict() if team.rank == 0 and path and Path(path).exists() else None
    loaded = team.gather_json(mine)[0]
    if loaded is not None:
        return Cluster.from_dict(loaded, origin=f"cluster file {path} on rank 0")
    cluster = measure_cluster(team, device)
    if team.rank == 0 and path:
        cluster.save(path)
    return cluster


def measure_cluster(team: Team, device: torch.device) -> Cluster:
    """Measure links and device; the slowest of each kind counts, and all workers get the same answer."""
    topology = team.topology
    most = max(len(ranks) for ranks in topology.machines)
    between = _measure_link(team, [ranks[0] for ranks in topology.machines])
    inside = _measure_link(team, max(topology.machines, key=len))
    mine = {"between": between, "inside": inside, "flops": measure_flops(device)}
    everybody = team.gather_json(mine)
    defaults = Cluster(machines=1)
    return Cluster(
        machines=len(topology.machines),
        workers_per_machine=most,
        between=_slowest([one["between"] for one in everybody], defaults.between),
        inside=_slowest([one["inside"] for one in everybody], defaults.inside),
        flops=min(one["flops"] for one in everybody),
        source="measured",
    )


def _slowest(links: list[dict[str, float] | None], default: Link) -> Link:
    found = [link for link in links if link is not None]
    if not found:
        return default
    return Link(min(link["bits_per_s"] for link in found), max(link["latency_s"] for link in found))


def _measure_link(team: Team, members: tuple[int, ...] | list[int]) -> dict[str, float] | None:
    """Ping from the first member to the second, while the others wait their turn; None where there is no pair."""
    if len(members) < 2:
        return None
    result = None
    if team.rank in members[:2]:
        result = _ping(team, members[0], members[1])
    team.gather_ints([0], "the measurement of links")
    return result


def _ping(team: Team, first: int, second: int) -> dict[str, float]:
    """Time round trips of a tiny and of a large message between two workers."""
    peer = team.global_rank(second if team.rank == first else first)

    def round_trip(buffer: torch.Tensor) -> float:
        start = time.perf_counter()
        steps = [dist.isend, dist.irecv] if team.rank == first else [dist.irecv, dist.isend]
        for step in steps:
            work: Any = step(buffer, peer, group=team.control, tag=1)
            team.wait(work, "the measurement of links", second if team.rank == first else first)
        return time.perf_counter() - start

    tiny, large = torch.zeros(1), torch.zeros(_PROBE_BYTES // 4)
    latency = statistics.median([round_trip(tiny) for _ in range(_PINGS)][1:]) / 2
    total = statistics.median([round_trip(large) for _ in range(4)][1:]) / 2
    return {"bits_per_s": 8 * _PROBE_BYTES / max(total - latency, 1e-6), "latency_s": max(latency, _LATENCY_FLOOR_S)}


def measure_flops(device: torch.device) -> float:
    """Return the rate of a matrix product of the shape that rebuilding a gradient has (few rows in common)."""
    rows, size = (256, 4096) if device.type == "cuda" else (64, 1024)
    left = torch.randn(rows, size, device=device)
    times = []
    for _ in range(4):
        _settle(device)
        start = time.perf_counter()
        _ = left.t() @ left
        _settle(device)
        times.append(time.perf_counter() - start)
    return 2 * rows * size * size / statistics.median(times[1:])


def arithmetic_digest(device: torch.device) -> int:
    """Return a number in which two workers agree if they compute matrix products bit for bit alike.

    The factors route has every worker rebuild gradients by itself, so replicas stay identical only where this agrees.
    """
    generator = torch.Generator().manual_seed(20150512)
    digest = hashlib.sha256()
    for rows, outputs, inputs in ((8, 64, 96), (64, 257, 130), (256, 1000, 512)):
        stacked = torch.randn(rows, inputs + outputs, generator=generator).to(device)
        product = stacked[:, inputs:].t() @ stacked[:, :inputs]
        digest.update(product.cpu().numpy().tobytes())
        digest.update(stacked[:, inputs:].sum(0).cpu().numpy().tobytes())
    return int.from_bytes(digest.digest()[:7], "little")


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
