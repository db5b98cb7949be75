"""Whatever fails inside a worker loses that worker for the others, at once and with a reason: nobody waits in vain."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import nightly
import poseidon
from poseidon import failpoints
from poseidon.errors import ConfigError, PoseidonError
from ranks import run_ranks
from twins import slow_cluster

TIMEOUT_S = 60.0
"""What a worker would wait without a word from the others..."""
SOON_S = 20.0
"""... and by when it must have heard of a failure, on a busy machine."""
FAULTY = 1


class Outcome(NamedTuple):
    """How a job ended for one rank."""

    error: str
    cause: str
    """What the error came from."""
    after_s: float
    close_s: float


def _break(word: str, mode: str) -> Outcome:
    """Train until something breaks; rank ``FAULTY`` fails in the third step."""
    step, close = _TRAINERS[mode]()
    for _ in range(2):
        step()
    dist.barrier()
    if dist.get_rank() == FAULTY or word.startswith("server"):
        failpoints.arm([word], dist.get_rank())
    began = time.monotonic()
    text, cause = "nothing happened", ""
    try:
        for _ in range(20):
            step()
    except Exception as error:
        text, cause = f"{type(error).__name__}: {error}", repr(error.__cause__)
    after_s = time.monotonic() - began
    began = time.monotonic()
    try:
        close()
    except PoseidonError as error:
        cause += f"; closing: {error}"
    return Outcome(text, cause, after_s, time.monotonic() - began)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))


def _wrapper(route):
    model = poseidon.DistributedDataParallel(_net(), routes={"*": route}, cluster=slow_cluster(), timeout_s=TIMEOUT_S)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step():
        optimizer.zero_grad()
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()

    return step, model.close


def _distributed(**options):
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    model, optimizer = poseidon.distribute(net, optimizer, cluster=slow_cluster(), timeout_s=TIMEOUT_S, **options)

    def step():
        optimizer.zero_grad()
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()

    return step, model.close


def _tables():
    job = poseidon.ps.connect(timeout_s=TIMEOUT_S)
    table = job.table("t", 16, 4)

    def step():
        table.get(range(16))
        table.inc(range(16), np.ones((16, 4)))
        table.clock()

    return step, job.close


_TRAINERS = {
    "wrapper, sharded": lambda: _wrapper("sharded"),
    "wrapper, factors": lambda: _wrapper("factors"),
    "distribute": lambda: _distributed(routes={"*": "sharded"}),
    "server": lambda: _distributed(update="server"),
    "tables": _tables,
}
OWN = ("wire.send=raise", "wire.receive=raise", "wire.place=raise", "wire.handle=raise", "mesh.send=raise")
"""The worker at fault is certain..."""
BETWEEN = ("wire.send=drop", "wire.send=damage", "wire.receive=drop", "mesh.send=damage", "mesh.send=drop")
"""... and here it is one of two, as with a real network."""
EVERYTHING = [
    *((mode, word) for mode in _TRAINERS for word in (*OWN, *BETWEEN) if mode != "tables" or "mesh" not in word),
    ("server", "server.step=raise"),
]
SAMPLE = [
    ("wrapper, sharded", "wire.send=raise"),
    ("wrapper, factors", "wire.handle=raise"),
    ("distribute", "wire.send=damage"),
    ("server", "server.step=raise"),
    ("tables", "wire.receive=drop"),
    ("tables", "wire.place=raise"),
]


@pytest.mark.parametrize(("mode", "word"), nightly.amount(SAMPLE, EVERYTHING))
def test_a_failure_inside_a_worker_ends_the_job_at_once(mode: str, word: str) -> None:
    env = [{"POSEIDON_MACHINE": f"machine{rank}"} for rank in range(3)]
    outcomes = run_ranks(_break, 3, word, mode, env=env)
    # Who steps on a server is the plan's choice.
    faulty = 0 if word.startswith("server") else FAULTY
    for rank, outcome in enumerate(outcomes):
        assert outcome.after_s < SOON_S, outcome
        assert outcome.close_s < SOON_S, outcome
        if rank != faulty:
            assert outcome.error.startswith("WorkerLostError"), outcome
        if mode == "tables":
            if word in OWN:
                assert "worker 1 is lost" in outcome.error or "worker 1 was given up" in outcome.error, outcome
            continue
        if rank != faulty:
            assert "gave up waiting at step" in outcome.error
            unit = ("2 ... 0", "for 0", "for 2", "the others to start backward", "the end of")
            assert any(each in outcome.error for each in unit), outcome
            if word not in BETWEEN:
                assert f"from rank {faulty}" in outcome.error, outcome
    everything = " ".join(f"{outcome.error} {outcome.cause}" for outcome in outcomes)
    if mode == "tables":
        assert ("worker 1 is lost" if word in OWN else " is lost after clock ") in everything
    elif word not in BETWEEN:
        assert f"from rank {faulty}" in everything
    if "damage" in word:
        assert "checksum" in everything
    if "raise" in word and mode != "tables":
        assert "failpoint " in outcomes[faulty].error, outcomes[faulty]


def _refused() -> str:
    with pytest.raises(ConfigError) as caught:
        poseidon.DistributedDataParallel(nn.Linear(2, 2))
    return str(caught.value)


def test_without_consent_failpoints_are_refused() -> None:
    for message in run_ranks(_refused, 2, env={"POSEIDON_FAILPOINTS": "wire.send=raise"}):
        assert "its first word must be 'unsafe', not 'wire.send=raise'" in message
