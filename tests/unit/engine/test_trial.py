from __future__ import annotations

from poseidon.engine.trial import MOST_ODD, WARM_BACKWARDS, Trial, Turn

LAPS = 4


def play(trial: Trial, step_s: dict[int, float], odd: set[int] = frozenset()) -> list[int]:  # type: ignore[assignment]
    """Run steps until the trial is over; return which plan each step ran."""
    ran = []
    marks = 0
    while not trial.is_over:
        ran.append(trial.current)
        must_land = trial.is_last_backward
        turn = trial.settled(len(ran) not in odd)
        if turn is Turn.MARK:
            marks += 1
        if turn is Turn.RESTART:
            marks = 0
        if turn is Turn.SWITCH:
            assert must_land, "a plan changes only with a backward that lands at its end"
            assert trial.is_measured == (marks == LAPS + 1)
            trial.finish(step_s[trial.current] if trial.is_measured else None)
            marks = 0
        assert len(ran) < 1000
    return ran


def test_each_plan_has_its_turn_and_the_fastest_stays() -> None:
    trial = Trial([0, 3, 1], LAPS, running=0)
    ran = play(trial, {0: 0.5, 3: 0.2, 1: 0.4})
    # The first is warm already; the last backward of each turn is not marked.
    assert ran == [0] * (LAPS + 2) + [3] * (WARM_BACKWARDS + LAPS + 1) + [1] * (WARM_BACKWARDS + LAPS + 1)
    assert trial.measured_s == {0: 0.5, 3: 0.2, 1: 0.4}
    assert trial.current == 3


def test_a_plan_in_use_that_is_not_to_be_tried_ends_with_the_next_backward() -> None:
    trial = Trial([2, 1], LAPS, running=0)
    ran = play(trial, {2: 0.5, 1: 0.4})
    assert ran[0] == 0
    assert ran[1] == 2
    assert trial.current == 1
    assert 0 not in trial.measured_s


def test_a_clear_winner_is_used_without_being_measured() -> None:
    assert Trial([0], LAPS, running=0).is_over
    trial = Trial([2], LAPS, running=0)
    assert play(trial, {}) == [0]
    assert trial.current == 2


def test_an_odd_step_begins_the_laps_again() -> None:
    trial = Trial([0, 1], LAPS, running=0)
    ran = play(trial, {0: 0.5, 1: 0.6}, odd={LAPS})
    assert ran.count(0) == 2 * LAPS + 2
    assert trial.measured_s == {0: 0.5, 1: 0.6}


def test_an_odd_step_after_the_last_lap_only_puts_the_change_off() -> None:
    trial = Trial([0, 1], LAPS, running=0)
    ran = play(trial, {0: 0.5, 1: 0.6}, odd={LAPS + 2})
    assert ran.count(0) == LAPS + 3
    assert trial.measured_s[0] == 0.5


def test_after_too_many_odd_steps_the_best_so_far_stays() -> None:
    began = WARM_BACKWARDS + 2 * LAPS + 4
    for order, kept in (([0, 1, 2], 1), ([1, 0, 2], 1)):
        trial = Trial(order, LAPS, running=0)
        play(trial, {0: 0.5, 1: 0.4}, odd=set(range(began + 4, began + 5 + MOST_ODD)))
        assert trial.was_given_up
        assert trial.current == kept
    unmeasured = Trial([1, 2], LAPS, running=0)
    play(unmeasured, {}, odd=set(range(2, 2 + MOST_ODD + 1)))
    assert unmeasured.current == 0
