"""How long a job will still take, from what workers tell and print."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from poseidon import data
from poseidon.data import samplers
from poseidon.launch.countdown import Countdown, clock, find_goal
from poseidon.launch.observing import LINE_S, JobObserver
from poseidon.launch.places import Place
from poseidon.observe.records import Record
from poseidon.observe.steps import BETWEEN, STARTING


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("step 12/500 loss 0.3", (12, 500)),
        ("Iteration 7 of 90", (7, 90)),
        ("[batch: 3/8]", (3, 8)),
        ("Epoch 3/10", None),
        ("step 9/8", None),
        ("step 12 loss 0.3", None),
        ("downloaded 12/500", None),
    ],
)
def test_goals_are_found_in_what_people_print(line: str, found: tuple[int, int] | None) -> None:
    assert find_goal(line) == found


def test_the_time_left_follows_the_speed_of_the_last_minutes() -> None:
    countdown = Countdown()
    countdown.note(0, 0.0)
    assert countdown.left_s(0.0) is None
    countdown.aim(1000)
    for second in range(1, 11):
        countdown.note(10 * second, float(second))
    assert countdown.left_s(10.0) == pytest.approx(90.0)
    assert countdown.left_s(15.0) == pytest.approx(85.0)
    assert countdown.left_s(500.0) == 0.0
    for second in range(11, 211):  # twice as slow, for longer than is looked back
        countdown.note(100 + 4 * (second - 10), float(second))
    assert countdown.left_s(210.0) == pytest.approx(25.0)


def test_a_count_that_begins_again_is_a_new_one() -> None:
    countdown = Countdown()
    countdown.aim(100)
    countdown.note(0, 0.0)
    countdown.note(90, 10.0)
    countdown.note(0, 20.0)
    assert countdown.left_s(20.0) is None
    countdown.note(50, 25.0)
    assert countdown.left_s(25.0) == pytest.approx(5.0)


def test_times_are_written_as_on_a_clock() -> None:
    assert [clock(seconds) for seconds in (0, 42.9, 725, 3600 * 12 + 5)] == ["0:00", "0:42", "12:05", "12:00:05"]


def make_observer(workers: int = 2) -> JobObserver:
    observer = JobObserver([Place(rank, rank, 0, 1, f"node{rank}") for rank in range(workers)], "train.py", None)
    observer.begin(0)
    return observer


def test_what_is_told_counts_more_than_what_is_printed() -> None:
    observer = make_observer(1)
    for second in range(10):
        observer.read_line(0, f"step {second}/20", 100.0 + second)
        record = Record(at_s=second, span_s=1.0, steps=1, step=second, doing=BETWEEN, forward_s=1.0)
        observer.read_report(0, {"record": record.pack()}, 100.0 + second)
        observer.look(100.0 + second)
    left = observer.left(109.0)
    assert left is not None
    assert left == (pytest.approx(11.0), "")
    observer.read_report(0, {"steps_left": 30, "left_of": "epoch 3"}, 109.0)
    for second in range(10, 13):
        record = Record(at_s=second, span_s=1.0, steps=1, step=second, doing=BETWEEN, forward_s=1.0)
        observer.read_report(0, {"record": record.pack()}, 100.0 + second)
        observer.look(100.0 + second)
    assert "0:27 left in epoch 3" in observer.status(112.0)[0]
    assert "0:27 left in epoch 3" in observer.progress(112.0)
    assert (observer.state(112.0)["left_s"], observer.state(112.0)["left_of"]) == (27.0, "epoch 3")
    observer.read_report(0, {"steps_left": "many"}, 113.0)


def test_the_start_is_told_phase_by_phase() -> None:
    observer = make_observer(3)

    def said() -> str:
        observer.look(clock_s[0])
        clock_s[0] += 1.0
        return observer.status(clock_s[0])[1]

    clock_s = [100.0]
    assert said() == "starting: the workers load their libraries"
    for rank in (0, 2):
        observer.read_report(rank, {"startup": "waits for the other workers to join"}, 101.0)
    assert said() == "starting: 2 of 3 workers are there, worker 1 on node1 not yet"
    observer.read_report(1, {"startup": "waits for the other workers to join"}, 102.0)
    assert said() == "starting: worker 0 on node0 waits for the other workers to join"
    for rank in range(3):
        record = Record(at_s=1.0, span_s=0.5, doing=STARTING, where="train.py:31 in load" if rank == 1 else "")
        observer.read_report(rank, {"record": record.pack()}, 103.0)
    assert said() == "starting: no step yet; worker 1 on node1 prepares, train.py:31 in load"
    # The observer's own clock began when it was made.
    assert (observer.line(time.monotonic() + 2 * LINE_S) or "").startswith("starting: no step yet")


def test_nothing_is_said_of_a_program_that_only_prints() -> None:
    observer = make_observer()
    observer.read_line(0, "hello", 100.0)
    observer.look(100.0)
    assert observer.status(100.0) == ([], "")
    assert observer.line(time.monotonic() + 2 * LINE_S) is None


def test_a_sampler_tells_what_is_left_of_its_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(samplers, "tell", lambda **facts: told.append(facts))
    sampler = data.ElasticSampler(range(20), batch_size=4)
    loader = torch.utils.data.DataLoader(list(range(20)), batch_sampler=sampler)
    for _ in range(2):
        for _ in sampler.over(loader):
            pass
    assert told == [{"steps_left": 5, "left_of": "epoch 1"}, {"steps_left": 5, "left_of": "epoch 2"}]
