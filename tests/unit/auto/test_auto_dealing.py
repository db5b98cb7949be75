from __future__ import annotations

from itertools import count, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.auto.dealing import Dealer, Part, cut


def deal(batches: list[list[int]], size: int, divides: bool, drop_last: bool = False) -> list[list[Part[int]]]:
    return [list(Dealer(rank, size, divides, drop_last).batches(batches)) for rank in range(size)]


@given(total=st.integers(1, 60), batch=st.integers(1, 9), size=st.integers(2, 5), divides=st.booleans())
def test_everybody_gets_equally_many_batches_and_every_sample_counts_once(
    total: int, batch: int, size: int, divides: bool
) -> None:
    batches = list(cut(range(total), batch, False))
    hands = deal(batches, size, divides)
    assert len({len(hand) for hand in hands}) == 1
    assert len(hands[0]) == Dealer(0, size, divides).count_batches(len(batches))
    seen: set[int] = set()
    for parts in zip(*hands, strict=True):
        assert sum(part.mean_weight for part in parts) == pytest.approx(size)
        counted = [item for part in parts if part.added for item in set(part.items)]
        assert not seen & set(counted)
        seen |= set(counted)
        # The weighted mean over workers is the mean, or the sum, over the step's samples.
        mean = sum(part.mean_weight * sum(part.items) / len(part.items) for part in parts) / size
        assert mean == pytest.approx(sum(counted) / len(counted))
        assert sum(part.sum_weight * sum(part.items) for part in parts) / size == pytest.approx(sum(counted))
    assert seen == set(range(total))


def test_a_divided_batch_is_split_in_order() -> None:
    hands = deal([[1, 2, 3, 4, 5]], 2, divides=True)
    assert [hand[0].items for hand in hands] == [[1, 2], [3, 4, 5]]
    assert [hand[0].mean_weight for hand in hands] == [pytest.approx(0.8), pytest.approx(1.2)]


def test_whole_batches_stay_whole_and_the_end_is_split() -> None:
    hands = deal([[1, 2], [3, 4], [5, 6]], 2, divides=False)
    assert [[part.items for part in hand] for hand in hands] == [[[1, 2], [5, 5]], [[3, 4], [6, 6]]]


def test_drop_last_leaves_out_a_round_that_not_everybody_can_join() -> None:
    hands = deal([[1, 2], [3, 4], [5, 6]], 2, divides=False, drop_last=True)
    assert [[part.items for part in hand] for hand in hands] == [[[1, 2]], [[3, 4]]]
    assert Dealer(0, 2, False, True).count_batches(3) == 1


def test_a_worker_that_would_go_without_repeats_a_sample_that_counts_nothing() -> None:
    hands = deal([[1, 2, 3, 4], [7]], 3, divides=True)
    assert [hand[1].items for hand in hands] == [[7], [7], [7]]
    assert sorted(hand[1].mean_weight for hand in hands) == [0.0, 0.0, 3.0]


def test_an_endless_stream_is_dealt_as_it_comes() -> None:
    parts = [list(islice(Dealer(rank, 2, False).batches(cut(count(), 3, False)), 2)) for rank in range(2)]
    assert [[part.items for part in hand] for hand in parts] == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10, 11]]]


@pytest.mark.parametrize(("drop_last", "expected"), [(False, 2), (True, 1)])
def test_a_streams_end(drop_last: bool, expected: int) -> None:
    hands = deal(list(cut(range(11), 8, drop_last)), 2, True, drop_last)
    assert [len(hand) for hand in hands] == [expected, expected]
    assert [len(hand[-1].items) for hand in hands] == ([1 * 2, 2] if not drop_last else [4, 4])


def test_items_that_are_batches_are_taken_in_turn() -> None:
    hands = [list(Dealer(rank, 2, False).items([["a"], ["b"], ["c"]])) for rank in range(2)]
    assert [[part.items for part in hand] for hand in hands] == [[["a"], ["c"]], [["b"], ["c"]]]
    assert [hand[1].mean_weight for hand in hands] == [2.0, 0.0]
