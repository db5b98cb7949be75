"""Chunks that travel compacted, on the device's twin. What both arithmetics share is tested in ``test_server.py``."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import nightly
from compact_codec import compact, same_bits
from poseidon.errors import ServerError
from poseidon.sums import device
from poseidon.sums.compact import BITMAP_BYTES, FEWEST_COMPACTED, GROUP, PLANE_BYTES, SMALLEST_COMPACTED, ChunkRows
from poseidon.sums.device import find_compactor, is_compacted
from poseidon.sums.encodings import Encoding
from poseidon.sums.slots import make_slots
from poseidon.wire.message import Header, Kind, pack
from poseidon.wire.settings import WireSettings
from sum_team import draw, make_team

Array = np.ndarray[Any, Any]
CHUNK_VALUES = 2 * FEWEST_COMPACTED


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("seed", range(nightly.amount(2, 4)))
def test_zeros_and_uneven_chunks_keep_their_bits_in_whatever_order_messages_come(workers: int, seed: int) -> None:
    order = random.Random(seed)
    sizes = [64 * 1001, 64 * 64 * workers]
    team, slots, network = make_team(
        "device", workers, sizes, lambda parcels: order.randrange(len(parcels)), CHUNK_VALUES
    )
    for step in range(3):
        values = [[draw([seed, step, rank], size) for rank in range(workers)] for size in sizes]
        for one in (one for ones in values for one in ones):
            one[np.random.default_rng(seed).random(one.shape) < 0.1] = 0
        totals = [functools.reduce(np.add, ones) for ones in values]
        for slot in slots:
            for worker, mine in zip(team, values[slot.number], strict=True):
                worker.start(mine, slot, step)
        network.pump()
        for ones, total in zip(values, totals, strict=True):
            assert all(same_bits(one, total) for one in ones)


def test_chunks_that_would_not_get_shorter_travel_plain() -> None:
    team, (slot,), network = make_team("device", 3, [FEWEST_COMPACTED * 6], chunk_values=CHUNK_VALUES)
    generator = np.random.default_rng(0)
    wild = [generator.integers(0, 2**31, FEWEST_COMPACTED * 6, dtype=np.uint32).view(np.float32) for _ in team]
    wild[1][: FEWEST_COMPACTED * 2] = 1.0  # one worker's first chunk can be compacted, the others' cannot
    for one in wild:
        np.nan_to_num(one, copy=False, nan=1.0, posinf=2.0, neginf=3.0)
    with np.errstate(over="ignore"):
        total = functools.reduce(np.add, wild)
    futures = [worker.start(one, slot, 0) for worker, one in zip(team, wild, strict=True)]
    encodings = [parcel.header.detail for parcel in network.parcels]
    assert Encoding.PLAIN in encodings
    assert Encoding.COMPACT in encodings
    network.pump()
    assert all(future.result(0) for future in futures)
    assert all(same_bits(one, total) for one in wild)
    assert team[0].compactor.copied > team[1].compactor.copied > 0


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_chunk_travels_plain_from_one_byte_too_many(more: int) -> None:
    # Chunks of 4097 and of 4096 values share one layout.
    team, (slot,), network = make_team("device", 2, [2 * FEWEST_COMPACTED + 1], chunk_values=CHUNK_VALUES)
    rows = ChunkRows.of(slot.chunks)
    assert (rows.quotient, rows.longer) == (FEWEST_COMPACTED, 1)
    values = np.zeros(2 * FEWEST_COMPACTED + 1, np.float32)
    for chunk in rows.chunks:
        mine = values[chunk.start : chunk.stop]
        fill(mine, 4 * chunk.length + more - rows.layout.tail_at)
        assert len(compact(mine, rows.layout)) == 4 * chunk.length + more
    copies = [values.copy() for _ in team]
    for worker, mine in zip(team, copies, strict=True):
        worker.start(mine, slot, 0)
    expected = Encoding.PLAIN if more >= 0 else Encoding.COMPACT
    assert {parcel.header.detail for parcel in network.parcels} == {expected}
    assert all(parcel.header.length < 4 * slot.chunks[parcel.header.number].length for parcel in network.parcels) == (
        more < 0
    )
    network.pump()
    assert all(same_bits(mine, values + values) for mine in copies)
    assert bool(team[0].compactor.copied) == (more >= 0)


def fill(values: Array, tail_bytes: int) -> None:
    """Write values whose planes take so many bytes, and those of their doubles too."""
    bits = values.view(np.uint32)
    full = np.uint32(0x012345)  # a mantissa without zero bytes
    groups = bits[: 16 * GROUP].reshape(16, 2, PLANE_BYTES)
    # 8 dense planes in each of 15 groups, the first halves being strays; 6 and a sparse one in the last.
    groups[:, 0], groups[:, 1] = full | 100 << 23, full | 200 << 23
    groups[15, 0] = 0x80000000
    groups[15, 0, : tail_bytes - (15 * 8 + 6) * PLANE_BYTES - BITMAP_BYTES] |= 1


@pytest.mark.parametrize(
    ("draws", "least", "most"),
    [
        (lambda rank, size: np.random.default_rng(rank).standard_normal(size), 27.2, 27.6),
        (lambda rank, size: in_bf16(np.random.default_rng(rank).standard_normal(size)), 12.1, 14.6),
        (lambda rank, size: np.random.default_rng(rank).standard_normal(size).astype(np.float16), 15.2, 17.6),
        (lambda _, size: np.zeros(size), 0.2, 0.3),
    ],
    ids=["float32", "bf16", "fp16", "zeros"],
)
def test_values_travel_in_the_bits_they_need_and_no_more_goes_to_the_device_and_back(
    draws: Callable[[int, int], Array], least: float, most: float
) -> None:
    size = 1 << 16
    team, (slot,), network = make_team("device", 2, [size], chunk_values=size // 2)
    before = 0
    for step in range(10):
        before = team[0].compactor.moved_bytes
        for rank, worker in enumerate(team):
            worker.start(draws(rank, size).astype(np.float32), slot, step)
        network.pump()
    # Half of the values go out as parts, the other half as sums.
    sent = team[0].transport.stats.sent_bytes / 10
    assert least * size / 8 < sent < most * size / 8
    # Parts and sums go out and come in; the copies out are a little longer than they need to be.
    assert team[0].compactor.moved_bytes - before < 2 * 1.05 * sent + 8192
    assert not team[0].compactor.fetched


def in_bf16(values: Array) -> Array:
    return torch.from_numpy(values).bfloat16().float().numpy()


def test_a_chunk_that_grows_is_fetched_whole_and_one_that_alternates_is_not_fetched_again() -> None:
    size = 4 * FEWEST_COMPACTED
    team, (slot,), network = make_team("device", 2, [size], chunk_values=2 * FEWEST_COMPACTED)
    long = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    short = in_bf16(long)
    fetched = []
    for step, values in enumerate([short] * 9 + [long, short, short, long]):
        copies = [values.copy() for _ in team]
        for worker, mine in zip(team, copies, strict=True):
            worker.start(mine, slot, step)
        network.pump()
        assert all(same_bits(mine, values + values) for mine in copies)
        fetched.append(team[0].compactor.fetched)
    assert fetched == [0] * 9 + [2] * 4


@pytest.mark.parametrize("workers", [2, 3])
def test_bf16_is_added_in_float32_divided_and_rounded_once(workers: int) -> None:
    size = 5 * FEWEST_COMPACTED + 7
    team, (slot,), network = make_team(
        "device", workers, [size], chunk_values=CHUNK_VALUES, divisor=workers, dtype=torch.bfloat16
    )
    values = [torch.from_numpy(np.random.default_rng(rank).standard_normal(size)).bfloat16() for rank in range(workers)]
    mean = (functools.reduce(torch.add, [one.float() for one in values]) / workers).bfloat16()
    futures = [worker.server.start(one, slot, 0) for worker, one in zip(team, values, strict=True)]
    assert {parcel.header.detail for parcel in network.parcels} == {Encoding.COMPACT}
    network.pump()
    assert all(future.result(0) for future in futures)
    assert all(torch.equal(one.view(torch.int16), mean.view(torch.int16)) for one in values)
    assert team[0].transport.stats.sent_bytes < 0.85 * 2 * size * 2 * (workers - 1) / workers


@pytest.mark.parametrize("kind", [Kind.PART, Kind.SUM])
@pytest.mark.parametrize("tail_bytes", [5, 2**32 - 1])
def test_a_chunk_whose_tail_does_not_match_its_size_never_reaches_the_device(kind: Kind, tail_bytes: int) -> None:
    team, (slot,), _ = make_team("device", 2, [FEWEST_COMPACTED * 4], chunk_values=CHUNK_VALUES)
    future = team[0].start(np.zeros(FEWEST_COMPACTED * 4, np.float32), slot, 0)
    owner = 0 if kind is Kind.PART else 1
    chunk = next(chunk for chunk in slot.chunks if chunk.owner == owner)
    size = ChunkRows.of(slot.chunks).layout.tail_at
    payload = tail_bytes.to_bytes(4, "little").ljust(size, b"\0")
    header = Header(kind, 1, slot.number, chunk.index, 0, size, Encoding.COMPACT)
    with pytest.raises(ServerError, match=f"rank 1 sent {size} bytes for {chunk}, but their content makes it"):
        team[0].transport.arrive(pack(header), payload)
    assert isinstance(future.exception(0), ServerError)


def test_only_float32_and_bf16_in_buckets_of_some_size_are_compacted() -> None:
    sizes = [SMALLEST_COMPACTED, SMALLEST_COMPACTED - 1, 0]
    (large, small, none) = make_slots(0, sizes, [4] * 3, 2, 1 << 20)
    (cut_to_bits,) = make_slots(0, sizes[:1], [4], 2, 4 * (FEWEST_COMPACTED - 1))
    assert not is_compacted(cut_to_bits, torch.float32)
    assert is_compacted(large, torch.float32)
    assert is_compacted(large, torch.bfloat16)
    assert not is_compacted(large, torch.float64)
    assert not is_compacted(large, torch.float16)
    assert not is_compacted(small, torch.float32)
    assert not is_compacted(none, torch.float32)


def test_a_device_that_cannot_compact_is_named_and_gradients_travel_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device, "can_compact", lambda _: True)
    monkeypatch.setitem(sys.modules, "poseidon.sums.cuda_compactor", None)
    assert find_compactor(WireSettings()) is None
    assert "gradients travel as they are" in caplog.text
    assert "cuda_compactor" in caplog.text


def test_a_device_that_should_not_compact_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(device, "can_compact", lambda _: False)
    assert find_compactor(WireSettings()) is None
    assert not caplog.text
