"""A script may end right after its last step, on one worker before the others; nothing that they need is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

import nightly
from run_jobs import run_poseidon

SCRIPT = """
import torch
import poseidon

world = poseidon.init()
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Conv1d(64, 64, 9) for _ in range(8)])
optimizer = torch.optim.SGD(model.parameters(), 0.01)
{wrap}
x = torch.randn(1, 64, 100)
for _ in range(3):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
if world.rank != {silent}:
    print("sum", sum(p.double().sum().item() for p in model.parameters()))
print("done")
"""

PLAIN = 'model = poseidon.DistributedDataParallel(model, routes={"*": "sharded"})'
DEFERRED = 'model, optimizer = poseidon.distribute(model, optimizer, routes={"*": "sharded"})'


@pytest.mark.parametrize(
    ("wrap", "silent"), [(PLAIN, -1), (DEFERRED, 0), pytest.param(DEFERRED, 2, marks=nightly.only)]
)
def test_workers_end_when_they_like(tmp_path: Path, wrap: str, silent: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(wrap=wrap, silent=silent))
    # A narrow wire: the last sums are still queued when the first worker comes to its end.
    ended = run_poseidon("--nproc", "3", script, folder=tmp_path, env={"POSEIDON_WIRE_CAP_MBIT": "60"})
    assert ended.status == 0, ended.err
    assert ended.out.count("done") == 3
    sums = {line.split()[-1] for line in ended.out.splitlines() if " sum " in line}
    assert len(sums) == 1
    assert ended.err.count("Traceback") == 0, ended.err
