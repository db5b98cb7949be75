"""Elastic jobs: workers come and go, and nothing is lost; ``benchmarks/elastic_rounds.py`` tries more."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest
import torch

from elastic_play import JOB, TOLERANCE, Notes, OneMachine, Round, Work, check, send, train_alone
from nightly import amount, only

MODES = ("wrapper", "distribute", "server")
CASES = amount([("distribute", 0.0), ("server", 0.0)], [(mode, pace_s) for mode in MODES for pace_s in (0.0, 0.01)])
"""With a pace, workers differ in speed, and share batches by it."""


@pytest.mark.parametrize(("mode", "pace_s"), CASES)
def test_no_step_and_no_sample_is_lost_with_workers(tmp_path: Path, mode: str, pace_s: float) -> None:
    work = Work(workers=3, mode=mode, epochs=3, kinds=("kill", "leave", "during"), pace_s=pace_s)
    expected = train_alone(work, tmp_path / "alone")
    # With these seeds one worker is killed and one leaves, in either order.
    outcome = Round(work, tmp_path / "round", {"wrapper": 1, "distribute": 2, "server": 2}[mode]).play(limit_s=150)
    assert outcome.faults
    assert not outcome.problems + check(tmp_path / "round", work, expected), (tmp_path / "round" / "output").read_text()
    assert max(entry[0] for entry in Notes(tmp_path / "round").entered) >= 1


def test_workers_that_take_local_steps_go_on_from_what_they_share(tmp_path: Path) -> None:
    """Each with what is its own; all hold the same bits in the end, and the job has learned what it should."""
    work = Work(workers=3, mode="local", epochs=3, kinds=("kill", "leave", "during"))
    outcome = Round(work, tmp_path / "round", 2).play(limit_s=150)
    assert outcome.faults
    assert not outcome.problems + check(tmp_path / "round", work, {}), (tmp_path / "round" / "output").read_text()
    assert max(entry[0] for entry in Notes(tmp_path / "round").entered) >= 1


@pytest.mark.parametrize("place", amount(["model"], ["init", "model", "checkpoint", "run"]))
def test_one_that_is_killed_before_the_training_does_not_take_the_others_along(tmp_path: Path, place: str) -> None:
    # The first one: it also has the store where the others meet.
    check_without_first(tmp_path, Work(workers=3, mode="distribute", epochs=1, pause_s=0.0, die=f"0:{place}"))


@pytest.mark.parametrize("how", ["waits", "fails"])
def test_one_that_is_still_joining_when_the_first_is_killed_meets_the_others(tmp_path: Path, how: str) -> None:
    check_without_first(tmp_path, Work(workers=3, epochs=1, pause_s=0.0, die="0:model", last=f"1:{how}"))


@pytest.mark.parametrize("least", amount([3], [1, 3]))
def test_one_that_takes_the_place_of_one_killed_before_all_have_met_joins(tmp_path: Path, least: int) -> None:
    check_without_first(
        tmp_path, Work(workers=3, least=least, replacements=1, epochs=1, pause_s=0.0, die="0:init"), trained=3
    )


def check_without_first(tmp_path: Path, work: Work, trained: int = 2) -> None:
    """Check that the others train to the end when the first worker of three is killed before."""
    expected = train_alone(work, tmp_path / "alone")
    folder = tmp_path / "round"
    folder.mkdir()
    with (folder / "output").open("w") as output:
        job = OneMachine().start(work, [str(JOB), *work.arguments(folder)], output)
        try:
            assert job.wait(100) == 0, (folder / "output").read_text()
        finally:
            job.kill()
            job.wait()
    assert not check(folder, work, expected), (folder / "output").read_text()
    # One that joins may come after the end.
    assert len(Notes(folder).ends) in ((trained,) if work.least > 1 else (2, trained))


@only
@pytest.mark.parametrize("is_saved", [False, True])
def test_a_shard_that_is_lost_with_its_replica_comes_from_disk_or_is_named(tmp_path: Path, is_saved: bool) -> None:
    work = Work(workers=3, mode="server", epochs=3)
    expected, folder = train_alone(work, tmp_path / "alone"), tmp_path / "round"
    folder.mkdir()
    words = [str(JOB), *work.arguments(folder), *(["--save", str(tmp_path / "saved"), "--every", "4"] * is_saved)]
    with (folder / "output").open("w") as output:
        job = OneMachine().start(work, words, output)
        try:
            while Notes(folder).furthest < 6 and job.poll() is None:
                time.sleep(0.1)
            # The owner of a shard, and the next one, which has its replica.
            for name, pid in Notes(folder).pids.items():
                if name.split("-")[0] in ("0", "1"):
                    send(pid, signal.SIGKILL)
            status = job.wait(100)
        finally:
            job.kill()
            job.wait()
    said = (folder / "output").read_text()
    if not is_saved:
        assert status == 1
        assert re.search(
            r"shard 0 of 3 of the optimizer's state after step \d+ is lost, with its owner and its replicas", said
        )
        return
    assert status == 0, said
    assert re.search(r"replicas; the job goes on from the checkpoint of step (4|8)", said)
    (path,) = folder.glob("final-*.pt")
    final = torch.load(path)
    assert all(torch.allclose(final[name], value, rtol=0, atol=TOLERANCE) for name, value in expected.items())


@only
@pytest.mark.parametrize("mode", ["wrapper", "distribute", "server"])
def test_one_that_joins_copies_the_state_while_the_others_train(tmp_path: Path, mode: str) -> None:
    work = Work(workers=2, mode=mode, epochs=40, replacements=1, kinds=("kill",))
    expected = train_alone(work, tmp_path / "alone")
    outcome = Round(work, tmp_path / "round", 1).play(limit_s=150)
    assert not outcome.problems + check(tmp_path / "round", work, expected), (tmp_path / "round" / "output").read_text()
    assert outcome.joined == 1
    notes = [path.read_text() for path in (tmp_path / "round").glob("worker-*")]
    (handed,) = {line for text in notes for line in text.split("\n") if line.startswith("handed")}
    assert "ahead_bytes=0" not in handed
