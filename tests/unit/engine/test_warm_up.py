"""Exact steps before lossy ones: workers that know of different numbers go on together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from poseidon.engine.warm_up import WarmUp
from poseidon.routes.feedback import Feedback


class Others:
    """In place of a team: what the other workers have counted."""

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = counts
        self.asked = 0

    def gather_ints(self, mine: list[int], what: str) -> list[list[int]]:
        self.asked += 1
        return [mine, *([count] for count in self._counts)]


def warm_up(steps: int, taken: int = 0, others: Sequence[int] = (0,)) -> tuple[WarmUp, Feedback, Any]:
    feedback = Feedback()
    feedback.exact_steps = taken
    return WarmUp(steps, feedback), feedback, cast("Any", Others(others))


def test_it_ends_with_its_last_step_and_is_agreed_on_once() -> None:
    one, feedback, team = warm_up(2)
    states = []
    for _ in range(3):
        assert not one.is_over(team)
        states.append((one.left, one.lasts_one_more))
        one.count()
    # Until a backward has landed, it goes on.
    assert states == [(2, False), (1, True), (0, True)]
    assert feedback.exact_steps == 2
    assert team.asked == 1


def test_who_knows_of_fewer_steps_goes_on_where_the_others_are() -> None:
    one, feedback, team = warm_up(5, taken=0, others=[3, 0])
    assert not one.is_over(team)
    one.count()
    assert feedback.exact_steps == 4
    assert one.lasts_one_more
    late, _, team = warm_up(5, taken=0, others=[7])
    assert late.is_over(team)
