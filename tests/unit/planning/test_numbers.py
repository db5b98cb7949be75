"""Options that are numbers: NumPy's count as Python's own, and truth values as none."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import poseidon
from poseidon.errors import ConfigError
from poseidon.planning.local import LocalSchedule, read_interval
from poseidon.planning.lossy import read_lossy
from poseidon.planning.numbers import count_from, real_number, whole_number
from poseidon.tables.tables import TableSpec


def test_numbers_are_pythons_own_afterwards() -> None:
    assert [whole_number(value) for value in (3, np.int64(3), np.uint8(3))] == [3, 3, 3]
    assert {type(whole_number(value)) for value in (3, np.int64(3))} == {int}
    assert [whole_number(value) for value in (True, np.True_, 3.0, np.float32(3), "3", None)] == [None] * 6
    assert [real_number(value) for value in (1, 0.5, np.float32(0.5), np.int64(1))] == [1.0, 0.5, 0.5, 1.0]
    assert [real_number(value) for value in (True, np.True_, "1", None, float("nan"), np.inf, 10**400)] == [None] * 7
    assert (count_from(2, np.int64(1)), count_from(2, 2)) == (None, 2)


def test_numpys_numbers_give_the_choices_that_pythons_give() -> None:
    ways = {"a": "int8", "b": "topk", "*": "lowrank"}
    plain = read_lossy(ways, rank=4, density=0.25, block_size=64, warmup_steps=5)
    given: Any = (np.int64(4), np.float32(0.25), np.int32(64), np.int64(5))
    assert plain is not None
    assert json.dumps(asdict(read_lossy(ways, *given) or plain)) == json.dumps(asdict(plain))
    every: Any = np.int64(10)
    assert read_interval(every) == (10, 0.0)
    parts: Any = np.int64(2)
    assert LocalSchedule(10, fragments=parts, overlap=parts) == LocalSchedule(10, fragments=2, overlap=2)
    table = TableSpec("t", np.int64(5), np.int64(3), consistency="ssp", staleness=np.int64(2))
    assert table.to_json() == TableSpec("t", 5, 3, consistency="ssp", staleness=2).to_json()


GOOD = [
    {"lossy": "lowrank", "rank": np.int64(2), "warmup_steps": np.int64(1)},
    {"lossy": "topk", "density": np.float32(0.1)},
    {"consistency": "ssp", "staleness": np.int64(2)},
    {"consistency": "local", "sync_every": np.int64(4), "fragments": np.int64(2), "outer": "nesterov"},
    {"consistency": "local", "sync_every": 2, "warmup_steps": np.int64(1), "mix": np.float32(0.5)},
]
BAD = [
    {"lossy": "lowrank", "rank": True},
    {"lossy": "int8", "warmup_steps": True},
    {"lossy": "topk", "density": True},
    {"consistency": "ssp", "staleness": True},
    {"consistency": "local", "sync_every": True},
    {"consistency": "local", "sync_every": 4, "fragments": True},
    {"consistency": "local", "sync_every": 4, "overlap": True},
    {"consistency": "local", "sync_every": 4, "mix": False},
    {"consistency": "local", "sync_every": 4, "warmup_steps": True},
]


def _distribute(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    wrapped, optimizer = poseidon.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    wrapped.close()


@pytest.mark.parametrize("options", GOOD, ids=str)
def test_distribute_takes_numpys_numbers(options: dict[str, Any]) -> None:
    _distribute(options)


@pytest.mark.parametrize("options", BAD, ids=str)
def test_distribute_refuses_truth_values_as_numbers(options: dict[str, Any]) -> None:
    name = next(name for name, value in options.items() if isinstance(value, bool))
    with pytest.raises(ConfigError, match=name):
        _distribute(options)
