"""Jobs that torchrun starts, and starts again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elastic_play import JOB, TOLERANCE, Notes, Work, send, train_alone
from patience import comes_true

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]


@pytest.mark.parametrize("mode", ["wrapper", "server"])
def test_workers_that_torchrun_starts_again_go_on_from_the_checkpoint(tmp_path: Path, mode: str) -> None:
    work, folder = Work(workers=2, mode=mode, epochs=2), tmp_path / "notes"
    expected = train_alone(work, tmp_path / "alone")
    folder.mkdir()
    words = [str(JOB), *work.arguments(folder), "--save", str(tmp_path / "saved"), "--every", "2"]
    with (tmp_path / "output").open("w") as output:
        job = subprocess.Popen(
            [*TORCHRUN, "--standalone", *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            assert comes_true(lambda: Notes(folder).furthest >= 5 or job.poll() is not None)
            name = min(Notes(folder).pids)
            send(Notes(folder).pids[name], signal.SIGKILL)
            assert job.wait(100) == 0, (tmp_path / "output").read_text()
        finally:
            job.terminate()
            job.wait()
    later = [done for _, done, _ in Notes(folder).entered if done]
    assert len(later) == 2
    assert min(later) >= 4
    assert len(set(Notes(folder).ends.values())) == 1
    for path in folder.glob("final-*.pt"):
        final = torch.load(path)
        assert all(torch.allclose(final[name], value, rtol=0, atol=TOLERANCE) for name, value in expected.items())
