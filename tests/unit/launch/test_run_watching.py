from __future__ import annotations

import pytest

from poseidon.launch.cause import DeathKind
from poseidon.launch.hosts import Host
from poseidon.launch.places import place_workers
from poseidon.launch.progress import Standing, furthest_behind, status_line
from poseidon.launch.watching import SETTLE_S, STACKS_S, SYMPTOM_S, Watching

PLACES = place_workers([Host("ape"), Host("bee", slots=2)])


def watching(hang_timeout_s: float = 0.0) -> Watching:
    return Watching(PLACES, hang_timeout_s, now=0.0)


def test_a_job_is_over_when_all_have_ended() -> None:
    watch = watching()
    for rank in range(3):
        assert not watch.is_over
        watch.exited(rank, 0, now=1.0)
    assert watch.is_over
    assert watch.verdict(now=100.0) is None


def test_a_cause_is_named_once_word_of_earlier_ones_had_time_to_come() -> None:
    watch = watching()
    watch.read_line(1, "ValueError: x", is_error=True, now=0.9)
    watch.exited(1, 1, now=1.0)
    assert watch.verdict(now=1.0 + SETTLE_S / 2) is None
    death = watch.verdict(now=1.1 + SETTLE_S)
    assert death is not None
    assert (death.rank, death.host, death.status, death.tail) == (1, "bee", 1, ("ValueError: x",))


def test_with_symptoms_only_the_machine_that_vanished_is_waited_for() -> None:
    watch = watching()
    watch.exited(0, 75, now=1.0)
    assert watch.verdict(now=1.0 + SYMPTOM_S - 1) is None
    watch.machine_lost(1, "no sign of life", now=9.0)
    death = watch.verdict(now=9.1)
    assert death is not None
    assert (death.rank, death.kind, death.exit_status) == (1, DeathKind.MACHINE, 75)
    assert "no sign of life" in death.how
    assert "lost with its machine" in watch.where_others_stood(1, 9.1)[2]


def test_a_hang_that_the_others_report_needs_no_further_waiting() -> None:
    watch = watching()
    said = "WorkerLostError: nobody is dead, but rank 1 (bee) is alive, at step 3, in forward (waited 60 s)"
    watch.read_line(0, said, is_error=True, now=0.9)
    watch.exited(0, 1, now=1.0)
    death = watch.verdict(now=1.1 + SETTLE_S)
    assert death is not None
    assert (death.rank, death.kind) == (1, DeathKind.HANG)


def test_symptoms_of_all_need_no_further_waiting() -> None:
    watch = watching()
    for rank in range(3):
        watch.exited(rank, 75, now=1.0)
    death = watch.verdict(now=1.0)
    assert death is not None
    assert death.exit_status == 75


def test_a_machine_whose_workers_have_ended_may_go() -> None:
    watch = watching()
    watch.exited(0, 0, now=1.0)
    watch.machine_lost(0, "gone", now=2.0)
    assert watch.verdict(now=50.0) is None


def test_a_machine_is_lost_once_and_its_workers_ends_are_no_news() -> None:
    watch = watching()
    watch.machine_lost(1, "first", now=1.0)
    watch.machine_lost(1, "second", now=2.0)
    watch.exited(1, -9, now=3.0)
    watch.exited(0, 0, now=3.0)
    assert watch.is_over
    death = watch.verdict(now=4.0)
    assert death is not None
    assert death.note == "first"


def test_nothing_moves_for_too_long() -> None:
    watch = watching(hang_timeout_s=10.0)
    watch.read_report(0, {"step": 3, "doing": "at the end of backward"}, now=5.0)
    watch.read_report(1, {"step": 3, "doing": "in forward"}, now=5.0)
    watch.read_report(2, {"step": 3, "doing": "at the end of backward"}, now=5.0)
    watch.read_report(2, {"step": 3, "doing": "at the end of backward"}, now=14.0)
    assert not watch.is_hung(now=14.5)
    waiting = "rank 1 has waited for the others to start backward for 60 s and goes on: rank 0 (a) is alive, at step 2"
    watch.read_line(0, waiting, is_error=True, now=15.0)
    assert watch.is_hung(now=15.5), "being told the same again is no progress, nor that somebody waits"
    watch.note_hang(now=15.5)
    assert not watch.is_hung(now=99.0), "asked only once"
    assert watch.verdict(now=15.6) is None
    watch.read_line(1, "Fatal Python error: Aborted", is_error=True, now=15.7)
    for rank in range(3):
        watch.exited(rank, -6, now=15.8)
    death = watch.verdict(now=15.9)
    assert death is not None
    assert (death.rank, death.kind, death.exit_status) == (1, DeathKind.HANG, 124)
    assert death.tail == ("Fatal Python error: Aborted",)
    assert "at step 3, in forward" in death.how
    assert "at step 3, at the end of backward" in watch.where_others_stood(1, 16.0)[0]


def test_who_waits_for_others_is_not_who_hangs() -> None:
    watch = watching(hang_timeout_s=1.0)
    watch.read_line(1, "now I hang", is_error=False, now=4.0)
    watch.note_hang(now=5.0)
    waits = [
        "Current thread 0x01 (most recent call first):",
        '  File "/x/torch/distributed/rendezvous.py", line 1 in f',
    ]
    busy = ["Current thread 0x01 (most recent call first):", '  File "/x/train.py", line 1 in spin']
    thread = ["Thread 0x02 (most recent call first):", '  File "/x/torch/distributed/y.py", line 1 in run']
    for rank, stack in enumerate((waits, [*thread, *busy], waits)):
        for line in (*stack, '  File "/x/train.py", line 9 in <module>'):
            watch.read_line(rank, line, is_error=True, now=5.1)
        watch.exited(rank, -6, now=5.2)
    death = watch.verdict(now=5.3)
    assert death is not None
    assert death.rank == 1, "though the others have been quiet for longer"


def test_a_hung_worker_that_shows_nothing_is_not_waited_for_long() -> None:
    watch = watching(hang_timeout_s=1.0)
    watch.note_hang(now=5.0)
    assert watch.verdict(now=5.0 + STACKS_S / 2) is None
    assert watch.verdict(now=5.1 + STACKS_S) is not None


def test_without_a_limit_nothing_hangs() -> None:
    assert not watching().is_hung(now=1e9)


@pytest.mark.parametrize(
    ("line", "step", "loss", "rate"),
    [
        ("Epoch 1, step 12: loss 0.345", 12, 0.345, None),
        ("iter=300 train_loss=1.5e-2 1,234.5 images/s", 300, 0.015, 1234.5),
        ("Iteration 100, loss = 2.30", 100, 2.30, None),
        ("Loss: nan", None, float("nan"), None),
        ("[batch 7] 55 samples/sec", 7, None, 55.0),
        ("the stepladder was lossless", None, None, None),
        ("footsteps 9", None, None, None),
    ],
)
def test_progress_is_found_in_what_people_print(
    line: str, step: int | None, loss: float | None, rate: float | None
) -> None:
    standing = Standing()
    standing.read_line(line, now=1.0)
    assert (standing.step, standing.samples_per_s) == (step, rate)
    assert standing.loss == loss or (str(loss) == "nan" and str(standing.loss) == "nan")


@pytest.mark.parametrize("facts", [{"step": "x", "loss": "low"}, {"step": float("nan")}, {"samples_per_s": [1]}])
def test_a_program_that_reports_words_for_numbers_does_not_end_the_launcher(facts: dict[str, object]) -> None:
    standing = Standing(step=3, loss=0.5, samples_per_s=9.0)
    standing.read_report(facts, 1.0)
    assert status_line([standing], 0, 0.0, (), 80) == "0:00 | 1/1 workers | step 3 | 9 samples/s | loss 0.5"


def test_what_the_engine_says_counts_more_than_what_is_printed() -> None:
    standing = Standing()
    standing.read_report({"step": 40, "doing": "in forward"}, now=1.0)
    standing.read_line("step 3 loss 0.5", now=2.0)
    assert (standing.step, standing.loss) == (40, 0.5)


def test_the_status_line_says_what_is_known_and_fits() -> None:
    standings = [Standing(step=12, loss=0.5, samples_per_s=100.0), Standing(step=11, samples_per_s=50.0)]
    line = status_line(standings, 0, 75.0, (), 200)
    assert line == "1:15 | 2/2 workers | step 12 | 150 samples/s | loss 0.5"
    observed = status_line(standings, 0, 75.0, ("9 steps/s", "0:42 left"), 200, is_observed=True)
    assert observed == "1:15 | 2/2 workers | step 12 | loss 0.5 | 9 steps/s | 0:42 left"
    assert len(status_line(standings, 0, 75.0, (), 20)) < 20
    assert status_line([Standing()], 1, 0.0, (), 80) == "0:00 | 0/1 workers"


def test_the_worker_furthest_behind() -> None:
    standings = [
        Standing(step=5, doing="in backward", changed_at=1.0),
        Standing(step=5, doing="in forward", changed_at=2.0),
        Standing(step=6, doing="in forward", changed_at=0.0),
    ]
    assert furthest_behind(standings, [0, 1, 2]) == 1
    assert furthest_behind(standings, [0, 2]) == 0
    silent = [Standing(changed_at=3.0), Standing(changed_at=2.0)]
    assert furthest_behind(silent, [0, 1]) == 1
