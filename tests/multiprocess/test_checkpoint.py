"""Checkpoints of jobs: what resumes is what would have gone on, on as many workers or others, from anybody's disk."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import poseidon
from killed_saves import kill_while_saving
from ranks import run_ranks

MODES = ["wrapper", "distribute", "server"]
STEPS, MIDDLE = 6, 3


def _make(mode: str) -> tuple[Any, Any, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.Dropout(0.3), nn.Linear(24, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    if mode == "plain":
        return model, optimizer, scheduler
    if mode == "wrapper":
        return poseidon.DistributedDataParallel(model), optimizer, scheduler
    update = "server" if mode == "server" else "worker"
    return (*poseidon.distribute(model, optimizer, update=update), scheduler)


def _train(mode: str, folder: str, stop: int, signal_at: int | None = None) -> tuple[int, dict[str, Any], int]:
    """Train up to ``stop`` steps; return where it began, the state, and the exit status."""
    model, optimizer, scheduler = _make(mode)
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(10 + rank)  # dropout and inputs differ between workers
    status = 0
    with poseidon.Checkpoint(folder, every=MIDDLE, model=model, optimizer=optimizer, scheduler=scheduler) as checkpoint:
        first = checkpoint.resume()
        try:
            for step in range(first, stop):
                optimizer.zero_grad()
                model(torch.randn(8, 6)).square().mean().backward()
                optimizer.step()
                scheduler.step()
                if signal_at == step and rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                checkpoint.step(step + 1)
        except SystemExit as ending:
            status = int(ending.code or 0)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if dist.is_initialized():
        # With a server the others may still wait for weights from here, and these ranks end without their exit hooks.
        dist.barrier()
    return first, {name.removeprefix("module."): value for name, value in state.items()}, status


def _same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_job_ends_with_the_same_bits(mode: str, tmp_path: Path) -> None:
    whole = run_ranks(_train, 2, mode, str(tmp_path / "whole"), STEPS)
    part = run_ranks(_train, 2, mode, str(tmp_path / "part"), MIDDLE + 1)
    again = run_ranks(_train, 2, mode, str(tmp_path / "part"), STEPS)
    assert [begun for begun, _, _ in (*whole, *part, *again)] == [0, 0, 0, 0, MIDDLE, MIDDLE]
    assert _same(again[0][1], whole[0][1])
    assert _same(again[1][1], whole[1][1])
    assert not _same(part[0][1], whole[0][1])


def _train_each(mode: str, folder: str, stop: int) -> tuple[int, dict[str, Any], int]:
    return _train(mode, f"{folder}/{dist.get_rank()}", stop)


def test_it_loads_on_any_number_of_workers_and_in_plain_torch(tmp_path: Path) -> None:
    run_ranks(_train, 2, "server", str(tmp_path), MIDDLE)
    three = run_ranks(_train, 3, "server", str(tmp_path), MIDDLE)
    assert {begun for begun, _, _ in three} == {MIDDLE}
    assert _same(three[0][1], three[2][1])
    begun, alone, _ = _train("plain", str(tmp_path), MIDDLE)
    assert begun == MIDDLE
    assert _same(alone, three[0][1])
    model, optimizer, _ = _make("plain")
    stored = torch.load(tmp_path / f"step-{MIDDLE:09d}.pt", weights_only=True)["parts"]
    model.load_state_dict(stored["model"])
    optimizer.load_state_dict(stored["optimizer"])
    assert _same(dict(model.state_dict()), alone)


def test_no_shared_disk_is_needed(tmp_path: Path) -> None:
    run_ranks(_train_each, 2, "wrapper", str(tmp_path), MIDDLE)
    assert not (tmp_path / "1").exists()
    (tmp_path / "0").rename(tmp_path / "1")  # the machine of rank 0 is another one now
    again = run_ranks(_train_each, 2, "wrapper", str(tmp_path), MIDDLE)
    assert [begun for begun, _, _ in again] == [MIDDLE, MIDDLE]
    assert _same(again[0][1], again[1][1])


@pytest.mark.skipif(sys.platform != "linux", reason="signals")
def test_a_signal_to_one_worker_saves_the_job_and_ends_all_of_it(tmp_path: Path) -> None:
    ended = run_ranks(_train, 2, "distribute", str(tmp_path), 100, 1)
    assert [status for _, _, status in ended] == [143, 143]
    (saved,) = [path.name for path in tmp_path.glob("step-*")]
    step = int(saved[5:14])
    assert step in (2, 3)
    again = run_ranks(_train, 2, "distribute", str(tmp_path), step)
    assert [begun for begun, _, _ in again] == [step, step]
    assert _same(again[0][1], ended[0][1])


def test_a_process_killed_while_it_saves_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    chance = random.Random(5)
    for number in range(8):
        kill_while_saving(tmp_path / str(number), chance.random() * 0.05)
