from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.auto.dealing import Dealer, cut
from poseidon.auto.losses import BACKWARD, READ, find_difference
from poseidon.auto.passes import LoaderPass, PassPurpose, find_miscount


def run_pass(
    rank: int, size: int, batches: list[list[int]], divides: bool, deals: bool, use: Callable[[LoaderPass, int], None]
) -> tuple[LoaderPass, list[int]]:
    """Go through a pass as a loader and a script do; ``use`` is told the number of each batch."""
    one = LoaderPass(Dealer(rank, size, divides), deals)
    one.begin(batches)
    got: list[int] = []
    while True:
        try:
            one.draw()
        except StopIteration:
            break
        got += one.hand_over().items
        use(one, len(got))
    for _ in one.take_rests():
        got += one.hand_over().items
    one.is_over = True
    return one, got


def train_late(one: LoaderPass, _: int) -> None:
    one.train()


def read(one: LoaderPass, _: int) -> None:
    one.read()


def ignore(_: LoaderPass, __: int) -> None:
    pass


shapes = {"total": st.integers(1, 40), "batch": st.integers(1, 7), "size": st.integers(2, 4)}


@given(**shapes, divides=st.booleans(), deals=st.booleans(), is_ignored=st.booleans())
def test_a_wrong_guess_loses_nothing(
    total: int, batch: int, size: int, divides: bool, deals: bool, is_ignored: bool
) -> None:
    batches = list(cut(range(total), batch, False))
    for rank in range(size):
        one, got = run_pass(rank, size, batches, divides, deals, ignore if is_ignored else read)
        assert sorted(got) == list(range(total))
        assert one.purpose is not PassPurpose.TRAINING
        assert not one.is_unused


@given(**shapes, divides=st.booleans(), deals=st.booleans())
def test_training_accounts_for_every_sample(total: int, batch: int, size: int, divides: bool, deals: bool) -> None:
    batches = list(cut(range(total), batch, False))
    passes = [run_pass(rank, size, batches, divides, deals, train_late)[0] for rank in range(size)]
    assert find_miscount([one.account() for one in passes]) is None


def test_other_orders_and_lost_samples_are_miscounts() -> None:
    batches = [[1, 2], [3, 4], [5, 6], [7, 8]]
    right = [run_pass(rank, 2, batches, False, True, train_late)[0].account() for rank in range(2)]
    other = run_pass(1, 2, [[2, 1], *batches[1:]], False, True, train_late)[0].account()
    assert "worker 1 drew other samples" in (find_miscount([right[0], other]) or "")
    twice = [right[0], right[0]]
    assert "of 8 samples the workers saw 4, 4" in (find_miscount(twice) or "")


def test_what_is_dropped_is_accounted_for_and_read() -> None:
    for use, expected in ((train_late, [1, 2]), (ignore, [1, 2, 3, 4, 5, 6])):
        one = LoaderPass(Dealer(0, 2, False, drop_last=True), True)
        one.begin([[1, 2], [3, 4], [5, 6]])
        got = one.draw().items
        one.hand_over()
        use(one, 1)
        with pytest.raises(StopIteration):
            one.draw()
        got = got + [item for share in one.take_rests() for item in share.items]
        assert sorted(got) == expected


def test_a_pass_that_leaned_to_training_and_did_not_train_is_found_out() -> None:
    one, got = run_pass(0, 2, [[1, 2], [3, 4]], False, True, lambda one, _: one.lean())
    assert got == [1, 2]
    assert one.is_unused


def test_a_glance_is_one_batch_of_a_pass_that_was_left() -> None:
    one = LoaderPass(Dealer(0, 2, True), True)
    one.begin([[0, 1, 2, 3], [4, 5, 6, 7]])
    one.draw()
    one.hand_over()
    assert (one.is_unused, one.is_glance) == (True, True)
    one.draw()
    one.hand_over()
    assert (one.is_unused, one.is_glance) == (True, False)


def test_workers_that_read_different_numbers_of_losses_learn_it() -> None:
    assert find_difference([[READ, 3, 77], [READ, 3, 99]]) is None
    difference = find_difference([[READ, 3, 0], [BACKWARD, 7, 0]])
    assert difference is not None
    assert difference.startswith("worker 0 reads a loss (number 3), worker 1 begins a backward (number 7)")
