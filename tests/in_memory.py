"""Workers as threads of one process, without sockets: a team that meets in memory, and a route over shared memory.

For unit tests of what lies above the wire. Every wait has a deadline, so a test that would hang fails instead.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from poseidon.planning.cluster import Cluster
from poseidon.planning.costs import Cost
from poseidon.planning.route import Route
from poseidon.routes.base import Brought, Context, Exchange, Exchanger, LiveItem
from poseidon.team.topology import Topology
from poseidon.units import Load, Unit

T = TypeVar("T")
DEADLINE_S = 20.0


class Meeting:
    """Where workers put something under a key and wait until all have."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._news = threading.Condition()
        self._brought: dict[Any, dict[int, Any]] = defaultdict(dict)

    def put(self, key: Any, rank: int, value: Any) -> None:
        with self._news:
            assert rank not in self._brought[key], f"worker {rank} came twice for {key}"
            self._brought[key][rank] = value
            self._news.notify_all()

    def take(self, key: Any) -> list[Any]:
        with self._news:
            there = self._news.wait_for(lambda: len(self._brought[key]) == self.size, DEADLINE_S)
            assert there, f"{key}: only {sorted(self._brought[key])} of {self.size} workers came"
            return [self._brought[key][rank] for rank in range(self.size)]


class Quiet:
    """Stands for the watch."""

    hosts: Sequence[str] = ("one", "two", "three")
    recorder = None
    clock = None

    def note(self, step: int, doing: str, samples: int = 0) -> None:
        pass


@dataclass(eq=False)
class ThreadTeam:
    """The part of a team that the engine uses."""

    rank: int
    meeting: Meeting
    watch: Quiet = field(default_factory=Quiet)
    is_nccl: bool = False
    encrypts: bool = False
    timeout_s: float = DEADLINE_S
    is_closed: bool = False
    _calls: int = 0

    @property
    def size(self) -> int:
        return self.meeting.size

    @property
    def topology(self) -> Topology:
        return Topology(tuple((rank,) for rank in range(self.size)))

    def start_gather(self, values: Sequence[Any]) -> Callable[[str], list[list[Any]]]:
        key = ("gather", self._calls)
        self._calls += 1
        self.meeting.put(key, self.rank, list(values))
        return lambda _: self.meeting.take(key)

    def gather_ints(self, values: Sequence[int], what: str = "") -> list[list[int]]:
        return self.start_gather(values)(what)

    def gather_json(self, value: Any) -> list[Any]:
        return [json.loads(text) for (text,) in self.start_gather([json.dumps(value)])("")]

    def close(self, error: BaseException | None = None) -> None:
        self.is_closed = True


@dataclass(frozen=True, eq=False)
class MemoryRoute(Route):
    """Whole gradients, added up in rank order by everybody. ``queue_name`` makes it keep an order."""

    meeting: Meeting
    queue_name: str | None = None
    log: list[tuple[int, int, str]] = field(default_factory=list)
    """Rank, step and item of everything that started."""

    name = "memory"
    summary = "for tests"

    @property
    def queue(self) -> str | None:
        return self.queue_name

    def accepts(self, unit: Unit) -> bool:
        return not unit.is_sparse

    def cost(self, unit: Unit, load: Load | None, cluster: Cluster) -> Cost:
        return Cost(unit.size_bytes, unit.size_bytes / cluster.between.bytes_per_s, 0.0)

    def open(self, context: Context) -> Exchanger:
        return MemoryExchanger(self, context)


class MemoryExchanger(Exchanger):
    def __init__(self, route: MemoryRoute, context: Context) -> None:
        self._route = route
        self._rank = context.team.rank
        self.is_closed = False

    def start(self, item: LiveItem, brought: Sequence[Brought], step: int) -> Exchange:
        flat = item.pack()
        self._route.log.append((self._rank, step, item.name))
        self._route.meeting.put((step, item.item.parameters), self._rank, flat.clone())
        return MemoryExchange(self._route.meeting, (step, item.item.parameters), flat)

    def close(self) -> None:
        self.is_closed = True


class MemoryExchange(Exchange):
    def __init__(self, meeting: Meeting, key: Any, flat: torch.Tensor) -> None:
        self._meeting = meeting
        self._key = key
        self._flat = flat

    def finish(self, is_used: bool) -> None:
        parts = self._meeting.take(self._key)
        self._flat.copy_(sum(parts[1:], parts[0]) / len(parts))


def run_threads(work: Callable[[int], T], size: int) -> list[T]:
    """Run ``work(rank)`` on a thread for each worker and return the results; the first error is raised."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE_S)
    if errors:
        raise errors[0]
    assert len(results) == size, f"workers {sorted(set(range(size)) - set(results))} hang"
    return [results[rank] for rank in range(size)]
