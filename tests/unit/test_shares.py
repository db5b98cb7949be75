"""Shares of a batch by speed: divided as well as can be, and following what simulated workers measure."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.data.shares import JUMP, NO_BOUND, STRIDE, Balance, BatchShares, PaceMeter, Report, cut, divide, smooth

MIXED = (1.0, 1.0, 0.5, 0.25)
ROUND = 5
"""Steps between two reports."""


@st.composite
def _tasks(draw: st.DrawFn) -> tuple[int, list[float], list[int], list[int]]:
    size = draw(st.integers(1, 8))
    speeds = draw(st.lists(st.floats(0.01, 100.0), min_size=size, max_size=size))
    least = draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))
    most = [low + draw(st.integers(0, 300)) for low in least]
    return draw(st.integers(sum(least), sum(most))), speeds, least, most


@given(_tasks())
def test_a_division_is_complete_within_bounds_and_no_other_is_faster(
    task: tuple[int, list[float], list[int], list[int]],
) -> None:
    total, speeds, least, most = task
    shares = divide(*task)
    everybody = range(len(speeds))
    assert sum(shares) == total
    assert all(least[rank] <= shares[rank] <= most[rank] for rank in everybody)
    # Nobody who could give a sample would be relieved by somebody who could take it.
    givers = [rank for rank in everybody if shares[rank] > least[rank]]
    takers = [rank for rank in everybody if shares[rank] < most[rank]]
    for giver in givers:
        for taker in takers:
            before = shares[giver] / speeds[giver]
            assert giver == taker or (shares[taker] + 1) / speeds[taker] >= before * (1 - 1e-9)


@given(st.integers(1, 60), st.lists(st.integers(1, 90), min_size=1, max_size=7))
def test_other_sizes_keep_the_proportions_and_cuts_join(total: int, shares: list[int]) -> None:
    division = BatchShares(tuple(shares), (NO_BOUND,) * len(shares))
    found = division.divide(total)
    cuts = [cut(10, found, rank) for rank in range(len(found))]
    assert [number for mine in cuts for number in mine] == list(range(10, 10 + total))
    assert division.divide(sum(shares)) == tuple(shares)


class Simulated:
    """Workers of given speeds that measure, with noise, and follow the shares."""

    def __init__(self, speeds: Sequence[float], total: int = 128, noise: float = 0.0, step_s: float = 0.0) -> None:
        self.speeds = list(speeds)
        self.balance = Balance(total, [Report(0.0)] * len(speeds))
        self.changes = 0
        self._total = total
        self._noise = noise
        self._step_s = step_s
        """What a step takes besides its samples."""
        self._random = random.Random(7)

    def play(self, rounds: int, stalls: bool = False) -> list[float]:
        """Return which part of the summed speed each round reaches."""
        parts = []
        for _ in range(rounds):
            self.changes += self.balance.hear([Report(self._measure(rank, stalls)) for rank in range(len(self.speeds))])
            parts.append(self.part)
        return parts

    @property
    def part(self) -> float:
        best_s = self._step_s + self._total / sum(self.speeds)
        return best_s / max(self._step_s + share / speed for share, speed in self._shared())

    def _shared(self) -> list[tuple[int, float]]:
        return list(zip(self.balance.shares, self.speeds, strict=True))

    def _measure(self, rank: int, stalls: bool) -> float:
        laps, (share, speed) = PaceMeter(), self._shared()[rank]
        for number in range(ROUND):
            took_s = self._step_s + share / speed * max(0.1, self._random.gauss(1.0, self._noise))
            laps.add(share, took_s * (50 if stalls and number == rank else 1))
        return laps.take()


@pytest.mark.parametrize("stalls", [False, True])
@pytest.mark.parametrize(("noise", "floor"), [(0.0, 0.97), (0.05, 0.96), (0.1, 0.93)])
def test_unequal_workers_reach_their_summed_speed_and_stay_there(noise: float, floor: float, stalls: bool) -> None:
    workers = Simulated(MIXED, noise=noise)
    assert workers.part < 0.4  # equal shares
    parts = workers.play(100, stalls)
    assert parts[10] > 0.9
    assert min(parts[15:]) >= floor
    assert sum(parts[15:]) / 85 > 0.96
    assert workers.changes < 30


def test_without_noise_nothing_changes_once_it_is_good() -> None:
    workers = Simulated(MIXED)
    workers.play(10)
    settled, changes = workers.balance.shares, workers.changes
    workers.play(50)
    assert (workers.balance.shares, workers.changes) == (settled, changes)
    equal = Simulated((1.0, 1.0, 1.0), noise=0.05)
    equal.play(50)
    assert equal.changes <= 3


def test_a_machine_that_becomes_slow_or_fast_again_is_followed() -> None:
    workers = Simulated(MIXED, noise=0.03)
    workers.play(20)
    workers.speeds[3] = 1.0
    assert workers.part < 0.85
    assert workers.play(12)[-1] > 0.96
    workers.speeds[0] = 0.2
    assert workers.part < 0.5
    assert workers.play(12)[-1] > 0.96


def test_what_a_step_takes_besides_its_samples_does_not_unsettle_the_shares() -> None:
    workers = Simulated(MIXED, noise=0.03, step_s=60.0)
    assert min(workers.play(80)[20:]) > 0.95
    assert workers.changes < 30


def test_shares_move_by_a_limited_factor_at_once() -> None:
    workers = Simulated((1.0, 1.0, 0.01), total=300)
    before = workers.balance.shares
    for _ in range(40):
        workers.play(1)
        for old, new in zip(before, workers.balance.shares, strict=True):
            assert old / STRIDE - 1 <= new <= old * STRIDE + 1
        before = workers.balance.shares
    assert before == (149, 149, 2)


def test_a_small_gain_is_taken_if_it_lasts_and_noise_is_not_followed() -> None:
    balance = Balance(100, [Report(1.0), Report(1.0)])
    slower = [Report(1.03), Report(1.0)]
    changes = [balance.hear(slower) for _ in range(30)]
    assert sum(changes[:3]) == 0
    assert sum(changes) == 1
    assert balance.shares == (49, 51)
    balance = Balance(100, [Report(1.0), Report(1.0)])
    assert not any(balance.hear([Report(1.0 + 0.05 * (number % 2)), Report(1.0)]) for number in range(4))


def test_one_odd_report_moves_little_and_two_are_believed() -> None:
    assert smooth(1.0, 1.0, 9.0) < 3.0
    assert smooth(1.0, 9.0, 8.0) == 8.0
    assert smooth(1.0, 0.2, 0.3) == 0.3
    assert smooth(0.0, 0.0, 5.0) == 5.0
    assert smooth(1.0, 0.2, 9.0) < 3.0  # up and down is noise
    assert smooth(1.0, JUMP, 1.0) == 1.0


def test_bounds_hold_and_room_is_exceeded_only_where_it_must_be() -> None:
    speeds = (4.0, 1.0, 1.0)
    balance = Balance(60, [Report(1 / speed, most=24) for speed in speeds])
    assert balance.shares == (24, 18, 18)
    assert balance.dealing.divide(66) == (24, 21, 21)
    for _ in range(10):
        balance.hear([Report(1 / speed, most=24) for speed in speeds])
    assert balance.shares == (24, 18, 18)
    # Memory that was only estimated does not end a job.
    assert sum(Balance(60, [Report(1.0, room=10)] * 3).shares) == 60
    assert Balance(60, [Report(0.1, room=30), Report(1.0), Report(1.0)]).shares == (30, 15, 15)
    growing = Balance(60, [Report(0.0, room=25)] * 3)
    for _ in range(10):
        growing.hear([Report(1 / speed, room=25) for speed in speeds])
    assert growing.shares == (25, 18, 17)


def test_a_worker_that_is_new_begins_as_a_usual_one() -> None:
    assert Balance(100, [Report(1.0), Report(1.0), Report(0.0), Report(2.0)]).shares == (29, 29, 28, 14)
    assert Balance(90, [Report(0.0)] * 4).shares == (23, 23, 22, 22)


def test_each_worker_keeps_a_sample_and_two_where_there_are_enough() -> None:
    assert Balance(8, [Report(0.001), Report(9.0), Report(9.0)]).shares == (4, 2, 2)
    assert Balance(4, [Report(0.001), Report(9.0), Report(9.0)]).shares == (2, 1, 1)
    assert Balance(8, [Report(0.001), Report(9.0), Report(9.0)]).dealing.divide(2) in ((1, 1, 0), (2, 0, 0))


def test_a_single_slow_step_and_unusual_ones_do_not_count() -> None:
    laps = PaceMeter()
    for seconds in (1.0, 50.0, 1.0, 1.2):
        laps.add(10, seconds)
    laps.add(2, 4.0, is_usual=False)
    assert len(laps) == 5
    assert laps.take() == pytest.approx(0.11)
    laps.add(2, 4.0, is_usual=False)
    assert laps.take() == 2.0
    assert laps.take() == 0.0
