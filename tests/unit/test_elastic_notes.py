"""The check of elastic rounds: which completed steps count when a worker is lost just after it has completed one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastic_play import Work, check

WORK = Work(workers=2, epochs=1, samples=8, batch=4)


def _batches() -> list[list[str]]:
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3)).tolist()
    return [[str(number) for number in order[:4]], [str(number) for number in order[4:]]]


def _write(folder: Path, name: str, *lines: str) -> None:
    (folder / f"worker-{name}").write_text("\n".join([f"pid {len(name)} here", *lines, ""]))


def _play(folder: Path, survivor: list[str], lost: list[str]) -> list[str]:
    """Two workers take the first step; in the second, one is lost; the other takes that step again, alone."""
    (a, b, c, d), (e, f, g, h) = _batches()
    start = [f"enter 0 0 1.0\ntry 0 1 {a} {b}\ndone 0 1\ntry 0 2 {e} {f}"]
    again = [f"enter 1 1 2.0\ntry 1 2 {e} {f} {g} {h}\ndone 1 2\nfinished 1 2\nend aa"]
    _write(folder, "0", *start, *survivor, *again)
    _write(folder, "1", f"enter 0 0 1.0\ntry 0 1 {c} {d}\ndone 0 1\ntry 0 2 {g} {h}", *lost)
    return check(folder, WORK, {})


@pytest.mark.parametrize("lost", [[], ["done 0 2"]], ids=["within the step", "after it"])
def test_a_step_counts_once_if_the_only_one_to_complete_it_before_is_lost(tmp_path: Path, lost: list[str]) -> None:
    assert _play(tmp_path, ["left 0 1.5"], lost) == []


def test_one_that_completes_a_step_and_goes_on_must_not_take_it_again(tmp_path: Path) -> None:
    assert _play(tmp_path, ["done 0 2", "left 0 1.5"], []) == ["step 2 was completed in epochs [0, 1]"]


def test_one_that_completes_a_step_must_not_go_on_without_it(tmp_path: Path) -> None:
    problems = _play(tmp_path, ["left 0 1.5"], ["done 0 2", "left 0 1.5", "enter 1 2 2.0", "finished 1 2", "end aa"])
    assert "step 2 was completed in epochs [0, 1]" in problems
    assert "the workers of epoch 1 began it after different steps: {'0': 1, '1': 2}" in problems
