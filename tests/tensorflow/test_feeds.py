from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from poseidon.auto.frameworks import watch_import
from poseidon.following.patches import Patches
from poseidon.tensorflow.combining import ANY, LARGEST, MEAN, SMALLEST, SUM, chosen, combine, fitting
from poseidon.tensorflow.feeds import Division, plan_division

X, Y = np.zeros((7, 3)), np.zeros(7)
RATE, TABLE = np.array(0.1), np.zeros((5, 2))


@pytest.mark.parametrize(
    ("fed", "size", "shares"),
    [
        ({"x": (None, X), "y": (None, Y)}, 2, (3, 4)),
        ({"x": (None, X), "rate": (None, RATE)}, 3, (2, 2, 3)),
        ({"x": (None, X), "table": (5, TABLE)}, 2, (3, 4)),
        ({"x": (None, X)}, 7, (1,) * 7),
    ],
)
def test_open_rows_are_divided_as_evenly_as_can_be(
    fed: dict[str, tuple[int | None, np.ndarray]], size: int, shares: tuple[int, ...]
) -> None:
    division = plan_division(fed, size)
    assert division == Division(shares)
    covered = [row for rank in range(size) for row in range(7)[division.rows(rank)]]
    assert covered == list(range(7))


@pytest.mark.parametrize(
    ("fed", "size", "reason"),
    [
        ({}, 2, ""),
        ({"rate": (None, RATE)}, 2, ""),
        ({"x": (7, X), "y": (7, Y)}, 2, "x, y must have a fixed length"),
        ({"x": (None, X), "z": (None, TABLE)}, 2, "different lengths (x 7, z 5)"),
        ({"x": (None, X), "y": (7, Y)}, 2, "y has as many rows as the batch"),
        ({"x": (None, X)}, 8, "7 rows are fewer than the workers"),
    ],
)
def test_what_cannot_be_divided_stays_whole_for_a_reason(
    fed: dict[str, tuple[int | None, np.ndarray]], size: int, reason: str
) -> None:
    division = plan_division(fed, size)
    assert division.shares == ()
    assert (reason in division.reason) if reason else division.reason == ""


def test_a_mean_weighs_samples_and_keeps_equal_numbers_as_they_are() -> None:
    assert combine(MEAN, [np.array(1.0), np.array(4.0)], [2, 1]) == 2.0
    assert combine(MEAN, [np.array(0.1)] * 3, [1, 1, 1]) == 0.1


@pytest.mark.parametrize(
    ("function", "way"),
    [
        (lambda rows: rows.sum(0), SUM),
        (lambda rows: np.array(len(rows)), SUM),
        (lambda rows: rows.mean(0), MEAN),
        (lambda rows: 0.1 * (rows.mean(0) - 3.0), MEAN),
        (lambda rows: rows.max(0), LARGEST),
        (lambda rows: rows.min(0), SMALLEST),
        (lambda rows: np.ones_like(rows[0]), MEAN),
        (lambda rows: rows[0], 0),
    ],
)
@pytest.mark.parametrize("shape", [(7, 4), (40, 2)])
def test_two_parts_tell_how_a_whole_is_made_of_them(function: Any, way: int, shape: tuple[int, int]) -> None:
    rows = np.random.default_rng(3).normal(5.0, 3.0, size=shape)
    cut = len(rows) // 3
    ways = fitting(function(rows), (function(rows[:cut]), function(rows[cut:])), (cut, len(rows) - cut))
    assert chosen(ways) == way
    if way:
        parts = [function(part) for part in (rows[:2], rows[2:5], rows[5:])]
        np.testing.assert_allclose(combine(way, parts, [2, 3, len(rows) - 5]), function(rows))


def test_what_a_batch_leaves_alone_tells_nothing_yet() -> None:
    assert fitting(np.zeros(3), (np.zeros(3), np.zeros(3)), (1, 2)) == ANY
    assert fitting(np.array(np.nan), (np.array(1.0), np.array(2.0)), (1, 2)) == ANY
    assert chosen(ANY) == SUM
    assert chosen(fitting(np.array(2.0), (np.array(2.0), np.array(0.0)), (1, 2))) == LARGEST


def test_an_import_is_noticed_once_when_it_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "noticed_module.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    patches, seen = Patches(), []
    watch_import(patches, "noticed_module", lambda: seen.append(sys.modules["noticed_module"].value))
    try:
        import importlib.util

        assert importlib.util.find_spec("noticed_module") is not None
        assert seen == [], "to ask for a module is not to import it"
        importlib.import_module("noticed_module")
        assert seen == [3]
        del sys.modules["noticed_module"]
        importlib.import_module("noticed_module")
        assert seen == [3]
    finally:
        patches.undo()
        sys.modules.pop("noticed_module", None)
    watch_import(patches, "json", lambda: seen.append("at once"))
    assert seen == [3, "at once"]
