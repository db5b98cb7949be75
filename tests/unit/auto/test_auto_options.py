from __future__ import annotations

from typing import Any

import pytest

from poseidon.auto.session import describe
from poseidon.errors import ConfigError
from poseidon.following.options import AutoOptions, ScriptTarget, parse
from poseidon.planning.lossy import LossyChoice


def test_our_options_end_where_the_script_begins() -> None:
    options, target = parse(["--batch", "total", "--scale-lr", "train.py", "--batch", "7", "-m", "x"])
    assert options == AutoOptions(batch="total", scale_lr=True)
    assert target == ScriptTarget("train.py", False, ("--batch", "7", "-m", "x"))


def test_a_module_and_its_arguments() -> None:
    options, target = parse(["--eval", "shard", "--whole", "a, b", "-m", "pack.train", "--lr", "1"])
    assert options == AutoOptions(evaluation="shard", whole=("a", "b"))
    assert target == ScriptTarget("pack.train", True, ("--lr", "1"))


def test_loss_is_asked_for_by_name() -> None:
    options, _ = parse(["--lossy", "lowrank", "--rank", "8", "--warmup-steps", "5", "train.py"])
    assert options.lossy == LossyChoice((("*", "lowrank"),), rank=8, warmup_steps=5)
    assert "gradients are lossy, as asked for (*: lowrank, after 5 exact steps)" in describe(2, options, 1)
    assert "lossy" not in describe(2, AutoOptions(), 1)
    with pytest.raises(ConfigError, match="rank=8 is for lossy='lowrank', which is not asked for"):
        parse(["--rank", "8", "train.py"])
    with pytest.raises(ConfigError, match="leave --warmup-steps out"):
        parse(["--local", "5", "--warmup-steps", "8", "train.py"])


def test_no_script_is_said_so() -> None:
    with pytest.raises(ConfigError, match="no script to run"):
        parse(["--batch", "total"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch": "half"}, "unknown --batch 'half'; known: per-worker, total"),
        ({"evaluation": "none"}, "unknown --eval 'none'; known: first, full, shard"),
        ({"timeout_s": 0.0}, "--timeout is 0;"),
        ({"seed": -1}, "--seed is -1"),
        ({"whole": ("a", "b"), "deal": ("b",)}, "b is in both --whole and --deal"),
        ({"local": 5, "accumulate": True}, "leave --accumulate out"),
    ],
)
def test_values_that_cannot_work(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AutoOptions(**fields)


def test_the_first_line_says_how_the_script_is_run() -> None:
    line = describe(4, AutoOptions(scale_lr=True), 12)
    assert line.startswith("4 workers, seed 12; a batch size counts one worker's samples; learning rates times 4;")
