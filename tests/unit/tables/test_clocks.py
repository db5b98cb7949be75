from __future__ import annotations

import pytest

from poseidon.errors import ConfigError, ServerError
from poseidon.tables.clocks import Clocks, Consistency


def test_the_slowest_clock_advances_with_the_last_worker() -> None:
    clocks = Clocks([0, 1, 2], 1)
    assert not clocks.tick(0)
    assert not clocks.tick(2)
    assert clocks.slowest == 0
    assert clocks.tick(1)
    assert clocks.slowest == 1


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_worker_reads_until_it_is_bound_clocks_ahead(bound: int) -> None:
    clocks = Clocks([0, 1], bound)
    for _ in range(bound):
        clocks.tick(0)
        assert clocks.may_read(0)
    clocks.tick(0)
    assert not clocks.may_read(0)
    assert clocks.may_read(1)
    assert clocks.awaited_by(clocks.clock_of(0)) == [1]
    clocks.tick(1)
    assert clocks.may_read(0)
    assert clocks.awaited_by(clocks.clock_of(0)) == []


def test_without_a_bound_nobody_waits() -> None:
    clocks = Clocks([0, 1], None)
    for _ in range(100):
        clocks.tick(0)
    assert clocks.may_read(0)
    assert clocks.awaited_by(100) == []


def test_a_lost_worker_holds_nobody_up_and_is_recorded() -> None:
    clocks = Clocks([0, 1, 2], 0)
    for _ in range(2):
        clocks.tick(0)
        clocks.tick(1)
    clocks.tick(2)
    assert clocks.awaited_by(2) == [2]
    assert clocks.lose(2)
    assert clocks.losses == {2: 1}
    assert clocks.may_read(0, 2)
    assert clocks.present == [0, 1]
    assert not clocks.lose(2)
    with pytest.raises(ServerError, match="worker 2 was given up as dead at clock 1"):
        clocks.tick(2)


def test_a_worker_that_left_is_no_loss() -> None:
    clocks = Clocks([0, 1], 0)
    clocks.tick(0)
    assert clocks.leave(1)
    assert clocks.losses == {}
    assert not clocks.lose(1)
    assert clocks.losses == {}
    with pytest.raises(ServerError, match="worker 1 left at clock 0"):
        clocks.tick(1)
    clocks.leave(0)
    assert clocks.slowest == 1


def test_gaps_repetitions_and_strangers_are_refused() -> None:
    clocks = Clocks([0, 1], 0)
    clocks.advance(0, 1)
    with pytest.raises(ServerError, match="worker 0 reports clock 3 after clock 1; expected 2"):
        clocks.advance(0, 3)
    with pytest.raises(ServerError, match="worker 0 reports clock 1 after clock 1"):
        clocks.advance(0, 1)
    with pytest.raises(ServerError, match=r"worker 7 is unknown.*\[0, 1\]"):
        clocks.tick(7)


def test_consistency_names_its_bound_and_whether_it_survives_a_death() -> None:
    assert [(c.bound, c.survives_loss) for c in (Consistency(), Consistency("ssp", 3), Consistency("asp"))] == [
        (0, False),
        (3, True),
        (None, True),
    ]


@pytest.mark.parametrize(
    ("kind", "staleness", "words"),
    [
        ("eventual", 0, "unknown consistency 'eventual'; known: asp, bsp, ssp"),
        ("ssp", -1, "staleness is -1"),
        ("bsp", 2, "staleness is 2 with consistency 'bsp'"),
    ],
)
def test_a_consistency_that_cannot_be_is_refused(kind: str, staleness: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Consistency(kind, staleness)


def test_clocks_without_workers_or_with_a_negative_bound_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one worker"):
        Clocks([], 0)
    with pytest.raises(ConfigError, match="bound is -1"):
        Clocks([0], -1)
