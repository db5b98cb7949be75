from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compact_codec import same_bits
from poseidon.errors import ServerError
from poseidon.sums.encodings import Encoding
from poseidon.sums.halves import HalvesFinder, HalvesLayout, halve, join_halves
from sum_team import CHUNK_VALUES, make_team

Array = np.ndarray[Any, Any]


def draw_upper(seed: int, size: int) -> Array:
    bits = np.random.default_rng(seed).standard_normal(size).astype(np.float32).view(np.uint32)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


@given(st.integers(1, 3000), st.integers(0, 60), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_values_come_back_whatever_their_bits_and_in_a_size_that_the_layout_knows(
    size: int, rests: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    bits = generator.integers(0, 2**32, size, dtype=np.uint32) & np.uint32(0xFFFF0000)
    bits[generator.integers(0, size, rests)] |= np.uint32(1 + seed % 0xFFFF)
    values = bits.view(np.float32)
    payload = halve(values, bytearray)
    if payload is None:
        assert np.count_nonzero(bits & 0xFFFF) > size / 32
    else:
        assert len(payload) in HalvesLayout().sizes(size)
        assert HalvesLayout().measure(payload.data) == len(payload) < 3 * size
        assert same_bits(join_halves(payload, size, bytearray), values)


def test_one_value_in_eight_may_have_more_bits() -> None:
    values = np.ones(8000, np.float32)
    values.view(np.uint32)[:1000] |= 1
    assert halve(values, bytearray) is not None
    values.view(np.uint32)[1000] |= 1
    assert halve(values, bytearray) is None


def test_positions_outside_the_chunk_are_refused() -> None:
    values = draw_upper(0, 100)
    values.view(np.uint32)[99] |= 1
    payload = halve(values, bytearray)
    assert payload is not None
    payload[:4].view(np.uint32)[0] = 100
    with pytest.raises(ServerError, match="a chunk of 100 values came with lower bits for value 100"):
        join_halves(payload, 100, bytearray)


@pytest.mark.parametrize("workers", [2, 3])
def test_short_parts_and_short_sums_travel_in_halves_and_give_the_same_means(workers: int) -> None:
    size = 3 * CHUNK_VALUES + 1
    team, (slot,), network = make_team("host", workers, [size], divisor=workers)
    parts = [draw_upper(rank, size) for rank in range(workers)]
    for part in parts:
        part[:10] = 1 / 3
        part[CHUNK_VALUES:] = 1  # these sums are short too
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    copies = [part.copy() for part in parts]
    for worker, mine in zip(team, copies, strict=True):
        worker.start(mine, slot, 0)
    assert {parcel.header.detail for parcel in network.parcels} == {Encoding.HALVES}
    seen = set()
    while network.parcels:
        seen |= {(parcel.header.number, parcel.header.detail) for parcel in network.parcels}
        network.step()
    assert (slot.chunks[0].index, Encoding.PLAIN) in seen
    assert (slot.chunks[-1].index, Encoding.PLAIN) not in seen
    assert all(same_bits(mine, total / np.float32(workers)) for mine in copies)


def test_a_chunk_with_more_bits_is_looked_at_less_and_less_often_and_the_others_in_every_step() -> None:
    short, long = draw_upper(1, 4096), np.random.default_rng(1).standard_normal(4096).astype(np.float32)
    finder = HalvesFinder(2)
    for _ in range(100):
        assert finder.halve(0, short, bytearray) is not None
        assert finder.halve(1, long, bytearray) is None
    # What becomes short is found again within some steps, and from then on in every one.
    found = [finder.halve(1, short, bytearray) is not None for _ in range(100)]
    first = found.index(True)
    assert 0 < first < 32
    assert all(found[first:])
    # After one step with more bits, the next look follows soon.
    assert finder.halve(1, long, bytearray) is None
    assert [finder.halve(1, short, bytearray) is not None for _ in range(3)] == [False, True, True]
