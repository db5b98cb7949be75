from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from poseidon.errors import PoseidonError, ServerError
from poseidon.sums.chunks import Chunk, cut, owned_by
from poseidon.sums.service import ShardService
from poseidon.sums.shard import Shard
from poseidon.wire.memory import MemoryTransport, make_memory_network
from poseidon.wire.message import Header, Kind

Array = np.ndarray[Any, Any]


class Worker:
    """The least a worker does: push every chunk of every unit, gather the results."""

    def __init__(self, transport: MemoryTransport, units: list[tuple[Chunk, ...]], seed: int) -> None:
        self.transport = transport
        self.units = units
        generator = np.random.default_rng(seed)
        self.gradients = [
            (generator.standard_normal(chunks[-1].stop) * 10.0 ** generator.integers(-3, 3)).astype(np.float32)
            for chunks in units
        ]
        self.results = [np.full_like(gradient, np.nan) for gradient in self.gradients]
        self.service: ShardService | None = None

    def push(self, clock: int) -> None:
        for chunks in self.units:
            for chunk in chunks:
                values = self.gradients[chunk.unit][chunk.start : chunk.stop]
                if chunk.owner == self.transport.rank and self.service is not None:
                    self.service.contribute(chunk.unit, chunk.index, clock, values)
                else:
                    header = Header(Kind.PUSH, self.transport.rank, chunk.unit, chunk.index, clock, values.nbytes)
                    self.transport.send(chunk.owner, header, values)

    def take(self, unit: int, chunk: int, _clock: int, values: Array) -> None:
        place = self.units[unit][chunk]
        self.results[unit][place.start : place.stop] = values

    def receive(self, header: Header, payload: memoryview) -> None:
        self.take(header.unit, header.chunk, header.clock, np.frombuffer(payload, np.float32))


def fail(error: PoseidonError) -> None:
    raise error


def in_rank_order(workers: Sequence[Worker], unit: int) -> Array:
    return functools.reduce(np.add, [worker.gradients[unit] for worker in workers])


def random_order(seed: int) -> Any:
    generator = random.Random(seed)
    return lambda parcels: generator.randrange(len(parcels))


@pytest.mark.parametrize("seed", range(5))
def test_shards_beside_the_workers_give_all_of_them_the_same_sums(seed: int) -> None:
    transports = make_memory_network(4, random_order(seed))
    units = cut([1000, 3, 257], range(4), 100)
    workers = []
    for transport in transports:
        worker = Worker(transport, units, transport.rank)
        shard = Shard(owned_by(transport.rank, units), range(4))
        worker.service = ShardService(transport, shard, on_error=fail, on_result=worker.take)
        transport.listen(Kind.RESULT, worker.receive)
        workers.append(worker)
    for clock in range(3):
        for worker in workers:
            for result in worker.results:
                result.fill(np.nan)
            worker.push(clock)
        transports[0].network.pump()
        for unit in range(3):
            expected = in_rank_order(workers, unit)
            for worker in workers:
                assert np.array_equal(worker.results[unit], expected)


def test_dedicated_servers_serve_workers_that_hold_no_shard() -> None:
    transports = make_memory_network(5, random_order(0))
    units = cut([1000, 64], [3, 4], 100)
    for transport in transports[3:]:
        ShardService(transport, Shard(owned_by(transport.rank, units), range(3)), on_error=fail)
    workers = [Worker(transport, units, transport.rank) for transport in transports[:3]]
    for worker in workers:
        worker.transport.listen(Kind.RESULT, worker.receive)
        worker.push(0)
    transports[0].network.pump()
    for unit in range(2):
        for worker in workers:
            assert np.array_equal(worker.results[unit], in_rank_order(workers, unit))


def test_the_urgent_unit_is_delivered_first() -> None:
    transports = make_memory_network(2)
    units = [(Chunk(0, 0, 0, 4, 1),), (Chunk(1, 0, 0, 4, 1),)]
    ShardService(transports[1], Shard(owned_by(1, units), [0]), on_error=fail)
    seen: list[int] = []
    transports[0].listen(Kind.RESULT, lambda header, _: seen.append(header.unit))
    for unit in (1, 0):
        header = Header(Kind.PUSH, 0, unit, 0, 0, 16)
        transports[0].send(1, header, np.ones(4, np.float32))
    transports[0].network.pump(limit=1)
    transports[0].network.pump(limit=1)
    assert [(parcel.header.unit, parcel.priority) for parcel in transports[0].network.parcels] == [(1, 1), (0, 0)]
    transports[0].network.pump()
    assert seen == [0, 1]


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (Header(Kind.PUSH, 0, 0, 0, 0, 8), "sent 2 values"),
        (Header(Kind.PUSH, 0, 0, 0, 0, 9), "9 bytes .* no whole number of float32"),
        (Header(Kind.PUSH, 0, 5, 0, 0, 16), "unit 5, which this shard does not own"),
    ],
)
def test_what_the_shard_refuses_is_reported(header: Header, words: str) -> None:
    transports = make_memory_network(2)
    errors: list[PoseidonError] = []
    ShardService(transports[1], Shard([Chunk(0, 0, 0, 4, 1)], [0, 1]), on_error=errors.append)
    transports[0].send(1, header, bytes(header.length))
    transports[0].network.pump()
    with pytest.raises(ServerError, match=words):
        raise errors[0]


def test_results_are_lent_until_everybody_has_them() -> None:
    transports = make_memory_network(3)
    shard = Shard([Chunk(0, 0, 0, 4, 2)], [0, 1, 2])
    mine: list[Array] = []
    service = ShardService(transports[2], shard, on_error=fail, on_result=lambda *r: mine.append(r[3]))
    for transport in transports[:2]:
        transport.listen(Kind.RESULT, lambda *_: None)
    values = np.ones(4, np.float32)
    released: list[Array] = []
    shard.release = released.append  # type: ignore[method-assign]
    for rank in (0, 1):
        transports[rank].send(2, Header(Kind.PUSH, rank, 0, 0, 0, 16), values)
    service.contribute(0, 0, 0, values)
    network = transports[0].network
    network.pump(limit=3)
    assert released == []
    network.pump()
    assert len(released) == 1
    assert released[0] is mine[0]
