"""How many Python calls a step makes: small models on fast links pay for little else."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import poseidon
from poseidon.job import tell
from ranks import run_ranks

OURS = str(Path(poseidon.__file__).parent)
WIRE = str(Path(OURS, "wire"))
"""Left out: how often a connection is asked depends on when the other worker writes to it."""
STEPS = 16
"""A whole number of times between two comparisons of replicas."""


def _count(step: Callable[[], None]) -> float:
    """Return the calls of Poseidon's own functions in a step."""
    seen = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal seen
        name = frame.f_code.co_filename
        seen += event == "call" and name.startswith(OURS) and not name.startswith(WIRE)

    sys.setprofile(profile)
    try:
        for _ in range(STEPS):
            step()
    finally:
        sys.setprofile(None)
    return seen / STEPS


def _calls_of(mode: str, layers: int, is_observed: bool) -> float:
    if is_observed:  # as under `poseidon run`, whose agent reads what the worker reports
        pipe = os.pipe()[1]
        os.set_blocking(pipe, False)
        os.environ[tell.VARIABLE] = tell.name_pipe(pipe)
    model: nn.Module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)])
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if mode == "wrapper":
        wrapped = poseidon.DistributedDataParallel(model, routes={"*": "allreduce"}, trials=False)
    else:
        wrapped, optimizer = poseidon.distribute(model, optimizer, routes={"*": "allreduce"}, trials=False)
    x = torch.randn(4, 8)

    def step() -> None:
        optimizer.zero_grad()
        wrapped(x).square().sum().backward()
        optimizer.step()

    for _ in range(STEPS):  # until the plan is made and its times are taken
        step()
    calls = _count(step)
    wrapped.close()
    return calls


def _calls(mode: str, is_observed: bool = False) -> tuple[float, float]:
    few, many = _calls_of(mode, 2, is_observed), _calls_of(mode, 10, is_observed)
    per_parameter = (many - few) / 16
    return per_parameter, few - 4 * per_parameter


@pytest.mark.parametrize(("mode", "most_per_parameter", "most_besides"), [("wrapper", 6, 130), ("distribute", 6, 185)])
def test_a_step_makes_few_calls(mode: str, most_per_parameter: float, most_besides: float) -> None:
    for per_parameter, besides in run_ranks(_calls, 2, mode):
        assert per_parameter <= most_per_parameter
        assert besides <= most_besides


def test_to_be_observed_costs_a_handful_of_calls() -> None:
    for (per_parameter, besides), (plain, plain_besides) in zip(
        run_ranks(_calls, 2, "wrapper", True), run_ranks(_calls, 2, "wrapper"), strict=True
    ):
        assert per_parameter <= plain + 0.5
        assert besides <= plain_besides + 14
