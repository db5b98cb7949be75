"""Plain scripts (``tests/auto_scripts``) run by several workers, against the same script run as it is."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from poseidon.launch.auto.options import AutoOptions, Target
from poseidon.launch.auto.session import run
from ranks import run_ranks

SCRIPTS = Path(__file__).parents[1] / "auto_scripts"


def worker(script: str, folder: str, options: AutoOptions, arguments: tuple[str, ...] = ()) -> int:
    """Run a script on this rank, in ``folder``, or in a folder per rank if every worker's files are wanted."""
    rank = os.environ["RANK"]
    place = Path(folder) / rank if options.files == "each" else Path(folder)
    place.mkdir(exist_ok=True)
    os.chdir(place)
    sys.path.insert(0, str(SCRIPTS))
    with (Path(folder) / f"out{rank}").open("w") as out, (Path(folder) / f"err{rank}").open("w") as err:
        sys.stdout, sys.stderr = out, err
        return run(options, Target(str(SCRIPTS / script), False, arguments))


def launch(script: str, size: int, folder: Path, options: AutoOptions, *arguments: str) -> None:
    folder.mkdir(exist_ok=True)
    statuses = run_ranks(worker, size, script, str(folder), options, arguments, env={"MASTER_PORT": "1"})
    problems = "".join((folder / f"err{rank}").read_text() for rank in range(size))
    assert statuses == [0] * size, problems


def both(
    script: str,
    file: str,
    tmp_path: Path,
    size: int = 2,
    arguments: tuple[tuple[str, ...], tuple[str, ...]] = ((), ()),
    check_replicas: bool = True,
    **options: Any,
) -> tuple[list[Any], Any]:
    """Return what each of ``size`` workers and what one plain run saved."""
    tmp_path.mkdir(exist_ok=True)
    chosen = AutoOptions(**{"batch": "total", "files": "each", "timeout_s": 60.0, **options})
    launch(script, size, tmp_path / "auto", chosen, *arguments[0])
    launch(script, 1, tmp_path / "plain", AutoOptions(files="each"), *arguments[1])
    saved = [torch.load(tmp_path / "auto" / str(rank) / file) for rank in range(size)]
    for other in saved[1:] if check_replicas else []:
        assert_close(saved[0], other, 0.0)
    return saved, torch.load(tmp_path / "plain" / "0" / file)


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
        ("text_stream.py", "text.pt", 2e-4),
        ("autoencoder_trainer.py", "autoencoder.pt", 2e-4),
        ("early_stopping.py", "wine.pt", FLOAT),
        ("amp.py", "amp.pt", 2e-2),  # bfloat16 has 8 bits
        ("lbfgs.py", "lbfgs.pt", 1e-9),  # doubles
        ("raw_tensors.py", "factors.pt", 2e-4),
        ("by_hand.py", "by_hand.pt", FLOAT),
    ],
)
def test_two_workers_give_what_one_gives(script: str, file: str, tolerance: float, tmp_path: Path) -> None:
    ours, plain = both(script, file, tmp_path)
    assert_close(ours[0], plain, tolerance)


def test_batches_by_length_and_weighted_samples_come_once(tmp_path: Path) -> None:
    ours, plain = both("samplers.py", "samplers.pt", tmp_path / "r", check_replicas=False)
    assert_close(ours[0]["model"], plain["model"], 2e-4)
    assert_close(ours[0]["model"], ours[1]["model"], 0.0)
    # Each worker saw its own part, and together they saw every sample once.
    together = torch.cat([one["seen"] for one in ours]).sort().values
    torch.testing.assert_close(together, plain["seen"], rtol=0, atol=0)


def test_three_workers_share_an_uneven_end(tmp_path: Path) -> None:
    ours, plain = both("digits_mlp.py", "digits.pt", tmp_path, size=3)
    assert_close(ours[0], plain, FLOAT)


def test_a_batch_per_worker_is_one_of_twice_the_size(tmp_path: Path) -> None:
    arguments = ("--batch-size", "12"), ("--batch-size", "24")
    ours, plain = both("early_stopping.py", "wine.pt", tmp_path, arguments=arguments, batch="per-worker")
    assert_close(ours[0], plain, FLOAT)


def test_networks_with_batchnorm_and_dropout_stay_identical_and_learn(tmp_path: Path) -> None:
    # Statistics of a batch are each worker's own, as under DistributedDataParallel, and so is dropout: no equality with
    # one worker is defined, but the replicas (running averages too) are the same and the network learns as well.
    ours, plain = both("cnn_batchnorm.py", "cnn.pt", tmp_path)
    assert ours[0]["lr"] == plain["lr"]
    assert ours[0]["model"]["bn1.num_batches_tracked"] == plain["model"]["bn1.num_batches_tracked"]
    assert ours[0]["accuracy"] > 0.8
    assert plain["accuracy"] > 0.8


def test_gan_with_two_optimizers_stays_identical(tmp_path: Path) -> None:
    ours, plain = both("gan.py", "gan.pt", tmp_path, batch="per-worker")
    assert ours[0]["steps"] == plain["steps"] // 2
    for net in ("G", "D"):
        assert all(torch.isfinite(value).all() for value in ours[0][net].values())


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
def test_shared_evaluation_gives_the_same_metrics(evaluation: str, tmp_path: Path) -> None:
    ours, plain = both("early_stopping.py", "wine.pt", tmp_path, evaluation=evaluation)
    assert_close(ours[0], plain, FLOAT)
    how = {"shard": "shared between the workers", "first": "computed by worker 0 for all"}[evaluation]
    assert f"Sequential: evaluation {how}" in (tmp_path / "auto" / "err0").read_text()


def test_learning_rates_are_scaled_on_request(tmp_path: Path) -> None:
    ours, plain = both("cnn_batchnorm.py", "cnn.pt", tmp_path, scale_lr=True)
    assert ours[0]["lr"] == [pytest.approx(2 * rate) for rate in plain["lr"]]
