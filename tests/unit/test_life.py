"""Heartbeats and times in, verdicts out; all on virtual time."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from poseidon.job.limits import IDLE_TIMES
from poseidon.team.life import BEAT_S, FLIGHT_S, PHASES, Beat, Life

HOSTS = ("ape", "bee", "cat")
LIMIT_S = 60.0
FORWARD, BACKWARD, END, DONE = PHASES[1:]


class Play:
    """Worker 0's view: the others beat until told otherwise."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.now = 1000.0
        self.life = Life(0, 3, limit_s, self.now)
        self.mine = Beat(5, END)
        self.others = {1: Beat(5, END), 2: Beat(5, END)}
        self.silent: set[int] = set()
        self.ended: set[int] = set()
        self._heard = {1: self.now, 2: self.now}

    def run(self, seconds: float) -> None:
        """Let time pass, beat by beat."""
        for _ in range(round(seconds / BEAT_S)):
            self.now += BEAT_S
            for rank, beat in self.others.items():
                if rank not in self.silent | self.ended:
                    self._heard[rank] = self.now
                self.life.hear(rank, beat, self._heard[rank], rank in self.ended, self.now)

    def works(self, rank: int, seconds: float) -> None:
        """Let time pass in which a worker computes."""
        for work in itertools.islice(itertools.count(int(self.now)), round(seconds / BEAT_S)):
            self.others[rank] = replace(self.others[rank], work=work)
            self.run(BEAT_S)

    def waits(self, rank: int, what: str, number: int = 1) -> None:
        self.others[rank] = replace(self.others[rank], waits_for=what, wait=number)

    def gives_up(self, since: float, peer: int | None = None) -> bool:
        return self.life.is_hopeless(self.mine, peer, since, self.now)

    def verdict(self, peer: int | None = None, is_broken: bool = False) -> str:
        return self.life.verdict(self.mine, peer, is_broken, HOSTS, self.now)


def test_an_evaluation_may_take_for_ever() -> None:
    play = Play()
    play.others[1] = Beat(4, DONE)
    play.waits(2, "the roll call")
    since = play.now
    for _ in range(10):
        play.works(1, 10 * LIMIT_S)
        assert not play.gives_up(since)
        assert play.life.busy(play.now) == [1]


def test_a_worker_that_does_nothing_has_some_more_time() -> None:
    play = Play()
    play.others[1] = Beat(4, DONE)
    play.waits(2, "the roll call")
    since = play.now
    play.run((IDLE_TIMES - 1) * LIMIT_S)
    assert not play.gives_up(since)
    play.run(LIMIT_S + 2)
    assert play.gives_up(since)
    text = play.verdict()
    assert "nobody is dead, but rank 1 (bee) is alive, at step 4, finished backward (waited 60 s" in text
    assert "cat" not in text


@pytest.mark.parametrize("peer", [None, 1])
def test_a_heart_that_stops_is_lost_within_the_limit(peer: int | None) -> None:
    play = Play()
    play.others[1] = Beat(4, DONE)
    since = play.now
    play.silent.add(1)
    play.run(LIMIT_S - 1)
    assert not play.gives_up(since, peer)
    play.run(3)
    assert play.gives_up(since, peer)
    assert play.verdict(peer) == "rank 1 (bee) is dead or cut off; last seen at step 4, finished backward"


def test_silence_before_the_wait_counts() -> None:
    play = Play()
    play.others[1] = Beat(4, DONE)
    play.silent.add(1)
    play.run(LIMIT_S - 5)
    since = play.now
    play.run(7)
    assert play.gives_up(since)


def test_a_heart_that_pauses_for_less_than_the_limit_ends_nothing() -> None:
    play = Play()
    play.others[1] = Beat(4, DONE)
    since = play.now
    for _ in range(5):
        play.silent = {1}
        play.run(LIMIT_S - 2)
        play.silent = set()
        play.works(1, 2)
        assert not play.gives_up(since)


def test_two_that_wait_for_different_things_are_named_with_them_after_the_limit() -> None:
    play = Play()
    play.mine = Beat(5, END, "the roll call", 7)
    play.others[1] = Beat(5, BACKWARD)
    play.waits(1, "new_group() of torch.distributed")
    play.waits(2, "the roll call")
    since = play.now
    play.works(1, LIMIT_S - 1)
    assert not play.gives_up(since)
    play.works(1, 3)
    assert play.gives_up(since), "computing inside an exchange for so long is no sign of life"
    text = play.verdict()
    assert "rank 1 (bee) is alive, at step 5, in backward, waiting for new_group() of torch.distributed" in text


def test_whoever_goes_from_wait_to_wait_is_not_stuck() -> None:
    play = Play()
    since = play.now
    for number in range(10):
        for rank in (1, 2):
            play.waits(rank, "another bucket", number)
        play.run(LIMIT_S / 2)
        assert not play.gives_up(since)
    play.run(LIMIT_S)
    assert play.gives_up(since)


def test_a_worker_that_finished_before_this_step_ends_the_wait_at_once() -> None:
    play = Play()
    play.others[1] = Beat(4, DONE, left="finished")
    since = play.now
    play.run(BEAT_S)
    assert play.gives_up(since)
    assert play.verdict() == "rank 1 (bee) finished at step 4, finished backward"


def test_a_worker_that_finished_this_step_may_go() -> None:
    play = Play()
    play.others[1] = Beat(5, DONE, left="finished")
    play.others[2] = Beat(5, BACKWARD)
    since = play.now
    play.works(2, 10 * LIMIT_S)
    assert not play.gives_up(since)
    assert not play.gives_up(since, peer=2)
    assert play.gives_up(since, peer=1), "but not if its message is what is missing"


def test_a_message_of_one_that_has_ended_may_be_on_its_way() -> None:
    play = Play()
    play.others[1] = Beat(5, DONE, left="finished")
    since = play.now
    play.run(FLIGHT_S - 1)
    assert not play.gives_up(since, peer=1)
    play.run(3)
    assert play.gives_up(since, peer=1)


def test_why_a_worker_failed_is_told_when_it_has_had_time_to_end() -> None:
    play = Play()
    play.others[1] = Beat(4, FORWARD, left="failed", why="ValueError: loss is nan")
    since = play.now
    play.run(BEAT_S)
    assert not play.gives_up(since), "launchers that know no better name the first to end"
    play.run(FLIGHT_S + BEAT_S)
    assert play.gives_up(since)
    assert play.verdict() == "rank 1 (bee) failed at step 4, in forward: ValueError: loss is nan"


def test_one_that_ends_because_of_another_is_not_blamed() -> None:
    play = Play()
    play.others[1] = Beat(5, END, left="failed", why="WorkerLostError: rank 1 (bee) gave up waiting")
    play.silent.add(2)
    play.run(3 * BEAT_S)
    assert play.verdict(peer=1, is_broken=True).startswith("rank 2 (cat) is dead or cut off")
    assert not play.life.has_finished(1)


@pytest.mark.parametrize("peer", [None, 1])
@pytest.mark.parametrize("says_so", [True, False])
def test_who_gave_up_first_is_not_blamed_for_the_one_that_all_waited_for(says_so: bool, peer: int | None) -> None:
    play = Play()
    play.mine = Beat(5, END, "the roll call", 3)
    play.others[2] = Beat(4, DONE)
    play.waits(1, "the roll call")
    play.run(LIMIT_S)
    if says_so:
        play.others[1] = replace(play.others[1], left="failed", why="WorkerLostError: rank 1 (bee) gave up waiting")
    play.ended.add(1)
    play.run(1)
    text = play.verdict(peer, is_broken=peer is not None)
    assert text.startswith("rank 2 (cat) is alive, at step 4, finished backward (waited 60 s")
    assert "bee" not in text


def test_one_that_is_killed_while_it_waits_is_blamed_although_another_one_is_late() -> None:
    play = Play()
    play.others[2] = Beat(4, DONE)
    play.waits(1, "the roll call")
    play.run(LIMIT_S / 2)
    play.ended.add(1)
    play.run(1)
    assert play.verdict(peer=1, is_broken=True).startswith("rank 1 (bee) is dead or cut off")


def test_the_dead_are_blamed_before_those_who_left_and_who_was_further_is_not() -> None:
    play = Play()
    play.others = {1: Beat(6, FORWARD), 2: Beat(5, BACKWARD)}
    play.run(1)
    play.ended = {1, 2}
    play.run(3)
    assert play.verdict() == "rank 2 (cat) is dead or cut off; last seen at step 5, in backward"


def test_a_live_worker_whose_other_connection_broke_is_named_for_that() -> None:
    play = Play()
    play.silent.add(1)
    play.run(3)
    text = play.verdict(peer=2, is_broken=True)
    assert text == "rank 2 (cat) is alive, at step 5, at the end of backward, but its connection with rank 0 broke"


def test_of_several_equally_far_behind_the_one_whose_message_is_missing_is_named() -> None:
    play = Play()
    play.run(1)
    assert "rank 2 (cat)" in play.verdict(peer=2)
    assert "rank 1" not in play.verdict(peer=2)
    assert "rank 1 (bee)" in play.verdict()


def test_a_limit_shorter_than_a_few_beats_does_not_kill_the_living() -> None:
    play = Play(limit_s=0.1)
    play.others[1] = Beat(4, DONE)
    since = play.now
    for _ in range(20):
        play.works(1, BEAT_S)
        assert not play.gives_up(since)


def test_beats_survive_the_wire_and_strange_ones_say_nothing() -> None:
    beat = Beat(3, BACKWARD, "fc6", 4, 5, "failed", "KeyError: 'x'")
    assert Beat.unpack(beat.pack()) == beat
    for junk in (b"", b"{", b"[1]", b'{"color": "red"}', b'{"doing": "sleeping"}'):
        assert Beat.unpack(junk) == Beat()
