"""Measures the links and devices of a job, in about a second, for the planner.

A file, given as the ``cluster`` argument or in ``POSEIDON_CLUSTER`` on rank 0, replaces the measurement and makes plans
reproducible; if it does not exist yet, the measured figures are written to it.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from poseidon.errors import ConfigError
from poseidon.job import settings
from poseidon.planning.cluster import Cluster, Link
from poseidon.team.board import Rounds, open_board
from poseidon.team.mail import Tag
from poseidon.team.team import Team

D = TypeVar("D")

_PROBE_BYTES = 2 * 2**20
_MOST_PROBE_BYTES = 32 * 2**20
_PROBE_S = 0.015
"""How long a probe should fill a link."""
_PINGS = 6
_LATENCY_FLOOR_S = 1e-6
_WHAT = "the measurement of links"


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
    far, near_by = (team.mail.new_channel(), team.mail.new_channel()) if team.size > 1 else (0, 0)
    between = _measure_links(team, leaders, far, _MOST_PROBE_BYTES)
    # Inside a machine nothing lets bursts through, and a large probe would be a peak of memory.
    near = _measure_links(team, max(machines, key=len), near_by, _PROBE_BYTES)
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


def _measure_links(team: Team, members: Sequence[int], subject: int, most_bytes: int) -> list[dict[str, float]]:
    """Ping between neighbours, so that every member's link is used: (0, 1), (2, 3), ... together, then the rest."""
    results = []
    for start in (0, 1):
        pairs = list(zip(members[start::2], members[start + 1 :: 2], strict=False))
        for first, second in pairs:
            if team.rank in (first, second):
                is_first = team.rank == first
                results.append(_ping(Pinging(team, second if is_first else first, is_first, subject), most_bytes))
        if pairs:
            team.gather_ints([0], _WHAT)
    return results


class Pinging:
    """Round trips between this worker and another one, which makes the same ones."""

    def __init__(self, team: Team, peer: int, is_first: bool, subject: int) -> None:
        self._team = team
        self._peer = peer
        self._is_first = is_first
        self._subject = subject
        self._number = 0

    def time(self, size_bytes: int, count: int) -> list[float]:
        """Return how long each of ``count`` round trips of so many bytes took."""
        there, back = bytearray(size_bytes), bytearray(size_bytes)
        return [self._trip(memoryview(there), memoryview(back)) for _ in range(count)]

    def agree(self, value: int) -> int:
        """Return the number that the first of the two says."""
        said = bytearray(value.to_bytes(8, "little"))
        self._trip(memoryview(said), memoryview(bytearray(8)))
        return int.from_bytes(said, "little")

    def _trip(self, there: memoryview, back: memoryview) -> float:
        """Send bytes there and back; ``there`` holds the first one's afterwards at both."""
        mail, tag = self._team.mail, Tag(self._subject, self._number)
        self._number += 1
        began = time.perf_counter()
        if self._is_first:
            sent = mail.send(self._peer, tag, there)
            self._team.result(mail.expect(self._peer, tag, back), _WHAT)
        else:
            self._team.result(mail.expect(self._peer, tag, there), _WHAT)
            sent = mail.send(self._peer, tag, there)
        took_s = time.perf_counter() - began
        self._team.result(sent, _WHAT)
        return took_s


def _ping(pinging: Pinging, most_bytes: int) -> dict[str, float]:
    """Time round trips of a tiny and of a large message between two workers."""
    latency = statistics.median(pinging.time(4, _PINGS)[1:]) / 2
    # The first is slow: buffers and windows grow. It tells how much fills the link for long enough.
    total = min(pinging.time(_PROBE_BYTES, 3)[1:]) / 2
    size_bytes = pinging.agree(min(probe_bytes(_transfer_s(total, latency)), most_bytes))
    if size_bytes > _PROBE_BYTES:
        total = min(pinging.time(size_bytes, 2)) / 2
    return {"bits_per_s": 8 * size_bytes / _transfer_s(total, latency), "latency_s": max(latency, _LATENCY_FLOOR_S)}


def _transfer_s(total_s: float, latency_s: float) -> float:
    # On a busy machine a ping may take as long as the large message, which is still mostly transfer.
    return max(total_s - latency_s, total_s / 2)


def probe_bytes(transfer_s: float) -> int:
    """Return how much to send to know a link's speed, if the usual probe took ``transfer_s``. Pure.

    What a network card or switch lets through at once after a rest must not count: on 10 Gbit/s that may be 1 MB.
    """
    wanted = _PROBE_BYTES * _PROBE_S / max(transfer_s, 1e-9)
    return min(max(int(wanted), _PROBE_BYTES), _MOST_PROBE_BYTES) >> 16 << 16


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
    return statistics.median(measure_rates(device, 3))


def measure_rates(device: torch.device, rounds: int) -> list[float]:
    """Return that rate as measured several times, one after the other."""
    rows, size = (256, 4096) if device.type == "cuda" else (64, 1024)
    # A generator of its own: measuring must not advance the random numbers of the training script.
    left = torch.randn(rows, size, device=device, generator=torch.Generator(device).manual_seed(0))
    times = []
    for _ in range(rounds + 1):
        _settle(device)
        start = time.perf_counter()
        _ = left.t() @ left
        _settle(device)
        times.append(time.perf_counter() - start)
    return [2 * rows * size * size / seconds for seconds in times[1:]]


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
