"""Checkpoints on a disk: whole or not there, the newest intact one is found, and states are plain data."""

from __future__ import annotations

import os
import random
import resource
import signal
from collections import Counter, OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import poseidon
from poseidon.checkpoints import claiming
from poseidon.checkpoints.ending import EndRequests
from poseidon.checkpoints.folder import CheckpointFolder, find_damage, pieces_of, read
from poseidon.checkpoints.memory import copy_over
from poseidon.checkpoints.states import RandomState, check_readable, host_copy, load_into, state_of
from poseidon.errors import ConfigError


def _state(step: int) -> dict[str, Any]:
    return {"step": step, "values": {}, "workers": [], "parts": {"w": torch.full((1000,), float(step))}}


def _steps(folder: CheckpointFolder) -> list[int]:
    return [one.step for one in folder.saved()]


def test_the_newest_few_stay_and_other_files_are_left_alone(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "deep" / "er", keep=2)
    assert folder.newest() == (None, [])
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "step-notes.pt").write_text("mine")
    for step in (5, 10, 1_000_000_000):
        folder.write(step, _state(step))
    assert _steps(folder) == [10, 1_000_000_000]
    assert sorted(path.name for path in folder.path.iterdir()) == [
        "step-000000010.pt",
        "step-1000000000.pt",
        "step-notes.pt",
    ]
    newest, problems = folder.newest()
    assert newest is not None
    assert (newest.step, problems) == (1_000_000_000, [])
    assert torch.load(newest.path, weights_only=True)["parts"]["w"][0] == 1e9  # plain PyTorch reads it


def test_what_a_process_left_that_was_killed_while_it_wrote_is_removed(tmp_path: Path) -> None:
    left = tmp_path / ".step-000000004.pt.8f3a.tmp"
    left.write_bytes(b"half")
    CheckpointFolder(tmp_path, keep=2).write(5, _state(5))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000005.pt"]


def test_an_old_one_that_cannot_be_removed_does_not_pass_for_a_new_one_that_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.write(5, _state(5))

    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.name == "step-000000005.pt":
            raise PermissionError(13, "Permission denied")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(ConfigError, match=r"cannot remove an older checkpoint \(the new one is written\).*000005"):
        folder.write(6, _state(6))
    assert _steps(folder) == [5, 6]


def test_copies_of_states_keep_what_others_need_and_nobody_elses_memory() -> None:
    shared = {1, 2}
    state = {"milestones": Counter([3, 3]), "best": np.float64(0.5), "seen": shared, "names": OrderedDict(a=1)}
    for copied in (host_copy(state), copy_over(state, None)):
        shared.add(3)
        assert type(copied["milestones"]) is Counter
        assert type(copied["names"]) is OrderedDict
        assert type(copied["best"]) is float
        assert copied["seen"] == {1, 2}
        shared.remove(3)
        check_readable("values", copied)


def test_a_scheduler_with_milestones_goes_on(tmp_path: Path) -> None:
    def make() -> Any:
        optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), 1.0)
        first, then = (
            torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 2),
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [2], 0.1),
        )
        return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [first, then], [3])

    rates: list[list[float]] = []
    for way in ("whole", "in two parts"):
        optimizer, scheduler = make()
        found = []
        for step in range(8):
            if way == "in two parts" and step == 1:
                with poseidon.Checkpoint(tmp_path, optimizer=optimizer, scheduler=scheduler) as checkpoint:
                    checkpoint.save(1)
                optimizer, scheduler = make()
                with poseidon.Checkpoint(tmp_path, optimizer=optimizer, scheduler=scheduler) as checkpoint:
                    assert checkpoint.resume() == 1
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        rates.append(found)
    assert rates[0] == rates[1]


def test_time_to_save_is_said_once() -> None:
    """What all hear of a step ago is saved now, so the worker that says it must not say it again."""
    ending = EndRequests(on_signal=False, is_timed=True)
    sent: list[list[int]] = []

    def start_gather(words: list[int]) -> Any:
        sent.append(words)
        return lambda _: [words, [0, 0]]

    team: Any = SimpleNamespace(start_gather=start_gather)
    # It stays late until the save, which is where it is heard.
    heard = [ending.agree(team, is_late)[1] for is_late in (False, True, True, False, False)]
    assert heard == [False, False, True, False, False]
    assert [words[1] for words in sent] == [0, 1, 0, 0, 0]


@pytest.mark.parametrize("kind", ["cut", "empty", "flipped", "garbage", "folder"])
def test_a_damaged_one_is_named_and_the_one_before_is_used(kind: str, tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=3)
    for step in (1, 2):
        folder.write(step, _state(step))
    path = folder.saved()[-1].path
    content = bytearray(path.read_bytes())
    if kind == "flipped":
        content[content.index(torch.full((2,), 2.0).numpy().tobytes()) + 40] ^= 16
    damaged = {"cut": content[: len(content) // 2], "empty": b"", "garbage": os.urandom(5000)}.get(kind, content)
    if kind == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(damaged)
    newest, problems = folder.newest()
    assert newest is not None
    assert newest.step == 1
    assert len(problems) == 1
    assert str(path) in problems[0]
    assert find_damage(path)


def test_what_is_no_checkpoint_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save([1, 2], path)
    with pytest.raises(ConfigError, match="the file is not a checkpoint"):
        read(path.read_bytes(), "the file")
    with pytest.raises(ConfigError, match="cannot read the file"):
        read(b"nothing", "the file")
    assert list(pieces_of(7, 3)) == [slice(0, 3), slice(3, 6), slice(6, 7)]


def test_a_full_disk_is_told_and_ends_nothing(tmp_path: Path) -> None:
    model = nn.Linear(1000, 1000)
    with poseidon.Checkpoint(tmp_path, every=1, model=model) as checkpoint:
        writer = checkpoint._saving.writer
        assert writer is not None
        checkpoint.step(1)
        writer.finish()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        try:
            checkpoint.step(2)
            with pytest.warns(
                UserWarning, match=r"the checkpoint of step 2 is not written: .*ulimit.*; training goes on"
            ):
                writer.finish()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        checkpoint.step(3)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000000001.pt", "step-000000003.pt"]


def test_a_job_goes_on_with_its_values_and_random_numbers(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    torch.manual_seed(3)
    with poseidon.Checkpoint(tmp_path, every=2, model=model) as checkpoint:
        assert checkpoint.resume() == 0
        checkpoint.values["epoch"] = 7
        checkpoint.step(1)
        checkpoint.step(2)
        drawn = [random.random(), float(np.random.rand()), torch.rand(3)]
        weights = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    with poseidon.Checkpoint(tmp_path, model=model) as checkpoint:
        assert checkpoint.resume() == 2
        assert checkpoint.values == {"epoch": 7}
        assert random.random() == drawn[0]
        assert float(np.random.rand()) == drawn[1]
        assert torch.equal(torch.rand(3), drawn[2])
    assert torch.equal(model.weight, weights)


def test_checkpoints_of_another_job_are_not_overwritten(tmp_path: Path) -> None:
    with poseidon.Checkpoint(tmp_path, every=1, model=nn.Linear(1, 1)) as checkpoint:
        checkpoint.step(41)
    told = r"has 1 checkpoints, the newest of step 41; call resume\(\)"
    with (
        poseidon.Checkpoint(tmp_path, every=1, model=nn.Linear(1, 1)) as checkpoint,
        pytest.raises(ConfigError, match=told),
    ):
        checkpoint.step(1)
    with (
        poseidon.Checkpoint(tmp_path, model=nn.Linear(1, 1), other=nn.Linear(1, 1)) as checkpoint,
        pytest.raises(ConfigError, match="the checkpoint of step 41 has no other; it has model"),
    ):
        checkpoint.resume()
    (tmp_path / "step-000000041.pt").write_bytes(b"")
    with (
        poseidon.Checkpoint(tmp_path, model=nn.Linear(1, 1)) as checkpoint,
        pytest.warns(UserWarning, match="is damaged"),
        pytest.raises(ConfigError, match=r"none in .* is intact"),
    ):
        checkpoint.resume()


def test_two_jobs_do_not_write_to_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claiming, "PATIENCE_S", 0.1)
    mine = poseidon.Checkpoint(tmp_path / "saved", every=1, model=nn.Linear(1, 1))
    mine.step(1)
    assert mine._saving.writer is not None
    mine._saving.writer.finish()
    with poseidon.Checkpoint(tmp_path / "saved", every=1, model=nn.Linear(1, 1)) as again:
        again.resume()
        again.step(2)  # the same process
    monkeypatch.setattr(claiming, "this_owner", lambda: "process 7 on another")
    other = poseidon.Checkpoint(tmp_path / "saved", every=1, model=nn.Linear(1, 1))
    assert other.resume() == 2  # to look at it is allowed
    told = rf"is being written to by another job \(process {os.getpid()} on .*\); end that job, or give each its own"
    with pytest.raises(ConfigError, match=told):
        other.step(3)
    mine.close()
    other.step(3)
    other.close()
    assert _steps(CheckpointFolder(tmp_path / "saved", 3)) == [1, 2, 3]


class Odd:
    """Has a state that cannot be read back."""

    def state_dict(self) -> dict[str, Any]:
        return {"x": Odd()}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


def test_what_cannot_be_read_back_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="scaler is a int without state_dict and load_state_dict"):
        poseidon.Checkpoint(tmp_path, scaler=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="nothing to save"):
        poseidon.Checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="every=0, expected at least 1"):
        poseidon.Checkpoint(tmp_path, every=0, model=nn.Linear(1, 1))
    with (
        poseidon.Checkpoint(tmp_path, every=1, odd=Odd()) as checkpoint,
        pytest.raises(ConfigError, match="the state of odd cannot be saved"),
    ):
        checkpoint.step(1)


def test_states_are_copies_under_the_models_own_names() -> None:
    model = nn.Linear(2, 2)
    wrapped = nn.DataParallel(model)
    copied = host_copy(state_of(wrapped))
    assert set(copied) == {"weight", "bias"}
    with torch.no_grad():
        model.weight.add_(1)
    assert not torch.equal(copied["weight"], model.weight)
    load_into(wrapped, copied)
    assert torch.equal(copied["weight"], model.weight)
    compiled = SimpleNamespace(_orig_mod=model)  # as torch.compile leaves it
    assert set(state_of(compiled)) == {"weight", "bias"}
    load_into(compiled, copied)
    again = RandomState()
    again.load_state_dict(host_copy(again.state_dict()))


def test_a_signal_saves_and_then_ends_the_program(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with poseidon.Checkpoint(tmp_path, model=nn.Linear(1, 1)) as checkpoint:
        checkpoint.step(1)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit) as ending:
            checkpoint.step(2)
    assert ending.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    assert [one.step for one in CheckpointFolder(tmp_path, 3).saved()] == [2]
