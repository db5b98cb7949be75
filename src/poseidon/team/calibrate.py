"""Measures the links and devices of a job, in about a second, for the planner.

A file, given as the ``cluster`` argument or in ``POSEIDON_CLUSTER`` on rank 0, replaces the measurement and makes plans
reproducible; if it does not exist yet, the measured figures are written to it.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from poseidon.errors import ConfigError
from poseidon.job import settings
from poseidon.planning.cluster import Cluster, Link
from poseidon.team.board import Rounds, open_board
from poseidon.team.mail import Tag
from poseidon.team.team import Team

D = TypeVar("D")

_PROBE_BYTES = 2 * 2**20
_PINGS = 6
_LATENCY_FLOOR_S = 1e-6
_WHAT = "the measurement of links"

Trip = Callable[[torch.Tensor, int, bool], None]
"""Sends values to another worker and back; the last argument says whether this worker begins."""


def find_cluster(
    team: Team, device: torch.device, given: Cluster | str | Path | None = None, needs_speeds: bool = True
) -> Cluster:
    """Return the cluster given on rank 0, or read it from the file named there, or measure it. Collective.

    Unless the caller ``needs_speeds``, nothing is measured.
    """
    path = None if isinstance(given, Cluster) else given or settings.CLUSTER.read()
    found = team.gather_json(_described(given, path) if team.rank == 0 else {})[0]
    if "error" in found:
        raise ConfigError(found["error"])
    if found.get("cluster") is not None:
        return Cluster.from_dict(found["cluster"], origin="the cluster given on rank 0")
    machines = team.topology.machines
    if not needs_speeds:
        return Cluster(len(machines), max(len(ranks) for ranks in machines))
    cluster = measure_cluster(team, device)
    if team.rank == 0 and path:
        cluster.save(path)
    return cluster


def _described(given: Cluster | str | Path | None, path: str | Path | None) -> dict[str, Any]:
    """Return what rank 0 sends to the others: a cluster, nothing, or why its file cannot be used."""
    try:
        if path and Path(path).exists():
            given = Cluster.load(path)
    except ConfigError as error:
        return {"error": str(error)}
    return {"cluster": given.to_dict() if isinstance(given, Cluster) else None}


def measure_cluster(team: Team, device: torch.device) -> Cluster:
    """Measure links and device. The slowest of each kind counts, and all workers get the same result. Collective."""
    machines = team.topology.machines
    leaders = [ranks[0] for ranks in machines]
    trip = _by_mail(team) if team.encrypts else _by_gloo(team)
    between = _measure_links(team, leaders, trip)
    near = _measure_links(team, max(machines, key=len), trip)
    sums = [] if device.type == "cuda" else _measure_sums(team)
    mine = {"between": between, "inside": near, "shared": sums, "flops": measure_flops(device)}
    everybody = team.gather_json(mine)
    defaults = Cluster(machines=1)
    inside = _slowest([link for one in everybody for link in one["inside"]], defaults.inside)
    shared = _slowest([link for one in everybody for link in one["shared"]], None)
    return Cluster(
        machines=len(machines),
        workers_per_machine=max(len(ranks) for ranks in machines),
        between=_slowest([link for one in everybody for link in one["between"]], defaults.between),
        inside=inside,
        shared=None if shared is None else _better(shared, inside),
        flops=min(one["flops"] for one in everybody),
        source="measured",
    )


def _slowest(links: list[dict[str, float]], default: D) -> Link | D:
    if not links:
        return default
    return Link(min(link["bits_per_s"] for link in links), max(link["latency_s"] for link in links))


def _better(shared: Link, inside: Link) -> Link:
    """Return the better of both figures: memory is never slower than sockets, but its measurement may be disturbed."""
    return Link(max(shared.bits_per_s, inside.bits_per_s), min(shared.latency_s, inside.latency_s))


def _by_gloo(team: Team) -> Trip:
    group = team.new_group()

    def trip(buffer: torch.Tensor, peer: int, is_first: bool) -> None:
        for step in [dist.isend, dist.irecv] if is_first else [dist.irecv, dist.isend]:
            work: Any = step(buffer, team.global_rank(peer), group=group, tag=1)
            team.wait(work, _WHAT, peer)

    return trip


def _by_mail(team: Team) -> Trip:
    numbers = dict.fromkeys(range(team.size), 0)
    subject = team.mail.new_channel()

    def trip(buffer: torch.Tensor, peer: int, is_first: bool) -> None:
        tag = Tag(subject, numbers[peer])
        numbers[peer] += 1
        data = buffer.view(torch.uint8).numpy().data
        if is_first:
            sent = team.mail.send(peer, tag, data)
        team.result(team.mail.expect(peer, tag, data if not is_first else memoryview(bytearray(data.nbytes))), _WHAT)
        if not is_first:
            sent = team.mail.send(peer, tag, data)
        team.result(sent, _WHAT)

    return trip


def _measure_links(team: Team, members: Sequence[int], trip: Trip) -> list[dict[str, float]]:
    """Ping between neighbours, so that every member's link is used: (0, 1), (2, 3), ... together, then the rest."""
    results = []
    for start in (0, 1):
        pairs = list(zip(members[start::2], members[start + 1 :: 2], strict=False))
        for first, second in pairs:
            if team.rank in (first, second):
                results.append(_ping(team, first, second, trip))
        if pairs:
            team.gather_ints([0], "the measurement of links")
    return results


def _ping(team: Team, first: int, second: int, trip: Trip) -> dict[str, float]:
    """Time round trips of a tiny and of a large message between two workers."""
    peer, is_first = (second, True) if team.rank == first else (first, False)

    def round_trip(buffer: torch.Tensor) -> float:
        start = time.perf_counter()
        trip(buffer, peer, is_first)
        return time.perf_counter() - start

    tiny, large = (torch.zeros(count, device="cpu") for count in (1, _PROBE_BYTES // 4))
    latency = statistics.median([round_trip(tiny) for _ in range(_PINGS)][1:]) / 2
    total = statistics.median([round_trip(large) for _ in range(4)][1:]) / 2
    # On a busy machine a ping may take as long as the large message, which is still mostly transfer.
    transfer_s = max(total - latency, total / 2)
    return {"bits_per_s": 8 * _PROBE_BYTES / transfer_s, "latency_s": max(latency, _LATENCY_FLOOR_S)}


def _measure_sums(team: Team) -> list[dict[str, float]]:
    """Time small and large sums in memory that the workers of this machine share; none where there is none. Collective.

    Expressed as a link: of one on which a ring of this machine's workers would take as long.
    """
    members = len(team.topology.neighbours(team.rank))
    if max(map(len, team.topology.machines)) == 1:
        return []
    board = open_board(team, 2 * _PROBE_BYTES)
    if board is None:
        return []
    rounds = Rounds(board)

    def sum_up(count: int) -> float:
        values = torch.zeros(count, dtype=torch.float32, device="cpu")
        began = time.perf_counter()
        rounds.mine(count, values.dtype).copy_(values)
        for part in rounds.meet(count, values.dtype, "the measurement of sums"):
            values += part
        return time.perf_counter() - began

    # The best of several: a worker that the system lets wait makes all others wait in a round.
    tiny_s, large_s = (min(sum_up(count) for _ in range(_PINGS)) for count in (1, _PROBE_BYTES // 4))
    board.close()
    if members == 1:
        return []
    moved_bytes = 2 * (members - 1) / members * _PROBE_BYTES
    rate = 8 * moved_bytes / max(large_s - tiny_s, large_s / 2)
    return [{"bits_per_s": rate, "latency_s": max(tiny_s / (2 * (members - 1)), _LATENCY_FLOOR_S)}]


def measure_flops(device: torch.device) -> float:
    """Return the rate of a matrix product shaped like the rebuilding of a gradient (a short inner dimension)."""
    rows, size = (256, 4096) if device.type == "cuda" else (64, 1024)
    # A generator of its own: measuring must not advance the random numbers of the training script.
    left = torch.randn(rows, size, device=device, generator=torch.Generator(device).manual_seed(0))
    times = []
    for _ in range(4):
        _settle(device)
        start = time.perf_counter()
        _ = left.t() @ left
        _settle(device)
        times.append(time.perf_counter() - start)
    return 2 * rows * size * size / statistics.median(times[1:])


def arithmetic_digest(device: torch.device) -> int:
    """Return a number that is equal on two workers if their matrix products are bit-identical.

    With the factors route every worker rebuilds gradients itself, so replicas stay identical only if this is equal.
    """
    generator = torch.Generator(device="cpu").manual_seed(20150512)
    digest = hashlib.sha256()
    for rows, outputs, inputs in ((8, 64, 96), (64, 257, 130), (256, 1000, 512)):
        stacked = torch.randn(rows, inputs + outputs, generator=generator, device="cpu", dtype=torch.float32).to(device)
        product = stacked[:, inputs:].t() @ stacked[:, :inputs]
        digest.update(product.cpu().numpy().tobytes())
        digest.update(stacked[:, inputs:].sum(0).cpu().numpy().tobytes())
    return int.from_bytes(digest.digest()[:7], "little")


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
