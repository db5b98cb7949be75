from __future__ import annotations

import functools
import random
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from compact_twin import HostCompactor, same_bits
from poseidon.errors import FrameError, ServerError
from poseidon.routes import sharded
from poseidon.routes.compact import ChunkRows, CompactSum, is_compacted
from poseidon.routes.staging import Done, Waiter
from poseidon.sums.compact import FEWEST_COMPACTED, SMALLEST_COMPACTED_BYTES
from poseidon.sums.slots import Slot, make_slots
from poseidon.wire.memory import InFlightMessage, MemoryTransport, make_memory_network
from poseidon.wire.message import Header, Kind

Array = np.ndarray[Any, Any]


class Immediately(Waiter):
    """Waits for nothing, on no thread."""

    def __init__(self, name: str) -> None:
        pass

    def put(self, done: Done, then: Callable[[], None], _fail: Callable[[BaseException], None]) -> None:
        done.synchronize()
        then()

    def close(self) -> None:
        pass


class Worker:
    def __init__(self, transport: MemoryTransport, slots: list[Slot]) -> None:
        self.compactor = HostCompactor()
        self.errors: list[BaseException] = []
        self.slots = slots
        self.sum = CompactSum(transport, self.compactor, priority=int, on_error=self.errors.append, waiter=Immediately)
        self.sum.include(slots)


def make_workers(
    count: int, sizes: Sequence[int], scheduler: Callable[[Sequence[InFlightMessage]], int] | None = None
) -> tuple[list[Worker], Callable[[], int]]:
    slots = make_slots(0, sizes, [4] * len(sizes), count, 4 * 2 * FEWEST_COMPACTED)
    transports = make_memory_network(count, scheduler)
    return [Worker(transport, slots) for transport in transports], transports[0].network.pump


def gradients(seed: int, workers: int, size: int) -> list[Array]:
    generator = np.random.default_rng(seed)
    values = generator.standard_normal((workers, size)) * 10.0 ** generator.integers(-3, 4, (workers, size // 64, 1))[
        :, :, :1
    ].repeat(64, axis=2).reshape(workers, -1)
    values[generator.random(values.shape) < 0.1] = 0
    return list(values.astype(np.float32))


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_every_worker_gets_the_bits_of_the_sum_in_rank_order_in_whatever_order_messages_come(
    workers: int, seed: int
) -> None:
    order = random.Random(seed)
    sizes = [64 * 1001, 64 * 64 * workers]
    team, pump = make_workers(workers, sizes, lambda parcels: order.randrange(len(parcels)))
    for step in range(3):
        values = [gradients(seed * 100 + step * 10 + number, workers, size) for number, size in enumerate(sizes)]
        flats = [[torch.from_numpy(one.copy()) for one in bucket] for bucket in values]
        futures = [
            worker.sum.start(flats[slot.number][rank], slot, step)
            for rank, worker in enumerate(team)
            for slot in worker.slots
        ]
        pump()
        assert all(future.result(0) == "restored" for future in futures)
        for number, bucket in enumerate(values):
            total = functools.reduce(np.add, bucket)
            assert workers == 2 or not same_bits(total, functools.reduce(np.add, bucket[::-1]))
            for flat in flats[number]:
                assert same_bits(flat.numpy(), total)
    assert not any(worker.errors for worker in team)


def test_chunks_that_layout_would_not_shorten_travel_as_they_are() -> None:
    team, pump = make_workers(3, [FEWEST_COMPACTED * 6])
    generator = np.random.default_rng(0)
    wild = [generator.integers(0, 2**31, FEWEST_COMPACTED * 6, dtype=np.uint32).view(np.float32) for _ in team]
    wild[1][: FEWEST_COMPACTED * 2] = 1.0  # one worker's first chunk can be compacted, the others' not
    for one in wild:
        np.nan_to_num(one, copy=False, nan=1.0, posinf=2.0, neginf=3.0)
    flats = [torch.from_numpy(one.copy()) for one in wild]
    for worker, flat in zip(team, flats, strict=True):
        worker.sum.start(flat, worker.slots[0], 0)
    pump()
    with np.errstate(over="ignore"):
        total = functools.reduce(np.add, wild)
    assert not any(worker.errors for worker in team)
    assert all(same_bits(flat.numpy(), total) for flat in flats)
    assert team[0].compactor.copied > team[1].compactor.copied > 0


@pytest.mark.parametrize("more", [-1, 0, 1, 2])
def test_the_length_says_how_a_chunk_travels_even_with_as_many_strays_as_may_be(more: int) -> None:
    # Chunks of 4097 and of 4096 values: both kinds must be told apart by the same rule.
    team, pump = make_workers(2, [2 * FEWEST_COMPACTED + 1])
    rows = ChunkRows.of(team[0].slots[0].chunks)
    assert (rows.quotient, rows.longer) == (FEWEST_COMPACTED, 1)
    values = np.ones(2 * FEWEST_COMPACTED + 1, np.float32)
    for chunk in rows.chunks:
        # One in each group stays large, so that the others are far below it.
        small = [at for at in range(chunk.length) if at % 256][: rows.layout.most_strays + more]
        values[chunk.start : chunk.stop][small] = 1e-20
    flats = [torch.from_numpy(values.copy()) for _ in team]
    for worker, flat in zip(team, flats, strict=True):
        worker.sum.start(flat, worker.slots[0], 0)
    pump()
    assert all(same_bits(flat.numpy(), values + values) for flat in flats)
    assert bool(team[0].compactor.copied) == (more > 0)


def test_an_eighth_of_the_bytes_is_saved() -> None:
    transports = make_memory_network(2)
    slots = make_slots(0, [1 << 17], [4], 2, 1 << 18)
    team = [Worker(transport, slots) for transport in transports]
    for rank, worker in enumerate(team):
        generator = np.random.default_rng(rank)
        worker.sum.start(torch.from_numpy(generator.standard_normal(1 << 17).astype(np.float32)), slots[0], 0)
    transports[0].network.pump()
    plain = 4 * (1 << 17)  # half of it as parts, half as sums
    assert 0.875 * plain < transports[0].stats.sent_bytes < 0.88 * plain


def push(worker: Worker, *, sender: int = 1, chunk: int = 0, clock: int = 0, length: int | None = None) -> Header:
    layout = ChunkRows.of(worker.slots[0].chunks).layout
    return Header(Kind.COMPACT_PUSH, sender, 0, chunk, clock, layout.size(0) if length is None else length)


def owned(worker: Worker, rank: int) -> int:
    return next(chunk.index for chunk in worker.slots[0].chunks if chunk.owner == rank)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"length": 12}, "12 bytes"),
        ({"chunk": 99}, "not owned here"),
        ({"twice": True}, "twice"),
        ({"later": True}, "while clock 0"),
    ],
)
def test_parts_that_make_no_sense_are_refused_and_end_the_job(changes: dict[str, Any], complaint: str) -> None:
    team, _ = make_workers(2, [FEWEST_COMPACTED * 4])
    worker, other = team
    chunk = changes.get("chunk", owned(worker, 0))
    header = push(worker, chunk=chunk, length=changes.get("length"))
    place = worker.sum._place_part
    if "twice" in changes or "later" in changes:
        place(header)
        header = push(worker, chunk=chunk, clock=1 if "later" in changes else 0)
    with pytest.raises(FrameError, match=complaint):
        place(header)
    assert complaint in str(worker.errors[0])
    assert not other.errors


def test_a_chunk_whose_strays_do_not_match_its_length_never_reaches_the_device() -> None:
    team, _ = make_workers(2, [FEWEST_COMPACTED * 4])
    worker = team[0]
    header = push(worker, chunk=owned(worker, 0))
    place = worker.sum._place_part(header)
    place[:4] = (5).to_bytes(4, "little")
    with pytest.raises(ServerError, match="5 strays"):
        worker.sum._receive_part(header, place)
    assert worker.errors


def test_sums_that_nobody_asked_for_are_refused() -> None:
    team, _ = make_workers(2, [FEWEST_COMPACTED * 4])
    header = push(team[0], chunk=owned(team[0], 1))._replace(kind=Kind.COMPACT_RESULT)
    with pytest.raises(FrameError, match="no such sum is under way"):
        team[0].sum._place_sum(header)
    team[0].sum.start(torch.zeros(FEWEST_COMPACTED * 4), team[0].slots[0], 0)
    place = team[0].sum._place_sum(header)
    with pytest.raises(FrameError, match="was awaited"):
        team[0].sum._place_sum(header._replace(chunk=owned(team[0], 0)))
    place[:4] = bytes(4)
    team[0].sum._receive_sum(header, place)
    with pytest.raises(FrameError, match="no such sum is under way"):
        team[0].sum._place_sum(header)


def test_a_failure_ends_what_is_under_way_and_what_comes_after() -> None:
    team, _ = make_workers(2, [FEWEST_COMPACTED * 4])
    worker = team[0]
    before = worker.sum.start(torch.zeros(FEWEST_COMPACTED * 4), worker.slots[0], 0)
    lost = ServerError("gone")
    worker.sum.fail(lost)
    after = worker.sum.start(torch.zeros(FEWEST_COMPACTED * 4), worker.slots[0], 1)
    assert before.exception(0) is lost
    assert after.exception(0) is lost


def test_only_float32_in_buckets_of_some_size_is_compacted() -> None:
    sizes = [SMALLEST_COMPACTED_BYTES // 4, SMALLEST_COMPACTED_BYTES // 4 - 1, 0]
    (large, small, none) = make_slots(0, sizes, [4] * 3, 2, 1 << 20)
    (cut_to_bits,) = make_slots(0, sizes[:1], [4], 2, 4 * (FEWEST_COMPACTED - 1))
    assert not is_compacted(cut_to_bits, torch.float32)
    assert is_compacted(large, torch.float32)
    assert not is_compacted(large, torch.float64)
    assert not is_compacted(large, torch.float16)
    assert not is_compacted(small, torch.float32)
    assert not is_compacted(none, torch.float32)


def test_memory_of_earlier_buckets_is_let_go_once_they_have_landed() -> None:
    team, pump = make_workers(2, [FEWEST_COMPACTED * 4])
    (old,) = team[0].slots
    (new,) = make_slots(1, [FEWEST_COMPACTED * 4], [4], 2, 8 * FEWEST_COMPACTED)
    for worker in team:
        worker.sum.start(torch.ones(FEWEST_COMPACTED * 4), old, 0)
        worker.sum.include([new])
        assert worker.sum.holds(old)
    pump()
    for worker in team:
        assert worker.sum.holds(new)
        assert not worker.sum.holds(old)
        assert not worker.errors


def test_a_tensor_that_has_landed_is_not_kept() -> None:
    team, pump = make_workers(2, [FEWEST_COMPACTED * 4])
    flats = [torch.ones(FEWEST_COMPACTED * 4) for _ in team]
    refs = [weakref.ref(flat) for flat in flats]
    for worker, flat in zip(team, flats, strict=True):
        worker.sum.start(flat, worker.slots[0], 0)
    pump()
    del flat, flats
    assert not any(ref() is not None for ref in refs)


def test_a_device_that_cannot_compact_is_named_and_gradients_travel_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "poseidon.routes.cuda_compactor", None)
    assert sharded._find_compactor(2) is None
    assert "gradients travel as they are" in caplog.text
    assert "cuda_compactor" in caplog.text
