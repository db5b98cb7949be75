"""``--auto --accumulate``: steps of several backwards whose gradients are exchanged once, with the same result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from auto_runs import launch
from poseidon.following.options import AutoOptions

STEPS = 18
"""Of the script that adds up four batches a step, six steps in an epoch, the last one with a single batch."""
BACKWARDS = 63


def _run(kind: str, folder: Path, size: int = 2, accumulates: bool = True) -> list[dict[str, object]]:
    options = AutoOptions(batch="total", files="shared", timeout_s=60.0, accumulate=accumulates)
    launch("several_backwards.py", size, folder, options, kind, preload=())
    return [torch.load(folder / str(rank) / "several.pt") for rank in range(size)]


@pytest.mark.parametrize("kind", ["summed", "scaled", "left out", "rival", "ascent", "projected", "limited", "hidden"])
def test_the_result_is_that_of_one_worker(kind: str, tmp_path: Path) -> None:
    (alone,) = _run(kind, tmp_path / "alone", 1)
    ours = _run(kind, tmp_path / "ours")
    for part in ("model", "other"):
        torch.testing.assert_close(ours[0][part], ours[1][part], rtol=0, atol=0)
        torch.testing.assert_close(ours[0][part], alone[part], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(ours[0]["seen"], alone["seen"], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "options", "exchanges"),
    [
        # Every backward of two steps, then one for each step, the odd ones' when they are needed.
        ("summed", {"accumulate": True}, 8 + STEPS - 2),
        ("left out", {"accumulate": True}, 8 + STEPS - 2),
        ("summed", {}, BACKWARDS),
        ("projected", {"accumulate": True}, 2 * BACKWARDS),
        ("left out", {"local": 3, "batch": "per-worker"}, 0),
    ],
)
def test_as_many_exchanges_as_steps(kind: str, options: dict[str, Any], exchanges: int, tmp_path: Path) -> None:
    script = tmp_path / "counted.py"
    script.write_text(COUNTED.format(script=Path(__file__).parents[1] / "auto_scripts" / "several_backwards.py"))
    chosen = AutoOptions(**{"batch": "total", "files": "shared", "timeout_s": 60.0, **options})
    launch(str(script), 2, tmp_path / "runs", chosen, kind, preload=())
    for rank in range(2):
        assert (tmp_path / "runs" / str(rank) / "count").read_text() == str(exchanges)


COUNTED = """
import runpy
from poseidon.engine.engine import Engine
count, begin = 0, Engine.begin_backward
def begin_backward(self, *args, **kwargs):
    global count
    began = begin(self, *args, **kwargs)
    count += began
    return began
Engine.begin_backward = begin_backward
try:
    script = runpy.run_path("{script}", run_name="__main__")
finally:
    Engine.begin_backward = begin
open("count", "w").write(str(count))
"""


def test_what_was_learned_and_what_would_pay_is_said(tmp_path: Path) -> None:
    for accumulates, said in ((True, "a step has 4 backwards; the last one is exchanged"), (False, "--accumulate")):
        _run("summed", tmp_path / str(accumulates), accumulates=accumulates)
        assert (tmp_path / str(accumulates) / "err0").read_text().count(said) == 1
    _run("projected", tmp_path / "each")
    assert "gradients change between the backwards of a step" in (tmp_path / "each" / "err0").read_text()


@pytest.mark.parametrize(("kind", "when"), [("late", "between two"), ("late limit", "before a step")])
def test_gradients_that_change_later_when_each_worker_has_its_own_end_the_run(
    kind: str, when: str, tmp_path: Path
) -> None:
    with pytest.raises(
        AssertionError, match=f"--accumulate: the script changed gradients, or parameters, of SGD {when}"
    ):
        _run(kind, tmp_path)
