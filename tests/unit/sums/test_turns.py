from __future__ import annotations

import itertools

import pytest

from poseidon.errors import ServerError
from poseidon.sums.chunks import Chunk
from poseidon.sums.turns import PartRoll, in_turn


def bring(roll: PartRoll, rank: int, clock: int = 0) -> list[int]:
    """Bring a part and add what can be added; return it if the sum is complete."""
    roll.expect(rank, clock)
    ready = roll.enter(rank, rank)
    while ready:
        roll.total = [*(roll.total or []), *ready]
        total, ready = roll.settle()
        if total is not None:
            return total
    return []


@pytest.mark.parametrize("together", [1, 2, 4])
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_parts_are_added_in_rank_order_in_whatever_order_they_come(order: tuple[int, ...], together: int) -> None:
    roll = PartRoll(Chunk(7, 3, 0, 10, 0), 4, together)
    for clock in (2, 5):
        totals = [bring(roll, rank, clock) for rank in order]
        assert totals == [[], [], [], [0, 1, 2, 3]]
        assert not roll.is_open


@pytest.mark.parametrize(("workers", "passes"), [(2, [2]), (4, [4]), (5, [4, 1]), (8, [4, 4]), (9, [4, 4, 1])])
def test_parts_are_handed_out_a_few_at_a_time(workers: int, passes: list[int]) -> None:
    roll = PartRoll(Chunk(0, 0, 0, 10, 0), workers, 4)
    handed_out = []
    for rank in range(workers):
        roll.expect(rank, 0)
        if ready := roll.enter(rank, rank):
            handed_out.append(len(ready))
            roll.total = 1
            roll.settle()
    assert handed_out == passes


def test_only_one_thread_at_a_time_gets_parts_and_it_gets_what_came_meanwhile() -> None:
    roll = PartRoll(Chunk(0, 0, 0, 10, 0), 4, 1)
    for rank in range(4):
        roll.expect(rank, 0)
    assert roll.enter(0, "a") == ["a"]
    assert roll.enter(2, "c") == []
    assert roll.enter(1, "b") == []
    roll.total = "a"
    assert roll.settle() == (None, ["b", "c"])
    assert roll.enter(3, "d") == []
    roll.total = "abc"
    assert roll.settle() == (None, ["d"])
    roll.total = "abcd"
    assert roll.settle() == ("abcd", [])
    assert roll.total is None


@pytest.mark.parametrize(
    ("rank", "clock", "words"),
    [
        (0, 3, "rank 0 sent chunk 3 of slot 7 of clock 3 twice"),
        (1, 4, "rank 1 sent chunk 3 of slot 7 of clock 4 while clock 3 is being summed"),
        (1, 2, "rank 1 sent chunk 3 of slot 7 of clock 2 while clock 3 is being summed"),
    ],
)
def test_what_is_out_of_turn_is_refused_and_harms_nothing(rank: int, clock: int, words: str) -> None:
    roll = PartRoll(Chunk(7, 3, 0, 10, 0), 2, 4)
    assert bring(roll, 0, 3) == []
    with pytest.raises(ServerError, match=words):
        roll.expect(rank, clock)
    assert bring(roll, 1, 3) == [0, 1]
    with pytest.raises(ServerError, match="of clock 3, but clock 3 is already finished"):
        roll.expect(1, 3)


def test_every_owner_answers_another_worker_first() -> None:
    orders = [in_turn(range(4), rank, 4) for rank in range(4)]
    assert [order[1] for order in orders] == [1, 2, 3, 0]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
