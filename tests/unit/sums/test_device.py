"""Chunks that travel compacted, on the device's twin. What both arithmetics share is tested in ``test_server.py``."""

from __future__ import annotations

import functools
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch

from compact_twin import same_bits
from poseidon.errors import ServerError
from poseidon.sums import device
from poseidon.sums.compact import FEWEST_COMPACTED, SMALLEST_COMPACTED_BYTES, ChunkRows
from poseidon.sums.device import find_compactor, is_compacted
from poseidon.sums.encodings import Encoding
from poseidon.sums.slots import make_slots
from poseidon.wire.message import Header, Kind, pack
from poseidon.wire.settings import WireSettings
from sum_team import draw, make_team

CHUNK_VALUES = 2 * FEWEST_COMPACTED


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
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
    assert Encoding.BITS_28 in encodings
    network.pump()
    assert all(future.result(0) for future in futures)
    assert all(same_bits(one, total) for one in wild)
    assert team[0].compactor.copied > team[1].compactor.copied > 0


@pytest.mark.parametrize("more", [-1, 0, 1, 2])
def test_a_chunk_travels_plain_from_one_stray_too_many(more: int) -> None:
    # Chunks of 4097 and of 4096 values share one layout.
    team, (slot,), network = make_team("device", 2, [2 * FEWEST_COMPACTED + 1], chunk_values=CHUNK_VALUES)
    rows = ChunkRows.of(slot.chunks)
    assert (rows.quotient, rows.longer) == (FEWEST_COMPACTED, 1)
    values = np.ones(2 * FEWEST_COMPACTED + 1, np.float32)
    for chunk in rows.chunks:
        # One in each group stays large, so that the others are far below it.
        small = [at for at in range(chunk.length) if at % 256][: rows.layout.most_strays + more]
        values[chunk.start : chunk.stop][small] = 1e-20
    copies = [values.copy() for _ in team]
    for worker, mine in zip(team, copies, strict=True):
        worker.start(mine, slot, 0)
    expected = Encoding.PLAIN if more > 0 else Encoding.BITS_28
    assert {parcel.header.detail for parcel in network.parcels} == {expected}
    assert all(parcel.header.length < 4 * FEWEST_COMPACTED for parcel in network.parcels) == (more <= 0)
    network.pump()
    assert all(same_bits(mine, values + values) for mine in copies)
    assert bool(team[0].compactor.copied) == (more > 0)


def test_an_eighth_of_the_bytes_is_saved() -> None:
    team, (slot,), network = make_team("device", 2, [1 << 17], chunk_values=1 << 16)
    for rank, worker in enumerate(team):
        worker.start(np.random.default_rng(rank).standard_normal(1 << 17).astype(np.float32), slot, 0)
    network.pump()
    plain = 4 * (1 << 17)  # half of it as parts, half as sums
    assert 0.875 * plain < team[0].transport.stats.sent_bytes < 0.88 * plain


@pytest.mark.parametrize("kind", [Kind.PART, Kind.SUM])
@pytest.mark.parametrize("strays", [5, 2**32 - 1])
def test_a_chunk_whose_strays_do_not_match_its_size_never_reaches_the_device(kind: Kind, strays: int) -> None:
    team, (slot,), _ = make_team("device", 2, [FEWEST_COMPACTED * 4], chunk_values=CHUNK_VALUES)
    future = team[0].start(np.zeros(FEWEST_COMPACTED * 4, np.float32), slot, 0)
    owner = 0 if kind is Kind.PART else 1
    chunk = next(chunk for chunk in slot.chunks if chunk.owner == owner)
    size = ChunkRows.of(slot.chunks).layout.size(0)
    payload = strays.to_bytes(4, "little").ljust(size, b"\0")
    header = Header(kind, 1, slot.number, chunk.index, 0, size, Encoding.BITS_28)
    with pytest.raises(ServerError, match=f"rank 1 sent {size} bytes for {chunk}, but their content makes it"):
        team[0].transport.arrive(pack(header), payload)
    assert isinstance(future.exception(0), ServerError)


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


def test_a_device_that_cannot_compact_is_named_and_gradients_travel_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device, "can_compact", lambda _: True)
    monkeypatch.setitem(sys.modules, "poseidon.sums.cuda_compactor", None)
    assert find_compactor(2, WireSettings()) is None
    assert "gradients travel as they are" in caplog.text
    assert "cuda_compactor" in caplog.text


def test_a_device_that_should_not_compact_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(device, "can_compact", lambda _: False)
    assert find_compactor(2, WireSettings()) is None
    assert not caplog.text
