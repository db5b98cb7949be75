import random

import pytest

from poseidon.errors import ConfigError
from poseidon.planning.staleness import BOUNDS, StepTimes, choose_bound, replay, step_towards

EVEN = [[0.1] * 20] * 4


def stalling(seed=0, workers=4):
    draw = random.Random(seed)
    return [[0.1 * (1 + 3 * (draw.random() < 0.2)) for _ in range(20)] for _ in range(workers)]


def test_lockstep_takes_the_slowest_of_every_step_and_misses_nothing():
    times = stalling()
    slowest_s = sum(max(step) for step in zip(*times, strict=True)) / 20
    found = replay(times, 0.01, 0)
    assert found.step_s == pytest.approx(slowest_s + 0.01)
    assert found.lag == 0


def test_a_bound_cannot_be_faster_than_the_slowest_worker_alone_or_than_the_link():
    times = stalling()
    alone_s = max(sum(worker) for worker in times) / 20
    assert min(replay(times, 0.0, bound).step_s for bound in BOUNDS) >= alone_s - 1e-9
    assert all(replay(EVEN, 0.5, bound).step_s >= 0.5 for bound in BOUNDS)


def test_equal_workers_on_a_fast_link_stay_in_lockstep():
    assert choose_bound(EVEN, 0.001)[0].bound == 0


def test_random_stalls_are_worth_some_staleness_but_not_all():
    chosen = choose_bound(stalling(), 0.01)[0]
    assert 1 <= chosen.bound <= 4
    assert chosen.step_s < 0.75 * replay(stalling(), 0.01, 0).step_s


def test_a_worker_that_is_always_slow_gains_nothing_from_staleness():
    assert choose_bound([[0.1] * 20] * 3 + [[0.3] * 20], 0.001)[0].bound == 0


def test_an_exchange_as_long_as_a_step_is_hidden_by_one_clock():
    assert choose_bound(EVEN, 0.09)[0].bound == 1


def test_prospects_hold_every_bound_once_the_chosen_one_first():
    prospects = choose_bound(stalling(), 0.01)
    assert sorted(one.bound for one in prospects) == list(BOUNDS)
    # Staleness has a price: among bounds of equal speed the fresher one is worth more.
    by_bound = {one.bound: one for one in prospects}
    assert by_bound[8].step_s == pytest.approx(by_bound[16].step_s, rel=0.01)
    assert by_bound[8].worth > by_bound[16].worth


def test_later_choices_move_one_place():
    assert [step_towards(4, 16), step_towards(4, 4), step_towards(4, 0)] == [6, 4, 3]


def test_the_exchange_is_what_the_last_worker_of_a_step_still_waits_for():
    times = StepTimes(((0.1, 0.4), (0.4, 0.1)), ((0.31, 0.02), (0.01, 0.33)))
    assert times.travel_s == pytest.approx(0.015)


def test_uneven_windows_are_refused():
    with pytest.raises(ConfigError, match="the same number of steps"):
        StepTimes(((0.1, 0.2), (0.1,)), ((0.0, 0.0), (0.0,)))
