"""Elastic jobs: workers come and go, and nothing is lost; ``benchmarks/elastic_rounds.py`` tries more."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_play import Notes, Round, Work, check, train_alone
from nightly import amount, only

CASES = amount([("distribute", 0.0)], [(mode, pace_s) for mode in ("wrapper", "distribute") for pace_s in (0.0, 0.01)])
"""With a pace, workers differ in speed, and share batches by it."""


@pytest.mark.parametrize(("mode", "pace_s"), CASES)
def test_no_step_and_no_sample_is_lost_with_workers(tmp_path: Path, mode: str, pace_s: float) -> None:
    work = Work(workers=3, mode=mode, epochs=3, kinds=("kill", "leave", "during"), pace_s=pace_s)
    expected = train_alone(work, tmp_path / "alone")
    # With these seeds one worker is killed and one leaves, in either order.
    outcome = Round(work, tmp_path / "round", {"wrapper": 1, "distribute": 2}[mode]).play(limit_s=150)
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


@only
@pytest.mark.parametrize("mode", ["wrapper", "distribute"])
def test_one_that_joins_copies_the_state_while_the_others_train(tmp_path: Path, mode: str) -> None:
    work = Work(workers=2, mode=mode, epochs=40, replacements=1, kinds=("kill",))
    expected = train_alone(work, tmp_path / "alone")
    outcome = Round(work, tmp_path / "round", 1).play(limit_s=150)
    assert not outcome.problems + check(tmp_path / "round", work, expected), (tmp_path / "round" / "output").read_text()
    assert outcome.joined == 1
    notes = [path.read_text() for path in (tmp_path / "round").glob("worker-*")]
    (handed,) = {line for text in notes for line in text.split("\n") if line.startswith("handed")}
    assert "ahead_bytes=0" not in handed
