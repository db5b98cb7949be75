"""How often a script's backwards are exchanged, with ``--auto --accumulate``."""

from __future__ import annotations

import pytest
import torch

from poseidon.auto.accumulation import MOST_BACKWARDS, Group, state_of


def play(counts: list[int], is_asked: bool = True) -> tuple[list[str], list[int]]:
    """Return what happened to the backwards of each step, and what was learned.

    ``x``: exchanged; ``.``: not; ``!``: what was left has been exchanged before the step.
    """
    group, found, learned = Group(is_asked), [], []
    for count in counts:
        seen = ""
        for _ in range(count):
            is_exchanged = group.begins()
            group.ended(is_exchanged)
            seen += "x" if is_exchanged else "."
        if group.is_pending:
            group.flushed()
            seen += "!"
        learned.append(group.stepped())
        assert group.stepped() == 0, "a step was counted twice"
        found.append(seen)
    return found, learned


@pytest.mark.parametrize(
    ("counts", "found"),
    [
        ([3, 3, 3, 3], ["xxx", "xxx", "..x", "..x"]),
        ([3, 3, 1, 3], ["xxx", "xxx", ".!", "..x"]),  # an epoch ends
        ([3, 3, 5, 3], ["xxx", "xxx", "..x..!", "..x"]),
        ([3, 3, 5, 5, 5], ["xxx", "xxx", "..x..!", "..x..!", "....x"]),  # twice is a habit
        ([1, 3, 3, 3], ["x", "xxx", "..x", "..x"]),
        ([1, 1, 1], ["x", "x", "x"]),
        ([2, 1, 2, 2, 2], ["xx", "x", "x.!", "x.!", ".x"]),
        ([2, 0, 2, 2], ["xx", "", "xx", ".x"]),  # a step on nothing
    ],
)
def test_the_last_backward_of_a_step_is_exchanged(counts: list[int], found: list[str]) -> None:
    assert play(counts)[0] == found


def test_what_is_learned_is_told_once() -> None:
    assert play([4, 4, 4, 2, 4])[1] == [0, 4, 0, 0, 0]


def test_unasked_all_are_exchanged_and_the_number_is_learned_all_the_same() -> None:
    assert play([4, 4, 4, 4], is_asked=False) == (["xxxx"] * 4, [0, 4, 0, 0])


def test_gradients_that_change_between_backwards_of_the_first_steps_keep_every_exchange() -> None:
    group = Group(is_asked=True)
    group.ended(group.begins())
    assert group.changed()
    for _ in range(5):
        for _ in range(3):
            assert group.begins()
            group.ended(True)
        assert group.stepped() == 0


def test_a_step_that_is_left_out_later_begins_the_count_anew() -> None:
    group = Group(is_asked=True)
    for _ in range(2):
        for _ in range(3):
            group.ended(group.begins())
        group.stepped()
    seen = []
    for turn in range(6):
        if turn == 3:
            assert not group.changed()
        seen.append(group.begins())
        group.ended(seen[-1])
    assert seen == [False, False, True] * 2


def test_a_script_without_steps_is_not_watched_for_ever() -> None:
    group = Group(is_asked=True)
    for _ in range(MOST_BACKWARDS + 1):
        assert group.begins()
        group.ended(True)
    assert group.goes_each


def test_what_changes_through_data_is_seen_in_the_values() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.sum().backward()
    before = [state_of([parameter], with_bits) for with_bits in (False, True)]
    parameter.grad.data.zero_()
    after = [state_of([parameter], with_bits) for with_bits in (False, True)]
    assert before[0] == after[0]
    assert before[1] != after[1]
