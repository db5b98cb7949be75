"""The protocol of PART and SUM on the in-memory network, with both arithmetics."""

from __future__ import annotations

import functools
import itertools
import random
import threading
import weakref
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

import nightly
from compact_codec import same_bits
from poseidon.errors import FrameError, ServerError, WorkerLostError
from poseidon.sums.encodings import Encoding
from poseidon.sums.slots import Slot, make_slots
from poseidon.wire.message import Header, Kind, pack
from sum_team import CHUNK_VALUES, KINDS, SumWorker, draw, make_one_slot, make_team

Array = np.ndarray[Any, Any]

both = pytest.mark.parametrize("kind", KINDS)


def in_rank_order(values: list[Array]) -> Array:
    return functools.reduce(np.add, values)


@both
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(nightly.amount(1, 3)))
def test_many_slots_and_chunks_in_random_order(kind: str, workers: int, seed: int) -> None:
    order = random.Random(seed)
    sizes = [CHUNK_VALUES * 7 + 3, CHUNK_VALUES * workers * 2, 1100]
    team, slots, network = make_team(kind, workers, sizes, lambda parcels: order.randrange(len(parcels)))
    for step in range(3):
        values = [[draw([rank, number, step], size) for rank in range(workers)] for number, size in enumerate(sizes)]
        totals = [in_rank_order(ones) for ones in values]
        futures = [
            worker.start(values[slot.number][rank], slot, step) for slot in slots for rank, worker in enumerate(team)
        ]
        network.pump()
        for future in futures:
            assert future.result(0) == (None if kind == "host" else "restored")
        for ones, total in zip(values, totals, strict=True):
            assert all(same_bits(one, total) for one in ones)


@both
@pytest.mark.parametrize("workers", [3, 4])
def test_means_are_sums_divided_once_everywhere(kind: str, workers: int) -> None:
    size = CHUNK_VALUES * 5 + 1
    team, (slot,), network = make_team(kind, workers, [size], divisor=workers)
    values = [draw([rank], size) for rank in range(workers)]
    mean = in_rank_order(values) / np.float32(workers)
    for worker, mine in zip(team, values, strict=True):
        worker.start(mine, slot, 0)
    network.pump()
    assert all(same_bits(mine, mean) for mine in values)


def test_an_empty_slot_is_done_at_once() -> None:
    team, (slot,), _ = make_team("host", 2, [0])
    assert team[0].start(np.empty(0, np.float32), slot, 0).result(0) is None


def test_urgent_slots_are_sent_first() -> None:
    team, slots, network = make_team("host", 2, [CHUNK_VALUES * 2] * 3)
    for slot in slots:
        for worker in team:
            worker.start(np.ones(CHUNK_VALUES * 2, np.float32), slot, 0)
    seen = []
    while network.parcels:
        header = min(network.parcels, key=lambda parcel: (parcel.priority, parcel.number)).header
        seen.append((header.subject, header.kind))
        network.step()
    # What became ready last is needed first.
    assert seen == [(slot, kind) for slot in (2, 1, 0) for kind in (Kind.PART, Kind.PART, Kind.SUM, Kind.SUM)]


# What must not happen.


class Scene:
    """Rank 0 of two (or more) owns a chunk, and hears of parts and sums that the test makes up."""

    def __init__(self, kind: str, workers: int = 2) -> None:
        self.team, (self.slot,), self.network = make_team(kind, workers, [CHUNK_VALUES * workers])
        self.worker = self.team[0]
        self.values = np.ones(CHUNK_VALUES * workers, np.float32)
        self.owned = next(chunk.index for chunk in self.slot.chunks if chunk.owner == 0)
        self.others = next(chunk.index for chunk in self.slot.chunks if chunk.owner == 1)

    def arrive(self, kind: Kind = Kind.PART, **fields: int) -> None:
        """Let a message of rank 1 arrive: a right one but for ``fields``."""
        header = Header(kind, 1, self.slot.number, self.owned, 0, 4 * CHUNK_VALUES, Encoding.PLAIN)
        header = header._replace(**fields)
        self.team[0].transport.arrive(pack(header), bytes(header.length))

    def expect_failure(self, before: Future[Any] | None, words: str) -> None:
        """Check that everything under way and to come has failed on rank 0, and nothing elsewhere."""
        if before is not None:
            with pytest.raises(ServerError, match=words):
                before.result(0)
        with pytest.raises(ServerError, match=words):
            self.worker.start(self.values, self.slot, 9).result(0)
        other = self.team[1].start(self.values.copy(), self.slot, 9)
        assert not other.done()


@both
@pytest.mark.parametrize("is_started", [False, True])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"length": 12}, "rank 1 sent 12 bytes for chunk 1 of slot 0; in encoding PLAIN its 1024 values take 4096"),
        ({"length": 4097}, "rank 1 sent 4097 bytes"),
        ({"detail": 77}, "rank 1 sent chunk 1 of slot 0 in encoding 77; the slot allows PLAIN"),
        ({"number": 99}, "rank 1 sent chunk 99 of slot 0, which rank 0 does not own"),
        ({"subject": 5}, "rank 1 sent chunk 1 of slot 5, which rank 0 does not own"),
    ],
)
def test_a_part_that_makes_no_sense_fails_everything(
    kind: str, is_started: bool, fields: dict[str, int], words: str
) -> None:
    scene = Scene(kind)
    if scene.owned != 1:
        words = words.replace("chunk 1", f"chunk {scene.owned}")
    before = scene.worker.start(scene.values, scene.slot, 0) if is_started else None
    with pytest.raises(FrameError, match=words) as refused:
        scene.arrive(**fields)
    assert refused.value.reason == "out of turn"
    scene.expect_failure(before, words)


@both
def test_a_part_of_a_chunk_that_another_rank_owns_is_refused(kind: str) -> None:
    scene = Scene(kind)
    with pytest.raises(FrameError, match="which rank 0 does not own"):
        scene.arrive(number=scene.others)
    scene.expect_failure(None, "does not own")


@both
@pytest.mark.parametrize(("clock", "words"), [(0, "of clock 0 twice"), (1, "of clock 1 while clock 0 is being summed")])
def test_a_part_that_comes_twice_or_too_early_fails_everything(kind: str, clock: int, words: str) -> None:
    scene = Scene(kind, workers=3)
    before = scene.worker.start(scene.values, scene.slot, 0)
    scene.arrive()
    with pytest.raises(FrameError, match=f"rank 1 sent chunk {scene.owned} of slot 0 {words}"):
        scene.arrive(clock=clock)
    scene.expect_failure(before, words)


@both
def test_a_part_of_a_finished_clock_fails_everything(kind: str) -> None:
    scene = Scene(kind)
    for worker in scene.team:
        worker.start(scene.values.copy(), scene.slot, 4)
    scene.network.pump()
    with pytest.raises(FrameError, match="of clock 4, but clock 4 is already finished"):
        scene.arrive(clock=4)
    scene.expect_failure(None, "already finished")


@both
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"clock": 1}, "no such sum is under way on rank 0"),
        ({"number": 99}, "no such sum is under way"),
        ({"subject": 3}, "no such sum is under way"),
        ({"length": 8}, "rank 1 sent 8 bytes"),
        ({"detail": 9}, "in encoding 9"),
    ],
)
def test_a_sum_that_nobody_awaits_fails_everything(kind: str, fields: dict[str, int], words: str) -> None:
    scene = Scene(kind)
    before = scene.worker.start(scene.values, scene.slot, 0)
    with pytest.raises(FrameError, match=words):
        scene.arrive(Kind.SUM, **{"number": scene.others, **fields})
    scene.expect_failure(before, words)


@both
def test_a_sum_comes_once_after_the_start_and_from_its_owner(kind: str) -> None:
    scene = Scene(kind)
    with pytest.raises(FrameError, match="no such sum is under way"):
        scene.arrive(Kind.SUM, number=scene.others)
    scene = Scene(kind)
    scene.worker.start(scene.values, scene.slot, 0)
    scene.arrive(Kind.SUM, number=scene.others)
    with pytest.raises(FrameError, match="no such sum is under way"):
        scene.arrive(Kind.SUM, number=scene.others)
    scene = Scene(kind)
    scene.worker.start(scene.values, scene.slot, 0)
    with pytest.raises(FrameError, match=f"rank 1 sent the sum of chunk {scene.owned} of slot 0, which rank 0 owns"):
        scene.arrive(Kind.SUM, number=scene.owned)


@both
@pytest.mark.parametrize("lost", [Kind.PART, Kind.SUM])
def test_a_lost_message_leaves_the_sum_open_and_the_next_step_says_so(kind: str, lost: Kind) -> None:
    team, slot, network = make_one_slot(kind, 2, 1)
    owner = slot.chunks[0].owner
    futures = [worker.start(np.ones(CHUNK_VALUES, np.float32), slot, 0) for worker in team]
    if lost is Kind.SUM:
        network.step()
    (parcel,) = network.parcels
    assert parcel.header.kind is lost
    network.parcels.clear()
    assert not futures[1 - owner].done()
    assert futures[owner].done() == (lost is Kind.SUM)
    if lost is Kind.SUM:
        # The owner goes on alone, and waits.
        assert not team[owner].start(np.ones(CHUNK_VALUES, np.float32), slot, 1).done()
        network.pump()
        assert not futures[1 - owner].done()
    with pytest.raises(ServerError, match="slot 0 cannot start step 1: step 0 is under way"):
        team[1 - owner].start(np.ones(CHUNK_VALUES, np.float32), slot, 1)


@both
@pytest.mark.parametrize("arrived", range(5))
def test_a_peer_that_dies_fails_what_is_under_way_and_what_comes_after(kind: str, arrived: int) -> None:
    team, slots, network = make_team(kind, 3, [CHUNK_VALUES * 3, CHUNK_VALUES * 3])
    futures = [[worker.start(np.ones(CHUNK_VALUES * 3, np.float32), slot, 0) for slot in slots] for worker in team]
    network.pump(limit=arrived)
    team[1].transport.die()
    network.pump()
    for rank in (0, 2):
        later = team[rank].start(np.ones(CHUNK_VALUES * 3, np.float32), slots[0], 1)
        for future in (*futures[rank], later):
            with pytest.raises(WorkerLostError, match="rank 1: killed by the test"):
                future.result(0)


@both
@pytest.mark.parametrize("method", ["add", "decode", "encode", "land", "close"])
def test_an_arithmetic_that_raises_fails_everything(kind: str, method: str) -> None:
    team, slots, network = make_team(kind, 2, [CHUNK_VALUES * 2, CHUNK_VALUES * 2])
    futures = [team[0].start(np.ones(CHUNK_VALUES * 2, np.float32), slot, 0) for slot in slots]
    futures.append(team[1].start(np.ones(CHUNK_VALUES * 2, np.float32), slots[0], 0))

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("no device")

    setattr(team[0].adders[0], method, broken)
    for _ in range(len(network.parcels) + 4):
        try:
            network.step()
        except (ZeroDivisionError, FrameError):
            continue
    assert not network.parcels
    for future in futures[:2]:
        with pytest.raises(ZeroDivisionError):
            future.result(0)


@both
def test_values_of_another_size_or_type_are_refused(kind: str) -> None:
    team, (slot,), _ = make_team(kind, 2, [CHUNK_VALUES * 2])
    with pytest.raises(ServerError, match=r"slot 0 was given 7 values of .*float32; it holds 2048 of .*float32"):
        team[0].start(np.ones(7, np.float32), slot, 0)
    team, (slot,), _ = make_team(kind, 2, [CHUNK_VALUES * 2])
    with pytest.raises(ServerError, match=r"slot 0 was given 2048 values of .*float64"):
        team[0].start(np.ones(CHUNK_VALUES * 2), slot, 0)


# Booking again.


def book_next(team: list[SumWorker], number: int) -> Slot:
    (slot,) = make_slots(number, [CHUNK_VALUES * 2], [4], len(team), 4 * CHUNK_VALUES)
    for worker in team:
        worker.book([slot])
    return slot


@both
def test_earlier_slots_go_at_once_if_they_have_landed_and_otherwise_when_they_land(kind: str) -> None:
    team, (landed, flying), network = make_team(kind, 2, [CHUNK_VALUES * 2, CHUNK_VALUES * 2])
    adders = [weakref.ref(adder) for worker in team for adder in worker.adders]
    for worker in team:
        worker.start(np.ones(CHUNK_VALUES * 2, np.float32), landed, 0)
    network.pump()
    values = [np.ones(CHUNK_VALUES * 2, np.float32) for _ in team]
    futures = [worker.start(mine, flying, 0) for worker, mine in zip(team, values, strict=True)]
    new = book_next(team, 2)
    for worker in team:
        assert [worker.server.holds(slot) for slot in (landed, flying, new)] == [False, True, True]
        with pytest.raises(ServerError, match=f"slot 0 is not booked on rank {worker.transport.rank}"):
            worker.start(np.ones(CHUNK_VALUES * 2, np.float32), landed, 1)
    network.pump()
    for future, mine in zip(futures, values, strict=True):
        future.result(0)
        assert (mine == 2).all()
    for worker in team:
        assert [worker.server.holds(slot) for slot in (landed, flying, new)] == [False, False, True]
    assert not any(adder() for adder in adders)


@both
def test_a_reserved_slot_is_kept_until_its_values_have_come_and_landed(kind: str) -> None:
    team, (slot,), network = make_team(kind, 2, [CHUNK_VALUES * 2])
    starts = [worker.server.reserve(slot, 0) for worker in team]
    book_next(team, 1)
    values = [np.ones(CHUNK_VALUES * 2, np.float32) for _ in team]
    for start, mine in zip(starts, values, strict=True):
        start(mine if kind == "host" else torch.from_numpy(mine))
    network.pump()
    assert all((mine == 2).all() for mine in values)
    assert not any(worker.server.holds(slot) for worker in team)


@both
def test_a_reserved_slot_fails_with_the_rest(kind: str) -> None:
    team, (slot,), _ = make_team(kind, 2, [CHUNK_VALUES * 2])
    start = team[0].server.reserve(slot, 0)
    team[1].transport.die()
    with pytest.raises(WorkerLostError, match="rank 1"):
        start(None).result(0)


def test_a_sum_for_values_that_have_not_come_is_refused() -> None:
    scene = Scene("host")
    scene.worker.server.reserve(scene.slot, 0)
    with pytest.raises(FrameError):
        scene.arrive(Kind.SUM, number=scene.others)


@both
def test_nothing_of_many_plans_is_kept(kind: str) -> None:
    team, _, network = make_team(kind, 2, [CHUNK_VALUES * 2])
    for number in range(1, 20):
        slot = book_next(team, number)
        futures = [worker.start(np.ones(CHUNK_VALUES * 2, np.float32), slot, number) for worker in team]
        network.pump()
        assert all(future.done() for future in futures)
    for worker in team:
        assert len(worker.server._ledgers) == 1
        assert not worker.server._retiring


@both
def test_a_slot_that_another_rank_has_begun_is_kept(kind: str) -> None:
    team, (slot,), network = make_team(kind, 2, [CHUNK_VALUES * 2])
    team[1].start(np.ones(CHUNK_VALUES * 2, np.float32), slot, 0)
    network.pump()
    book_next(team, 1)
    assert team[0].server.holds(slot)
    team[0].start(np.ones(CHUNK_VALUES * 2, np.float32), slot, 0)
    network.pump()
    assert not team[0].server.holds(slot)


@both
def test_values_that_have_landed_are_not_kept(kind: str) -> None:
    team, (slot,), network = make_team(kind, 2, [CHUNK_VALUES * 2])
    values = [np.ones(CHUNK_VALUES * 2, np.float32) for _ in team]
    refs = [weakref.ref(one) for one in values]
    for worker, one in zip(team, values, strict=True):
        worker.start(one, slot, 0)
    network.pump()
    del one, values
    assert not any(ref() is not None for ref in refs)


def test_parts_from_many_threads_make_every_sum_once_with_the_same_bits() -> None:
    workers, clocks, length = 4, 20, 5000
    team, _, network = make_team("host", workers, [])
    # Rank 0 owns every chunk.
    (slot,) = make_slots(1, [8 * length], [4], 1, 4 * length)
    assert len(slot.chunks) == 8
    team[0].book([slot])
    values = [draw([rank], 8 * length) for rank in range(workers)]
    total = in_rank_order(values)
    gate = threading.Barrier(workers)
    ends: list[Any] = []

    def send(rank: int) -> None:
        for clock in range(clocks):
            gate.wait(30)
            for at in range(8):
                chunk = slot.chunks[(at + rank) % 8]
                part = values[rank][chunk.start : chunk.stop]
                header = Header(Kind.PART, rank, 1, chunk.index, clock, part.nbytes)
                team[0].transport.arrive(pack(header), part.tobytes())

    def own() -> None:
        for clock in range(clocks):
            mine = values[0].copy()
            gate.wait(30)
            team[0].start(mine, slot, clock).result(30)
            ends.append(same_bits(mine, total))

    threads = [threading.Thread(target=send, args=(rank,)) for rank in range(1, workers)]
    threads.append(threading.Thread(target=own))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ends == [True] * clocks
    sums = [(parcel.header.clock, parcel.header.number, parcel.peer) for parcel in network.parcels]
    assert sorted(sums) == sorted(itertools.product(range(clocks), range(8), range(1, workers)))
