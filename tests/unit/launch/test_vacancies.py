"""When lost workers and machines are tried again."""

from __future__ import annotations

from poseidon.launch.vacancies import FIRST_S, LASTS_S, LONGEST_S, Opening, Vacancies

WORKER = Opening(0, 1)


def test_trials_come_later_and_later() -> None:
    vacancies, now, pauses = Vacancies(100), 0.0, []
    vacancies.lose(WORKER, now)
    for _ in range(12):
        lost_at = now
        while not (due := vacancies.take_due(now)):
            now += 0.25
        assert due == [WORKER]
        assert vacancies.take_due(now + 1000) == []
        pauses.append(now - lost_at)
        vacancies.retry(WORKER, now)
    assert pauses[0] == FIRST_S
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_S


def test_one_that_lasted_comes_back_at_once() -> None:
    vacancies = Vacancies(10)
    for _ in range(5):
        vacancies.lose(WORKER, 0.0)
        vacancies.take_due(100.0)
    vacancies.lose(WORKER, 100.0 + 2 * LASTS_S)
    assert vacancies.take_due(100.0 + 2 * LASTS_S + FIRST_S) == [WORKER]


def test_only_so_many_losses_are_made_good() -> None:
    vacancies = Vacancies(1)
    vacancies.lose(WORKER, 0.0)
    vacancies.lose(Opening(1), 0.0)
    assert vacancies.is_open
    assert vacancies.take_due(100.0) == [WORKER]
    assert not vacancies.is_open
