"""Elastic jobs: workers are lost, and nothing of the training is; ``benchmarks/elastic_rounds.py`` tries more."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_play import Notes, Round, Work, check, train_alone
from nightly import amount

CASES = amount([("distribute", 0.0)], [(mode, pace_s) for mode in ("wrapper", "distribute") for pace_s in (0.0, 0.01)])
"""With a pace, workers differ in speed, and share batches by it."""


@pytest.mark.parametrize(("mode", "pace_s"), CASES)
def test_no_step_and_no_sample_is_lost_with_workers(tmp_path: Path, mode: str, pace_s: float) -> None:
    work = Work(workers=3, mode=mode, epochs=3, pace_s=pace_s)
    expected = train_alone(work, tmp_path / "alone")
    # The seeds kill one after the other, and the second while the third recovers.
    outcome = Round(work, tmp_path / "round", {"wrapper": 1, "distribute": 2}[mode]).play(limit_s=150)
    assert outcome.faults
    assert not outcome.problems + check(tmp_path / "round", work, expected), (tmp_path / "round" / "output").read_text()
    assert max(entry[0] for entry in Notes(tmp_path / "round").entered) >= 1
