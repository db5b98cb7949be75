"""Who belongs to an elastic job: decisions of the roster, alone and with many simulated workers."""

from __future__ import annotations

import random
from typing import Any

import pytest

import nightly
from poseidon.job.elastic import NEVER, Seat
from poseidon.launch.roster import (
    SILENT_S,
    STOPPED_S,
    Bounds,
    Decision,
    Doors,
    EpochOver,
    Remark,
    Remove,
    Roster,
    Seated,
)


def make(count: int, least: int = 1, machines: int = 1) -> Roster:
    roster = Roster(Bounds(least, count))
    for number in range(count):
        roster.add(number, number % machines, number // machines, f"10.0.0.{number % machines + 1}")
    return roster


def hear(roster: Roster, number: int, epoch: int, port: int = 0, now: float = 1.0) -> None:
    roster.hear(number, {"epoch": epoch, "port": port}, now)


def started(count: int, least: int = 1) -> Roster:
    roster = make(count, least)
    for number in range(count):
        hear(roster, number, NEVER, 100 + number)
    (seated,) = roster.decide(1.0)
    assert isinstance(seated, Seated)
    for number in range(count):
        hear(roster, number, 0)
    assert roster.decide(1.0) == []
    return roster


def test_the_first_epoch_waits_for_all() -> None:
    roster = make(3, machines=2)
    hear(roster, 0, NEVER, 100)
    hear(roster, 2, NEVER, 102)
    assert roster.decide(1.0) == []
    hear(roster, 1, NEVER, 101)
    (seated,) = roster.decide(1.0)
    assert isinstance(seated, Seated)
    assert seated.seats[2] == Seat(0, 2, 3, 1, 2, "10.0.0.1", 100)
    assert seated.joined == (0, 1, 2)


def test_one_that_came_later_is_not_in_the_first_epoch() -> None:
    """The others begin in ``poseidon.init()``, it does in ``Checkpoint.run``, and they would wait for other things."""
    roster = make(3)
    roster.end(0, has_finished=False)
    roster.add(3, 0, 0, "10.0.0.1", is_late=True)
    hear(roster, 3, NEVER, 103)
    hear(roster, 1, NEVER, 101)
    assert roster.decide(1.0) == []
    hear(roster, 2, NEVER, 102)
    (seated,) = roster.decide(1.0)
    assert isinstance(seated, Seated)
    assert list(seated.seats) == [1, 2]
    assert roster.decide(1.0) == [EpochOver(0, (1, 2), is_soft=True)]


def test_the_first_epoch_is_over_at_once_if_it_needs_one_that_came_later() -> None:
    roster = make(3, least=3)
    for number in (1, 2):
        hear(roster, number, NEVER, 100 + number)
    roster.end(0, has_finished=False)
    assert roster.decide(1.0) == []
    assert roster.is_short
    roster.add(3, 0, 0, "10.0.0.1", is_late=True)
    seated, over = roster.decide(1.0)
    assert isinstance(seated, Seated)
    assert list(seated.seats) == [1, 2]
    assert over == EpochOver(0, (1, 2))
    for number, epoch in ((3, NEVER), (1, 0)):
        hear(roster, number, epoch, 200 + number)
        assert roster.decide(1.0) == []
    hear(roster, 2, 0, 202)
    (seated,) = roster.decide(1.0)
    assert isinstance(seated, Seated)
    assert list(seated.seats) == [1, 2, 3]
    assert seated.joined == (3,)


def test_those_who_came_later_begin_if_nobody_else_is_left() -> None:
    roster = make(1)
    roster.end(0, has_finished=False)
    for number in (1, 2):
        roster.add(number, 0, 0, "10.0.0.1", is_late=True)
    hear(roster, 1, NEVER, 101)
    assert roster.decide(1.0) == []
    hear(roster, 2, NEVER, 102)
    (seated,) = roster.decide(1.0)
    assert isinstance(seated, Seated)
    assert list(seated.seats) == [1, 2]


def test_a_lost_worker_ends_the_epoch_and_the_others_keep_their_order() -> None:
    roster = started(4)
    roster.end(0, has_finished=False)
    assert roster.decide(2.0) == [EpochOver(0, (1, 2, 3))]
    hear(roster, 3, 0, 203)
    hear(roster, 1, 0, 201)
    assert roster.decide(2.0) == []
    hear(roster, 2, 0, 202)
    (seated,) = roster.decide(2.0)
    assert isinstance(seated, Seated)
    assert {number: seat.rank for number, seat in seated.seats.items()} == {1: 0, 2: 1, 3: 2}
    assert {seat.port for seat in seated.seats.values()} == {201}
    assert seated.lost == (0,)


def test_one_that_says_that_it_leaves_is_not_waited_for() -> None:
    roster = started(3)
    hear(roster, 0, 0, 300)
    hear(roster, 1, 0, 301)
    assert roster.decide(2.0) == [EpochOver(0, (0, 1, 2))]
    roster.hear(2, {"epoch": 0, "port": 0, "leaves": 1}, 2.0)
    (seated,) = roster.decide(2.0)
    assert isinstance(seated, Seated)
    assert (list(seated.seats), seated.lost) == ([0, 1], (2,))
    roster.end(2, has_finished=True)  # its process ends later, which changes nothing
    assert not roster.has_finished


def test_one_that_ends_well_without_having_joined_has_not_finished_the_training() -> None:
    roster = started(2)
    roster.add(2, 0, 1, "10.0.0.1")
    hear(roster, 2, NEVER)
    roster.end(2, has_finished=True)
    assert roster.has_stayed_apart(2)
    assert not roster.has_finished
    roster.end(0, has_finished=True)
    assert not roster.has_stayed_apart(0)
    assert roster.has_finished


def test_one_that_has_left_its_epoch_and_ends_alone_has_not_finished_the_training() -> None:
    """A program without ``Checkpoint.run``: what it has trained since, it has trained by itself."""
    roster = started(3)
    roster.end(0, has_finished=False)
    assert roster.decide(2.0) == [EpochOver(0, (1, 2))]
    for number in (1, 2):
        roster.hear(number, {"epoch": 0, "port": 0, "apart": 1}, 2.0)
        roster.end(number, has_finished=True)
        assert roster.has_stayed_apart(number)
    assert not roster.has_finished


def test_one_that_ends_soon_after_it_has_joined_again_has_finished() -> None:
    """The launcher may have heard nothing of it since it left the epoch before."""
    roster = started(2)
    roster.end(1, has_finished=False)
    roster.decide(2.0)
    ready = {"epoch": 0, "port": 300, "apart": 1}
    roster.hear(0, ready, 2.0)
    (seated,) = roster.decide(2.0)
    assert isinstance(seated, Seated)
    roster.hear(0, ready, 2.0)  # out of date
    roster.end(0, has_finished=True)
    assert roster.has_finished
    assert not roster.has_stayed_apart(0)


def test_words_of_an_earlier_epoch_change_nothing() -> None:
    roster = started(2)
    hear(roster, 0, NEVER, 100)
    assert roster.decide(2.0) == []


def test_a_worker_that_asks_gets_a_new_epoch_though_nobody_is_lost() -> None:
    roster = started(2)
    hear(roster, 1, 0, 300)
    assert roster.decide(2.0) == [EpochOver(0, (0, 1))]
    hear(roster, 0, 0, 301)
    (seated,) = roster.decide(2.0)
    assert isinstance(seated, Seated)
    assert (seated.lost, seated.joined) == ((), ())


def test_one_that_dies_while_the_others_get_ready_is_not_waited_for() -> None:
    roster = started(3)
    roster.end(2, has_finished=False)
    roster.decide(2.0)
    hear(roster, 0, 0, 300)
    roster.end(1, has_finished=False)
    (seated,) = roster.decide(2.0)
    assert isinstance(seated, Seated)
    assert list(seated.seats) == [0]


def test_too_few_workers_get_no_seats() -> None:
    roster = started(3, least=2)
    roster.end(2, has_finished=False)
    roster.end(1, has_finished=False)
    hear(roster, 0, 0, 300)
    assert roster.decide(2.0) == [EpochOver(0, (0,))]
    assert roster.is_short


def test_the_last_ones_may_be_fewer_once_one_has_finished() -> None:
    roster = started(2, least=2)
    roster.end(0, has_finished=True)
    assert not roster.is_short
    assert roster.decide(2.0) == []
    hear(roster, 1, 0, 300)
    _, seated = roster.decide(2.0)
    assert isinstance(seated, Seated)
    assert list(seated.seats) == [1]


def test_a_new_worker_enters_when_it_is_ready_behind_all_others() -> None:
    roster = started(2)
    roster.add(7, 1, 0, "10.0.0.9")
    hear(roster, 7, NEVER)
    assert roster.decide(2.0) == []
    hear(roster, 7, NEVER, 700)
    assert roster.decide(2.0) == [EpochOver(0, (0, 1), is_soft=True)]
    hear(roster, 0, 0, 300)
    hear(roster, 1, 0, 301)
    *_, seated = roster.decide(2.0)
    assert isinstance(seated, Seated)
    assert seated.seats[7].rank == 2
    assert seated.joined == (7,)


def test_one_that_is_about_to_join_hears_where_the_others_hand_out_their_state() -> None:
    roster = started(3)
    for number in (0, 1):  # the third has not opened its door
        roster.hear(number, {"epoch": 0, "port": 0, "door": 500 + number, "asks": 0}, 2.0)
    roster.add(7, 1, 0, "10.0.0.9")
    roster.hear(7, {"epoch": NEVER, "port": 0, "door": 0, "asks": 1}, 2.0)
    assert roster.decide(2.0) == [Doors(7, (("10.0.0.1", 500), ("10.0.0.1", 501)))]
    assert roster.decide(2.0) == []  # and the epoch goes on
    roster.end(0, has_finished=False)
    roster.hear(7, {"epoch": NEVER, "port": 0, "door": 0, "asks": 1}, 2.0)
    assert Doors(7, (("10.0.0.1", 501),)) in roster.decide(2.0)


def test_after_a_while_it_is_said_who_does_not_come_to_the_first_epoch() -> None:
    roster = make(3)
    hear(roster, 0, NEVER)
    assert roster.decide(1.0) == []
    hear(roster, 0, NEVER, now=100.0)
    assert roster.decide(100.0) == []  # nobody has called poseidon.init(): the program may not need to
    hear(roster, 0, NEVER, 100, now=100.0)
    hear(roster, 2, NEVER, 102, now=100.0)
    assert roster.decide(100.0) == [Remark("waiting for worker 1 to call poseidon.init()")]
    assert roster.decide(101.0) == []


def test_a_loss_while_others_join_does_not_wait_for_the_end_of_the_step() -> None:
    roster = started(2)
    roster.add(7, 1, 0, "10.0.0.9")
    hear(roster, 7, NEVER, 700)
    roster.decide(2.0)
    roster.end(1, has_finished=False)
    assert roster.decide(2.0) == [EpochOver(0, (0,))]
    assert roster.decide(2.0) == []


def test_nobody_joins_once_one_has_finished() -> None:
    roster = started(2)
    roster.end(1, has_finished=True)
    roster.add(7, 1, 0, "10.0.0.9")
    hear(roster, 7, NEVER, 700)
    assert roster.decide(2.0) == []
    assert not roster.is_done
    roster.end(0, has_finished=True)
    assert roster.is_done


def test_one_that_was_about_to_join_does_not_begin_alone_when_the_last_one_finishes() -> None:
    roster = started(1)
    roster.add(7, 1, 0, "10.0.0.9")
    hear(roster, 7, NEVER, 700)
    assert roster.decide(2.0) == [EpochOver(0, (0,), is_soft=True)]
    roster.end(0, has_finished=True)
    assert roster.decide(2.0) == []
    assert roster.is_done


@pytest.mark.parametrize(
    ("is_stopped", "silent_s", "is_removed"),
    [(True, STOPPED_S + 1, True), (True, STOPPED_S - 1, False), (False, STOPPED_S + 1, False), (False, 40, True)],
)
def test_a_silent_worker_is_removed_sooner_if_it_is_stopped(
    is_stopped: bool, silent_s: float, is_removed: bool
) -> None:
    roster = started(2)
    hear(roster, 1, 0, now=1.0 + silent_s)
    roster.note_stopped([0], [0, 1])
    roster.note_stopped([0] if is_stopped else [], [0, 1])
    found = [each.worker for each in roster.decide(1.0 + silent_s) if isinstance(each, Remove)]
    assert found == ([0] if is_removed else [])
    assert not [each for each in roster.decide(1.0 + silent_s) if isinstance(each, Remove)]


def test_machines_may_be_counted_instead_of_workers() -> None:
    roster = Roster(Bounds(2, 2, counts_machines=True))
    for number in range(4):
        roster.add(number, number // 2, number % 2, "10.0.0.1")
    roster.end(3, has_finished=False)
    assert not roster.is_short
    roster.end(2, has_finished=False)
    assert roster.is_short


class FakeWorker:
    """Behaves as ``job/elastic.py`` does, with messages that take any time and are lost at times."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.epoch = NEVER
        self.is_waiting = True
        self.is_wanted = False
        self.inbox: list[dict[str, Any]] = []
        self.is_alive = True

    def beat(self) -> dict[str, int]:
        return {"epoch": self.epoch, "port": 1000 + self.number if self.is_waiting else 0}

    def hear_next(self) -> None:
        news = self.inbox.pop(0)
        if "over" in news:
            if news["over"] == self.epoch:
                self.is_wanted, self.is_waiting = True, self.is_waiting or not news["is_soft"]
        elif self.is_waiting and news["seat"].epoch > self.epoch:
            self.epoch, self.is_waiting, self.is_wanted = news["seat"].epoch, False, False


@pytest.mark.parametrize("least", [1, 5])
@pytest.mark.parametrize("seed", range(nightly.amount(25, 60)))
def test_whatever_happens_the_living_meet_in_one_epoch(seed: int, least: int) -> None:
    chance = random.Random(seed)
    workers = [FakeWorker(number) for number in range(6)]
    roster = make(6, least)
    told: list[tuple[int, dict[str, int]]] = []
    seats: dict[int, dict[int, Seat]] = {}

    def carry_out(decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, EpochOver):
                for number in decision.workers:
                    workers[number].inbox.append({"over": decision.epoch, "is_soft": decision.is_soft})
            elif isinstance(decision, Seated):
                seats[roster.epoch] = dict(decision.seats)
                assert sorted(seat.rank for seat in decision.seats.values()) == list(range(len(decision.seats)))
                for number, seat in decision.seats.items():
                    workers[number].inbox.append({"seat": seat})

    for turn in range(3000):
        is_calm = turn > 1000
        alive = [worker for worker in workers if worker.is_alive]
        worker = chance.choice(alive)
        action = chance.random()
        if action < 0.4:
            if is_calm or chance.random() > 0.3:  # a heartbeat may be lost
                told.append((worker.number, worker.beat()))
        elif action < 0.7 and worker.inbox:
            worker.hear_next()
        elif action < 0.9 and told:
            number, facts = told.pop(0)
            roster.hear(number, facts, 0.0)
        elif not is_calm and action > 0.995 and len(alive) > 1:
            worker.is_alive = False
            roster.end(worker.number, has_finished=False)
        elif not is_calm and action > 0.985:
            worker.is_waiting = True  # it has noticed something by itself
        elif not is_calm and action > 0.98 and len(workers) < 12:
            workers.append(FakeWorker(len(workers)))
            roster.add(len(workers) - 1, 0, 0, "10.0.0.1", is_late=True)
        elif worker.is_wanted and action > 0.95:
            worker.is_waiting = True  # the step is complete
        carry_out(roster.decide(0.0))
    # In poseidon.init(), or all in Checkpoint.run.
    assert len({number < 6 for number in seats.get(0, {})}) <= 1
    alive = [worker for worker in workers if worker.is_alive]
    if len(alive) < least:
        assert roster.is_short
        return
    assert {worker.epoch for worker in alive} == {roster.epoch}
    assert not any(worker.is_waiting for worker in alive)
    assert set(seats[roster.epoch]) == {worker.number for worker in alive}


def test_silence_limits_are_in_order() -> None:
    assert STOPPED_S < SILENT_S
