"""Elastic jobs: workers are lost, and nothing of the training is; ``benchmarks/elastic_rounds.py`` tries more."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_play import Notes, Round, Work, check, train_alone
from nightly import amount

MODES = amount(["distribute"], ["wrapper", "distribute"])


@pytest.mark.parametrize("mode", MODES)
def test_no_step_and_no_sample_is_lost_with_workers(tmp_path: Path, mode: str) -> None:
    work = Work(workers=3, mode=mode, epochs=3)
    expected = train_alone(work, tmp_path / "alone")
    # The seeds kill one after the other, and the second while the third recovers.
    outcome = Round(work, tmp_path / "round", {"wrapper": 1, "distribute": 2}[mode]).play(limit_s=150)
    assert outcome.faults
    assert not outcome.problems + check(tmp_path / "round", work, expected), (tmp_path / "round" / "output").read_text()
    assert max(entry[0] for entry in Notes(tmp_path / "round").entered) >= 1
