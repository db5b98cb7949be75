"""A process that is killed while it saves checkpoints."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

from poseidon.checkpoints.folder import CheckpointFolder, read


def _save_for_ever(folder: Path, writing: int) -> None:
    torch.set_num_threads(1)  # a child has none of OpenMP's threads, and would wait for them
    store = CheckpointFolder(folder, keep=2)
    for step in range(10**6):
        store.write(step, {"step": step, "parts": {"w": torch.full((300_000,), float(step))}})
        os.write(writing, b"x")


def kill_while_saving(folder: Path, pause_s: float) -> None:
    """Let a process save again and again, kill it, and see that what is left is whole and the newest."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # it never comes back
        _save_for_ever(folder, writing)
    os.close(writing)
    with os.fdopen(reading, "rb", buffering=0) as stream:
        assert stream.read(1) == b"x"  # one is complete
        time.sleep(pause_s)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        complete = 1 + len(stream.readall())
    newest, problems = CheckpointFolder(folder, keep=2).newest()
    assert problems == []
    assert newest is not None
    assert newest.step >= complete - 1
    state = read(newest.path.read_bytes(), "it")
    assert state["step"] == newest.step
    assert bool((state["parts"]["w"] == newest.step).all())
