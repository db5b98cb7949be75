from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.errors import ConfigError
from poseidon.sums.chunks import Chunk, cut

sizes_of_slots = st.lists(st.one_of(st.integers(0, 50), st.integers(0, 100_000)), max_size=40)
ranks = st.lists(st.integers(0, 30), min_size=1, max_size=9, unique=True)


@given(sizes_of_slots, ranks, st.integers(1, 5000))
def test_chunks_tile_every_slot(sizes: list[int], owners: list[int], largest: int) -> None:
    slots = cut(sizes, owners, max(largest, max(sizes, default=0) // 200 + 1))
    assert len(slots) == len(sizes)
    for number, (size, chunks) in enumerate(zip(sizes, slots, strict=True)):
        assert [c.slot for c in chunks] == [number] * len(chunks)
        assert [c.index for c in chunks] == list(range(len(chunks)))
        edges = [0, *[c.stop for c in chunks]]
        assert edges[-1] == size
        assert [c.start for c in chunks] == edges[:-1]
        assert all(c.length > 0 and c.owner in owners for c in chunks)


@given(sizes_of_slots, ranks, st.integers(500, 5000), st.integers(1, 500))
def test_no_owner_is_loaded_by_more_than_one_chunk_above_another(
    sizes: list[int], owners: list[int], largest: int, least: int
) -> None:
    slots = cut(sizes, owners, largest, least)
    longest = max((c.length for chunks in slots for c in chunks), default=0)
    assert longest <= largest
    loads = dict.fromkeys(owners, 0)
    for chunks in slots:
        for chunk in chunks:
            loads[chunk.owner] += chunk.length
        assert max(loads.values()) - min(loads.values()) <= max(longest, 1)


@given(st.integers(1, 9), st.integers(1, 1_000_000))
def test_a_large_slot_gives_every_owner_the_same_number_of_chunks(owners: int, size: int) -> None:
    [chunks] = cut([size], range(owners), 4096)
    if size >= owners * 1024:
        assert len(set(Counter(c.owner for c in chunks).values())) == 1
        assert {c.owner for c in chunks} == set(range(owners))


def test_one_huge_slot_among_small_ones_makes_no_hot_shard() -> None:
    # VGG19's first fully connected layer holds 72 % of all its parameters.
    slots = cut([1728, 36_864, 102_760_448, 16_777_216, 4_096_000], [0, 1, 2, 3], 65_536)
    loads: Counter[int] = Counter()
    for chunk in (chunk for chunks in slots for chunk in chunks):
        loads[chunk.owner] += chunk.length
    assert len(loads) == 4
    assert max(loads.values()) - min(loads.values()) <= 65_536


def test_every_rank_computes_the_same_cut() -> None:
    assert cut([10, 7], [3, 1], 4, 1) == cut([10, 7], [3, 1], 4, 1)
    assert cut([3], [5], 4) == [(Chunk(0, 0, 0, 3, 5),)]


@pytest.mark.parametrize(
    ("sizes", "owners", "largest", "least", "words"),
    [
        ([1], [], 4, None, "owners are \\[\\]"),
        ([1], [2, 2], 4, None, "owners are \\[2, 2\\]"),
        ([1], [0], 0, None, "chunk_elements is 0"),
        ([1], [0], 4, 5, "least_elements 5"),
        ([3, -1], [0], 4, None, "slot 1 has -1"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    sizes: list[int], owners: list[int], largest: int, least: int | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        cut(sizes, owners, largest, least)
