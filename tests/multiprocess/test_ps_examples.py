"""The example programs for tables, for a few clocks."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples" / "ps"


def run_example(name: str, arguments: list[str]) -> Any:
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [name, *arguments]
    results = importlib.import_module(name).main()
    curves = [result[0] if isinstance(result, tuple) else result for result in results]
    return [(curve.staleness, curve.errors, curve.seen) for curve in curves]


@pytest.mark.parametrize(("name", "gain"), [("matrix_factorisation", 1.6), ("logistic_regression", 2.0)])
def test_examples_learn_at_every_staleness(name: str, gain: float, tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    results = run_ranks(run_example, 2, name, ["--clocks", "40", "--staleness", "0", "3", "--plot", str(picture)])
    for mine in results:
        assert [staleness for staleness, _, _ in mine] == [0, 3]
        for staleness, errors, seen in mine:
            assert errors[0] / errors[-1] > gain
            assert max(seen) <= staleness
    # Errors are averaged over workers through a table: everybody has the same ones.
    assert [curve[1] for curve in results[0]] == [curve[1] for curve in results[1]]
    assert picture.stat().st_size > 5000
