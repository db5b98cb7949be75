"""Workers of the parameter server for sums on the in-memory network, with either arithmetic and without threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from compact_twin import HostCompactor
from poseidon.errors import WorkerLostError
from poseidon.sums.arithmetic import Adder
from poseidon.sums.chunks import Chunk
from poseidon.sums.device import DeviceAdder, DeviceArithmetic
from poseidon.sums.events import Done, Waiter
from poseidon.sums.host import host_adders
from poseidon.sums.server import SumServer
from poseidon.sums.slots import Slot, make_slots
from poseidon.wire.memory import MemoryNetwork, MemoryTransport, Scheduler, make_memory_network

Array = np.ndarray[Any, Any]

KINDS = ["host", "device"]
CHUNK_VALUES = 1024
"""Enough for a chunk to be worth compacting."""


class Immediately(Waiter):
    """Waits for nothing, on no thread."""

    def __init__(self, name: str) -> None:
        pass

    def put(self, done: Done, then: Callable[[], None], _fail: Callable[[BaseException], None]) -> None:
        done.synchronize()
        then()

    def close(self) -> None:
        pass


class SumWorker:
    """One rank's server and its device."""

    def __init__(self, transport: MemoryTransport, kind: str, divisor: int, dtype: torch.dtype) -> None:
        self.transport = transport
        self.dtype = dtype
        self.divisor = divisor
        self.kind = kind
        self.compactor = HostCompactor()
        self.device = DeviceArithmetic(self.compactor, Immediately)
        self.server = SumServer(transport)
        self.adders: list[Adder] = []
        transport.listen_lost(lambda peer, why: self.server.fail(WorkerLostError(f"rank {peer}: {why}")))

    def book(self, slots: Sequence[Slot]) -> None:
        rank, size = self.transport.rank, self.transport.size
        if self.kind == "host":
            self.adders = [*host_adders(slots, ["float32"] * len(slots), rank, self.divisor)]
        else:
            self.adders = [DeviceAdder(slot, rank, size, self.device, self.divisor, self.dtype) for slot in slots]
        self.server.book(zip(slots, self.adders, strict=True))

    def start(self, values: Array, slot: Slot, step: int) -> Future[Any]:
        """Begin to sum ``values`` in place."""
        return self.server.start(values if self.kind == "host" else torch.from_numpy(values), slot, step)


def make_team(
    kind: str,
    workers: int,
    sizes: Sequence[int],
    scheduler: Scheduler | None = None,
    chunk_values: int = CHUNK_VALUES,
    divisor: int = 1,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[SumWorker], list[Slot], MemoryNetwork]:
    """Return workers that have booked slots of these sizes, the slots, and the network between them."""
    slots = make_slots(0, sizes, [4] * len(sizes), workers, 4 * chunk_values)
    transports = make_memory_network(workers, scheduler)
    team = [SumWorker(transport, kind, divisor, dtype) for transport in transports]
    for worker in team:
        worker.book(slots)
    return team, slots, transports[0].network


def make_one_slot(kind: str, workers: int, chunks: int) -> tuple[list[SumWorker], Slot, MemoryNetwork]:
    """Return a team with a slot of exactly so many chunks, owned by ranks 0, 1, ..."""
    team, _, network = make_team(kind, workers, [])
    edges = range(0, (chunks + 1) * CHUNK_VALUES, CHUNK_VALUES)
    pieces = [Chunk(0, at, *edge, at % workers) for at, edge in enumerate(itertools.pairwise(edges))]
    slot = Slot(0, tuple(pieces), 0)
    for worker in team:
        worker.book([slot])
    return team, slot, network


def draw(seed: Sequence[int], size: int) -> Array:
    """Return values of which another order of additions would give other bits."""
    generator = np.random.default_rng(list(seed))
    scales = np.repeat(10.0 ** generator.integers(-3, 4, -(-size // 64)), 64)[:size]
    return (generator.standard_normal(size) * scales).astype(np.float32)
