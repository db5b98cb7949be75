"""Jobs with local steps: resumed, elastic, and unmodified scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import poseidon
from auto_runs import launch
from poseidon.errors import ConfigError, UnsupportedError
from poseidon.following.options import AutoOptions
from ranks import RankError, run_ranks


def _model() -> nn.Module:
    torch.manual_seed(1)
    parts = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*parts)


def _same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def _resumable(folder: str, stop: int, options: dict[str, Any]) -> tuple[int, dict[str, Tensor], dict[str, Tensor]]:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    wrapped, optimizer = poseidon.distribute(model, optimizer, consistency="local", **options)
    torch.manual_seed(10 + dist.get_rank())  # dropout and inputs differ between workers
    with poseidon.Checkpoint(folder, every=5, model=wrapped, optimizer=optimizer, scheduler=scheduler) as checkpoint:
        first = checkpoint.resume()
        for step in range(first, stop):
            optimizer.zero_grad()
            wrapped(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            checkpoint.step(step + 1)
    own = {name: value.detach().clone() for name, value in wrapped.module.state_dict().items()}
    shared = {name: value.clone() for name, value in wrapped.shared_state_dict().items()}
    dist.barrier()
    return first, own, shared


RESUMED = [
    {"sync_every": 4, "outer": "nesterov"},
    {"sync_every": 6, "outer": "nesterov", "fragments": 3, "overlap": 2},
    {"sync_every": 3, "warmup_steps": 6},
    {"sync_every": 4, "outer": "nesterov", "compress": "int8"},
    {"sync_every": 4, "forward_sync_buffers": False},
]


@pytest.mark.parametrize("options", RESUMED, ids=["in a round", "under way", "warm-up", "compressed", "own buffers"])
def test_a_resumed_job_goes_on_with_the_same_bits_on_every_worker(tmp_path: Path, options: dict[str, Any]) -> None:
    whole = run_ranks(_resumable, 2, str(tmp_path / "whole"), 11, options)
    run_ranks(_resumable, 2, str(tmp_path / "part"), 7, options)
    again = run_ranks(_resumable, 2, str(tmp_path / "part"), 11, options)
    for rank in range(2):
        assert again[rank][0] == 5
        assert _same(again[rank][1], whole[rank][1]), f"worker {rank}'s own"
        assert _same(again[rank][2], whole[rank][2]), f"the shared ones at worker {rank}"
    assert not _same(whole[0][1], whole[1][1])


def test_other_numbers_of_workers_and_plain_torch_go_on_from_the_shared_parameters(tmp_path: Path) -> None:
    run_ranks(_resumable, 2, str(tmp_path), 5, RESUMED[0])
    saved = torch.load(tmp_path / "step-000000005.pt", weights_only=True)
    model = _model()
    model.load_state_dict(saved["parts"]["model"])
    three = run_ranks(_resumable, 3, str(tmp_path), 5, RESUMED[0])
    assert [begun for begun, _, _ in three] == [5, 5, 5]
    shared = {name: value.clone() for name, value in model.state_dict().items()}
    for _, _, agreed in three:
        assert all(torch.equal(agreed[name], shared[name]) for name in shared if shared[name].is_floating_point())
    assert all(torch.equal(three[2][1][name], value) for name, value in three[2][2].items()), "a new one begins there"
    assert not _same(three[0][1], three[1][1]), "the others go on with what is their own"


def test_checkpoints_refuse_exchanges_by_time(tmp_path: Path) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, optimizer = poseidon.distribute(model, optimizer, consistency="local", sync_every="3s")
    with pytest.raises(UnsupportedError, match='sync_every="3s" with poseidon'):
        poseidon.Checkpoint(tmp_path, model=wrapped, optimizer=optimizer)


def test_elastic_jobs_refuse_what_is_under_way() -> None:
    with pytest.raises(RankError, match="overlap"):
        run_ranks(_in_elastic_job, 1, {"sync_every": 4, "fragments": 2, "overlap": 1})
    with pytest.raises(RankError, match="overlap"):
        run_ranks(_in_elastic_job, 1, {"sync_every": "3s"})


def _in_elastic_job(options: dict[str, Any]) -> None:
    import poseidon.api

    poseidon.api.this_job = lambda: object()
    model = _model()
    poseidon.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), consistency="local", **options)


@pytest.mark.parametrize(("script", "outer"), [("early_stopping.py", "average"), ("amp.py", "nesterov")])
def test_an_unmodified_script_takes_local_steps(tmp_path: Path, script: str, outer: Any) -> None:
    """At its end the workers compare their parameters; one that stops early at another time would end in an error."""
    launch(script, 2, tmp_path / "run", AutoOptions(local=4, outer=outer))
    told = (tmp_path / "run" / "err0").read_text()
    assert "SGD: local steps, exchange every 4 steps, " in told
    assert f"({outer})" in told
    assert "layers travel by" not in told


def test_what_a_dropped_optimizer_has_trained_is_shared_before_it_is_used_and_trained_further(tmp_path: Path) -> None:
    options = AutoOptions(local=5, files="shared", timeout_s=20.0)  # 7 steps are a round and a part of the next one
    launch("dropped_optimizers.py", 2, tmp_path, options, preload=())
    first, second = (torch.load(tmp_path / str(rank) / "result.pt") for rank in range(2))
    assert first["losses"] == second["losses"], "both evaluate the same model, parts of it and a copy"
    assert b"poseidon" not in first["written"], "the file can be read without it"
    for mean, *own in zip(first["model"], first["trained"], second["trained"], strict=True):
        assert not torch.equal(*own)
        torch.testing.assert_close(mean, sum(own) / 2, rtol=0, atol=1e-6)


def test_whichever_optimizer_steps_parameters_they_are_exchanged_and_a_step_inside_another_counts_once(
    tmp_path: Path,
) -> None:
    launch("shared_by_optimizers.py", 2, tmp_path, AutoOptions(local=5, files="shared", timeout_s=20.0), preload=())
    first, second = (torch.load(tmp_path / str(rank) / "result.pt") for rank in range(2))
    assert first["losses"] == second["losses"]
    same = [step for step, (one, other) in enumerate(zip(first["sums"], second["sums"], strict=True)) if one == other]
    assert same == [4, 7 + 4, 14 + 4], "7 steps each, and an evaluation begins a round"


def test_a_script_with_line_searches_cannot_take_them(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="--local: LBFGS evaluates the model several times"):
        launch("lbfgs.py", 2, tmp_path / "run", AutoOptions(local=4))


def test_options_that_exclude_each_other() -> None:
    for options in ({"local": 0}, {"local": 4, "batch": "total"}, {"outer": "nesterov"}, {"local": 4, "outer": "adam"}):
        with pytest.raises(ConfigError, match=r"--local|--outer"):
            AutoOptions(**options)  # type: ignore[arg-type]
