"""Plain scripts (``tests/auto_scripts``) run by several workers, against the same script run as it is."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from auto_runs import launch
from poseidon.following.options import AutoOptions

Plain = Callable[..., Path]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """Return a function that gives the folder in which a script has run alone, once for all tests."""

    @functools.cache
    def folder(script: str, *arguments: str) -> Path:
        place = tmp_path_factory.mktemp("plain")
        launch(script, 1, place, AutoOptions(), *arguments)
        return place

    return folder


def saved(script: str, file: str, tmp_path: Path, size: int = 2, *arguments: str, **options: Any) -> list[Any]:
    """Return what each of ``size`` workers saves in ``file``."""
    chosen = AutoOptions(**{"batch": "total", "files": "shared", "timeout_s": 100.0, **options})
    launch(script, size, tmp_path, chosen, *arguments)
    return [torch.load(tmp_path / str(rank) / file) for rank in range(size)]


def same_on_all(script: str, file: str, tmp_path: Path, size: int = 2, *arguments: str, **options: Any) -> Any:
    """Return what all workers save, after checking that it is the same bits."""
    first, *others = saved(script, file, tmp_path, size, *arguments, **options)
    for other in others:
        assert_close(first, other, 0.0)
    return first


def assert_close(ours: Any, theirs: Any, tolerance: float) -> None:
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert_close(ours[key], theirs[key], tolerance)
    elif isinstance(ours, torch.Tensor):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    else:
        assert ours == theirs


# The same sums in another order, carried through some dozens of steps.
FLOAT = 2e-5


@pytest.mark.parametrize(
    ("script", "file", "tolerance"),
    [
        ("digits_mlp.py", "digits.pt", FLOAT),
        ("accumulation.py", "accumulation.pt", 2e-4),  # Adam divides by small numbers
        ("autoencoder_trainer.py", "autoencoder.pt", 2e-4),
        ("early_stopping.py", "wine.pt", FLOAT),
        ("amp.py", "amp.pt", 2e-2),  # bfloat16 has 8 bits
        ("lbfgs.py", "lbfgs.pt", 1e-9),  # doubles
        ("raw_tensors.py", "factors.pt", 2e-4),
        ("by_hand.py", "by_hand.pt", FLOAT),
        ("shared_layers.py", "shared.pt", FLOAT),
        ("own_memory.py", "memory.pt", FLOAT),
        ("word_pairs.py", "words.pt", 2e-4),
        ("from_scratch.py", "scratch.pt", FLOAT),
        ("sums_and_means.py", "sums.pt", FLOAT),
        ("two_trainings.py", "second.pt", FLOAT),
    ],
)
def test_two_workers_give_what_one_gives(
    script: str, file: str, tolerance: float, plain: Plain, tmp_path: Path
) -> None:
    ours = same_on_all(script, file, tmp_path)
    assert_close(ours, torch.load(plain(script) / file), tolerance)


@pytest.mark.parametrize(
    ("script", "file", "tolerance"),
    [
        ("accumulation.py", "accumulation.pt", 2e-4),
        ("amp.py", "amp.pt", 2e-2),
        ("lbfgs.py", "lbfgs.pt", 1e-9),
        ("by_hand.py", "by_hand.pt", FLOAT),
        ("raw_tensors.py", "factors.pt", 2e-4),
        ("shared_layers.py", "shared.pt", FLOAT),
        ("digits_mlp.py", "digits.pt", FLOAT),
        ("autoencoder_trainer.py", "autoencoder.pt", 2e-4),
        ("early_stopping.py", "wine.pt", FLOAT),
        ("own_memory.py", "memory.pt", FLOAT),
        ("word_pairs.py", "words.pt", 2e-4),
    ],
)
def test_one_exchange_per_step_gives_the_same(
    script: str, file: str, tolerance: float, plain: Plain, tmp_path: Path
) -> None:
    ours = same_on_all(script, file, tmp_path, accumulate=True)
    assert_close(ours, torch.load(plain(script) / file), tolerance)


def test_three_workers_share_uneven_batches(plain: Plain, tmp_path: Path) -> None:
    ours = same_on_all("digits_mlp.py", "digits.pt", tmp_path, 3)
    assert_close(ours, torch.load(plain("digits_mlp.py") / "digits.pt"), FLOAT)


def test_a_batch_per_worker_is_one_of_twice_the_size(plain: Plain, tmp_path: Path) -> None:
    ours = same_on_all("early_stopping.py", "wine.pt", tmp_path, 2, "--batch-size", "12", batch="per-worker")
    assert_close(ours, torch.load(plain("early_stopping.py") / "wine.pt"), FLOAT)


def test_batches_by_length_and_weighted_samples_come_once(plain: Plain, tmp_path: Path) -> None:
    ours = saved("samplers.py", "samplers.pt", tmp_path)
    alone = torch.load(plain("samplers.py") / "samplers.pt")
    assert_close(ours[0]["model"], alone["model"], 2e-4)
    assert_close(ours[0]["model"], ours[1]["model"], 0.0)
    # Each worker saw its own part, and together they saw every sample once.
    together = torch.cat([one["seen"] for one in ours]).sort().values
    assert_close(together, alone["seen"], 0.0)


def test_networks_with_batchnorm_and_dropout_stay_identical_and_learn(plain: Plain, tmp_path: Path) -> None:
    # Statistics of a batch are each worker's own, as under DistributedDataParallel, and so is dropout: no equality with
    # one worker is defined, but the replicas (running averages too) are the same, and the network learns as well.
    ours = same_on_all("cnn_batchnorm.py", "cnn.pt", tmp_path, scale_lr=True)
    alone = torch.load(plain("cnn_batchnorm.py") / "cnn.pt")
    assert ours["lr"] == [pytest.approx(2 * rate) for rate in alone["lr"]]
    assert ours["model"]["bn1.num_batches_tracked"] == alone["model"]["bn1.num_batches_tracked"]
    assert ours["accuracy"] > 0.8
    assert alone["accuracy"] > 0.8


def test_gan_with_two_optimizers_stays_identical(tmp_path: Path) -> None:
    ours = same_on_all("gan.py", "gan.pt", tmp_path, batch="per-worker")
    assert ours["steps"] == 2 * (512 // 32 // 2)
    for net in ("G", "D"):
        assert all(torch.isfinite(value).all() for value in ours[net].values())


def test_large_layers_take_the_short_routes(plain: Plain, tmp_path: Path) -> None:
    ours = same_on_all("text_stream.py", "text.pt", tmp_path)
    assert_close(ours, torch.load(plain("text_stream.py") / "text.pt"), 2e-4)
    assert "Adam: layers travel by allreduce (1), rows (1)" in (tmp_path / "err0").read_text()


def test_files_and_output_are_worker_0s(tmp_path: Path) -> None:
    launch("early_stopping.py", 2, tmp_path, AutoOptions(batch="total"))
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert names == ["err0", "err1", "out0", "out1", "results/best.pt", "results/history.json", "wine.pt"]
    out = (tmp_path / "out0").read_text()
    assert "best validation loss" in out
    assert "['best.pt', 'history.json']" in out
    assert (tmp_path / "out1").read_text() == (tmp_path / "err1").read_text() == ""
    said = (tmp_path / "err0").read_text()
    assert "train_loader: dealt out, 124 samples -> about 62 each, batches of 12 (24 in all)" in said
    assert "val_loader: whole on every worker (not for training), 54 samples" in said
    assert "SGD: Sequential, 547 parameters, taken from worker 0" in said


def test_a_log_file_is_written_once(tmp_path: Path) -> None:
    launch("autoencoder_trainer.py", 2, tmp_path, AutoOptions())
    lines = (tmp_path / "runs" / "train.log").read_text().splitlines()
    assert [line.split(" loss")[0] for line in lines] == ["epoch 0 step 10", "epoch 1 step 20"]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["epoch0.pt", "epoch1.pt", "train.log"]


@pytest.mark.parametrize("evaluation", ["shard", "first"])
def test_shared_evaluation_gives_the_same_metrics(evaluation: str, plain: Plain, tmp_path: Path) -> None:
    ours = same_on_all("early_stopping.py", "wine.pt", tmp_path, evaluation=evaluation)
    assert_close(ours, torch.load(plain("early_stopping.py") / "wine.pt"), FLOAT)
    how = {"shard": "shared between the workers", "first": "computed by worker 0 for all"}[evaluation]
    assert f"Sequential: evaluation {how}" in (tmp_path / "err0").read_text()


@pytest.mark.parametrize(
    ("script", "file", "options"),
    [("lbfgs.py", "lbfgs.pt", {}), ("early_stopping.py", "wine.pt", {"evaluation": "shard"})],
)
def test_what_no_route_carries_is_encrypted_too(
    script: str, file: str, options: dict[str, Any], plain: Plain, tmp_path: Path
) -> None:
    chosen = AutoOptions(batch="total", files="shared", timeout_s=100.0, **options)
    # Any use of gloo would be refused.
    launch(script, 2, tmp_path, chosen, env={"POSEIDON_WIRE_ENCRYPT": "1"})
    assert_close(torch.load(tmp_path / "1" / file), torch.load(plain(script) / file), FLOAT)


def test_layers_unfrozen_later_checkpoints_and_gradients_by_hand(plain: Plain, tmp_path: Path) -> None:
    ours = same_on_all("fine_tuning.py", "tuned.pt", tmp_path)
    assert_close(ours, torch.load(plain("fine_tuning.py") / "tuned.pt"), FLOAT)
    assert "SGD: gradients that did not come from backward() are averaged in step()" in (tmp_path / "err0").read_text()


def test_a_loss_that_is_a_sum(plain: Plain, tmp_path: Path) -> None:
    words = "--reduction", "sum"
    ours = same_on_all("fine_tuning.py", "tuned.pt", tmp_path, 3, *words, loss="sum")
    assert_close(ours, torch.load(plain("fine_tuning.py", *words) / "tuned.pt"), FLOAT)


@pytest.mark.parametrize("size", [2, 3])
def test_a_loader_is_for_training_if_a_backward_follows_its_batches(size: int, plain: Plain, tmp_path: Path) -> None:
    ours = saved("loader_uses.py", "uses.pt", tmp_path, size)
    alone = torch.load(plain("loader_uses.py") / "uses.pt")
    for way, expected in alone.items():
        for one in ours:
            assert_close(one[way]["model"], ours[0][way]["model"], 0.0)
            assert_close(one[way]["model"], expected["model"], FLOAT)
            assert one[way]["steps"] == expected["steps"], way
            # Evaluations and statistics saw everything, on every worker.
            assert_close(one[way]["values"], expected["values"], FLOAT)
        together = Counter(index for one in ours for index in one[way]["seen"].tolist())
        once = Counter(expected["seen"].tolist())
        assert not once - together, way
        # Of 5 samples at the end of an epoch, three workers get 1, 2 and 2, and one alone is doubled.
        doubled = len(expected["seen"]) // 45 if size == 3 and way != "one_step_per_epoch" else 0
        assert (together - once).total() == doubled, way


@pytest.mark.parametrize("batch", ["total", "per-worker"])
def test_batches_collected_before_their_use_are_refused_unless_whole(batch: str, plain: Plain, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"train was read to its end before .* run with --whole train"):
        saved("loader_uses.py", "uses.pt", tmp_path, 2, "collected", batch=batch)
    ours = same_on_all("loader_uses.py", "uses.pt", tmp_path, 2, "collected", batch=batch, whole=("train",))
    assert_close(ours, torch.load(plain("loader_uses.py", "collected") / "uses.pt"), FLOAT)


@pytest.mark.parametrize("size", [2, 3])
def test_processes_that_a_loader_keeps_follow_what_a_stream_is_read_for(
    size: int, plain: Plain, tmp_path: Path
) -> None:
    way = "processes_of_a_stream"
    ours = [one[way] for one in saved("loader_uses.py", "uses.pt", tmp_path, size, way)]
    alone = torch.load(plain("loader_uses.py", way) / "uses.pt")[way]
    for one in ours:
        for key in ("model", "values", "steps"):
            assert_close(one[key], alone[key], FLOAT)
    assert sorted(torch.cat([one["seen"] for one in ours]).tolist()) == sorted(alone["seen"].tolist())


def test_a_stream_that_its_processes_dealt_out_and_nobody_trains_on_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="was dealt out, and no backward followed"):
        saved("loader_uses.py", "uses.pt", tmp_path, 2, "stream_for_reading")


def test_every_worker_reads_everything_it_does_not_train_on(plain: Plain, tmp_path: Path) -> None:
    first, second = saved("loader_uses.py", "uses.pt", tmp_path, 2, batch="per-worker")
    alone = torch.load(plain("loader_uses.py") / "uses.pt")
    for way, one in first.items():
        assert_close(one["model"], second[way]["model"], 0.0)
        assert_close(one["values"], second[way]["values"], FLOAT)
    for way in ("statistics_first", "forgotten_eval_mode"):
        assert_close(first[way]["values"], alone[way]["values"], FLOAT)


def test_decisions_on_the_loss_are_made_alike(plain: Plain, tmp_path: Path) -> None:
    ours = same_on_all("same_loss.py", "same.pt", tmp_path, 3, same_loss=True)
    assert_close(ours, torch.load(plain("same_loss.py") / "same.pt"), FLOAT)


def test_workers_that_read_the_loss_unequally_often_end_with_one_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"worker 0 .* \(number \d+\), worker 1 .*: with --same-loss all workers"):
        saved("same_loss.py", "same.pt", tmp_path, 2, "--at-times", same_loss=True)


def test_a_script_without_a_loader_stops_by_the_mean_loss_too(tmp_path: Path) -> None:
    ours = same_on_all("own_loop.py", "own.pt", tmp_path, 3, batch="per-worker", same_loss=True)
    assert ours["read"][-1] <= 0.01 < ours["read"][-2]


def test_workers_that_stop_by_losses_of_their_own_do_not_wait_for_ever(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"gave up waiting .* for the comparison of replicas"):
        saved("own_loop.py", "own.pt", tmp_path, 2, batch="per-worker", timeout_s=3.0)


def test_replicas_that_differ_at_the_end_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"MismatchError[\s\S]*weight"):
        launch("parted_at_the_end.py", 2, tmp_path, AutoOptions(files="shared", timeout_s=20.0), preload=())


def test_a_script_without_a_loader_is_told_that_nothing_is_shared(plain: Plain, tmp_path: Path) -> None:
    ours = same_on_all("own_batches.py", "text.pt", tmp_path)
    # Not divided, and so what one worker computes, dropout included.
    assert_close(ours, torch.load(plain("own_batches.py") / "text.pt"), FLOAT)
    said = (tmp_path / "err0").read_text()
    assert "nothing is shared, as no DataLoader is read for training: --batch total divides nothing" in said
