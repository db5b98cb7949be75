"""Touched rows that follow a part: protocol, order of additions, and what is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from compact_codec import same_bits
from poseidon.errors import FrameError, ServerError
from poseidon.sums.chunks import Chunk
from poseidon.sums.slots import Slot
from poseidon.sums.touched import PackedRows, TouchedRows, add_up, check_size, most_packed_bytes, pack, read_rows
from poseidon.sums.turns import TouchedRoll
from poseidon.wire.message import Header, Kind
from sum_team import KINDS, SumWorker, draw, make_team

Array = np.ndarray[Any, Any]
WIDTH, ROWS = 48, 170


def _touch(seed: list[int], count: int) -> TouchedRows:
    numbers = np.sort(np.random.default_rng(seed).choice(ROWS, count, replace=False))
    return TouchedRows(numbers.astype(np.int64), draw([*seed, 1], count * WIDTH).reshape(count, WIDTH))


def _make(kind: str, workers: int, order: random.Random, divisor: int = 1) -> tuple[list[SumWorker], Slot, Any]:
    team, (cut,), network = make_team(
        kind, workers, [ROWS * WIDTH], lambda parcels: order.randrange(len(parcels)), divisor=divisor
    )
    slot = replace(cut, width=WIDTH)
    for worker in team:
        worker.book([slot])
    return team, slot, network


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_full_gradients_are_added_in_rank_order_and_then_the_sum_of_all_rows(kind: str, workers: int) -> None:
    order = random.Random(workers)
    team, slot, network = _make(kind, workers, order, divisor=workers)
    for step in range(3):
        heads = [draw([rank, step], ROWS * WIDTH) for rank in range(workers)]
        for head in heads:
            head[900:1200] = -0.0  # wherever nothing is touched, a sum that is -0 becomes 0
        touched = [_touch([rank, step, 7], [0, 9, ROWS][(rank + step) % 3]) for rank in range(workers)]
        total = np.zeros((ROWS, WIDTH), np.float32)
        for rows in touched:
            total[rows.numbers] += rows.values
        mean = (reduce(np.add, heads) + total.reshape(-1)) / np.float32(workers)
        futures = [worker.start(mine, slot, step) for worker, mine in zip(team, heads, strict=True)]
        if step % 2:
            network.pump()
        assert not any(future.done() for future in futures)
        for worker, rows in order.sample([*zip(team, touched, strict=True)], workers):
            worker.server.send_touched(slot, step, rows)
        network.pump()
        assert all(future.done() for future in futures)
        assert all(same_bits(mine, mean) for mine in heads)


def test_a_device_adds_full_gradients_before_the_rows_and_gets_nothing_but_these_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers, touched = 3, 4
    team, slot, network = _make("device", workers, random.Random(1))
    heads = [draw([rank], ROWS * WIDTH) for rank in range(workers)]
    total = reduce(np.add, heads)
    futures = [worker.start(mine, slot, 0) for worker, mine in zip(team, heads, strict=True)]
    network.pump()
    for worker, mine in zip(team, heads, strict=True):
        for chunk in (chunk for chunk in slot.chunks if chunk.owner == worker.transport.rank):
            assert same_bits(mine[chunk.start : chunk.stop], total[chunk.start : chunk.stop])
    compactor, add_rows = team[0].compactor, team[0].compactor.add_rows
    brought_bytes = []

    def note(packed: Tensor, rows: PackedRows, *others: Any) -> Any:
        brought_bytes.append(len(packed))
        return add_rows(packed, rows, *others)

    monkeypatch.setattr(compactor, "add_rows", note)
    for rank, worker in enumerate(team):
        worker.server.send_touched(slot, 0, _touch([rank], touched))
    network.pump()
    assert all(future.done() for future in futures)
    assert len(brought_bytes) == sum(chunk.owner == 0 for chunk in slot.chunks)
    # A chunk has a place for each of its rows and each worker; a row that lies in two chunks goes to both.
    assert sum(brought_bytes) <= workers * (2 * touched * WIDTH + ROWS) * 4


@pytest.mark.parametrize(("counts", "packed_workers"), [([3, 0, 5], 2), ([0, 0], 0), ([12, 12], 1)])
def test_rows_are_packed_as_they_are_or_added_up_whichever_is_smaller(counts: list[int], packed_workers: int) -> None:
    chunk = Chunk(0, 0, 10, 20 * WIDTH - 10, 0)
    everybody = []
    for seed, count in enumerate(counts):
        numbers = np.sort(np.random.default_rng(seed).choice(20, count, replace=False))
        everybody.append(TouchedRows(numbers, draw([seed], count * WIDTH).reshape(count, WIDTH)))
    memory = np.empty(most_packed_bytes(chunk, WIDTH, len(counts)), np.uint8)
    packed = pack(everybody, chunk, memory)
    assert packed.workers == packed_workers
    assert packed.count == min(sum(counts), 20)
    assert packed.used_bytes <= memory.size


def test_rows_of_a_chunk_survive_their_journey() -> None:
    rows = _touch([3], 40)
    back = np.zeros((ROWS, WIDTH), np.float32)
    for start in range(0, ROWS * WIDTH, 1001):  # in the middle of rows
        chunk = Chunk(0, 0, start, min(start + 1001, ROWS * WIDTH), 0)
        payload = rows.in_chunk(chunk)
        check_size(Header(Kind.TOUCHED, 1, 0, 0, 0, payload.nbytes), chunk, WIDTH)
        add_up([read_rows(payload.data, chunk, WIDTH, 1)], chunk, back.reshape(-1)[chunk.start : chunk.stop])
    expected = np.zeros((ROWS, WIDTH), np.float32)
    expected[rows.numbers] = rows.values
    assert same_bits(back, expected)


@pytest.mark.parametrize("numbers", [[0, 0], [3, 1], [-1, 2], [5, 20]])
def test_rows_that_are_not_in_the_chunk_or_come_twice_are_refused(numbers: list[int]) -> None:
    chunk = Chunk(0, 0, 0, 20 * WIDTH, 0)
    values = np.zeros((2, WIDTH), np.float32)
    payload = np.concatenate([np.array(numbers, np.int64).view(np.uint8), values.reshape(-1).view(np.uint8)])
    with pytest.raises(ServerError, match=r"rank 1 sent touched rows of chunk 0 .*less than 20"):
        read_rows(payload.data, chunk, WIDTH, 1)


@pytest.mark.parametrize("length", [1, 8 + 4 * WIDTH - 1, 21 * (8 + 4 * WIDTH)])
def test_sizes_that_no_rows_have_are_refused(length: int) -> None:
    with pytest.raises(ServerError, match=rf"rank 2 sent {length} bytes of touched rows"):
        check_size(Header(Kind.TOUCHED, 2, 0, 0, 0, length), Chunk(0, 0, 0, 20 * WIDTH, 0), WIDTH)


def test_rows_out_of_turn_are_refused() -> None:
    roll, rows = TouchedRoll(Chunk(0, 4, 0, WIDTH, 0), 2), TouchedRows.none(WIDTH)
    assert roll.enter(1, 3, rows) == []
    assert roll.is_open
    for rank, clock in ((1, 3), (0, 4), (0, 2)):
        with pytest.raises(ServerError, match=rf"rank {rank} sent touched rows of chunk 4 .* clock {clock}"):
            roll.enter(rank, clock, rows)
    assert roll.enter(0, 3, rows) == [rows, rows]
    assert not roll.is_open
    with pytest.raises(ServerError, match="clock 3"):
        roll.enter(0, 3, rows)


def test_rows_for_a_slot_that_expects_none_are_refused() -> None:
    team, (slot,), network = make_team("host", 2, [ROWS * WIDTH])
    future = team[0].start(np.zeros(ROWS * WIDTH, np.float32), slot, 0)
    chunk = next(chunk for chunk in slot.chunks if chunk.owner == 0)
    team[1].transport.send(0, Header(Kind.TOUCHED, 1, 0, chunk.index, 0, 0))
    with pytest.raises(FrameError, match="does not own or expect"):
        network.pump()
    with pytest.raises(ServerError, match="does not own or expect"):
        future.result(0)
