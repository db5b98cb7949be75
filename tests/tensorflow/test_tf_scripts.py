"""Plain TensorFlow and Keras scripts (``tests/auto_scripts``), as they are, by ``poseidon run --auto`` and psd_run.

Where the command itself is not what is tested, ranks run the scripts the same way without it. Every process that a
command starts imports TensorFlow for seconds, so in the suite only one does: psd_run's, which calls ``poseidon run``.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from needs_tensorflow import MARKS, PRELOAD, QUIET

import nightly
from auto_runs import SCRIPTS, launch
from poseidon.following.options import AutoOptions
from poseidon.planning.cluster import Cluster, Link
from ranks import run_ranks

pytestmark = MARKS

EXAMPLES = Path(__file__).parents[2] / "examples" / "tensorflow"

LINK = Link(bits_per_s=1e9, latency_s=1e-5)
"""Assumed instead of measured, to save the time."""


def run(words: list[str], folder: Path, **env: str) -> str:
    """Run a command to its end in a folder; return what it writes."""
    unwanted = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "KERAS_BACKEND")
    base = {name: value for name, value in os.environ.items() if name not in unwanted}
    cluster = folder / "links.json"
    Cluster(machines=2, between=LINK, inside=LINK).save(cluster)
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0", "PYTHONHASHSEED": "0"}
    base |= {"OMP_NUM_THREADS": "1", "POSEIDON_CLUSTER": str(cluster), **quiet, **env}
    ended = subprocess.run(
        [sys.executable, *words], cwd=folder, env=base, capture_output=True, text=True, timeout=580, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def run_on_ranks(script: str, folder: Path, options: AutoOptions | None = None, **env: str) -> str:
    """Run a script with ``--auto`` on two ranks that share TensorFlow's import; return what worker 0 writes."""
    given = AutoOptions() if options is None else options
    launch(script, 2, folder, given, env={**QUIET, **env}, preload=["sklearn.datasets", *PRELOAD])
    return "".join((folder / name).read_text() for name in ("out0", "err0"))


def run_psd(folder: Path, command: str, **env: str) -> str:
    cluster = {"worker_nodes": ["127.0.0.1", "127.0.0.1"], "server_nodes": ["127.0.0.1"], "master_node": "127.0.0.1"}
    (folder / "cluster.json").write_text(json.dumps(cluster))
    return run(["-m", "poseidon.launch.psd_run", "-c", "cluster.json", "-o", "logs_of_nodes", command], folder, **env)


def load(path: Path) -> dict[str, Any]:
    with np.load(path) as found:
        return dict(found)


def test_a_script_with_placeholders_comes_out_as_alone(tmp_path: Path) -> None:
    if nightly.IS_NIGHT:
        words = ["-m", "poseidon.cli", "run", "--quiet", "--log-dir", "none", "--nproc", "2", "--auto"]
        said = run([*words, str(SCRIPTS / "tf_digits_feed.py")], tmp_path)
    else:
        said = run_on_ranks("tf_digits_feed.py", tmp_path)
    together = load(tmp_path / "tf_digits_feed.npz")
    assert "of 64 rows this one computes 32" in said
    launch("tf_digits_feed.py", 1, tmp_path / "alone", AutoOptions(), env=QUIET, preload=["sklearn.datasets", *PRELOAD])
    alone = load(tmp_path / "alone" / "tf_digits_feed.npz")
    for name, values in alone.items():
        # 40 steps in float32, with sums in another order.
        np.testing.assert_allclose(together[name], values, rtol=1e-3, atol=1e-3)
    assert (tmp_path / "model.ckpt-40.index").exists()
    assert len(list((tmp_path / "logs").iterdir())) == 1, "one worker writes summaries"


def test_a_monitored_session_with_data_of_its_own(tmp_path: Path) -> None:
    said = run_on_ranks("tf_digits_monitored.py", tmp_path, POSEIDON_SYNC_BATCHNORM="1")
    assert "dealt out, batches of 50 (100 in all)" in said
    assert "batch moments are taken over the rows of all workers" in said
    found = load(tmp_path / "tf_digits_monitored.npz")
    # 60 batches are 30 for each worker; hooks take some of them outside of training.
    assert 25 <= int(found["steps"]) <= 30
    assert float(found["accuracy"]) > 0.3, "a tenth by chance"
    assert len(list((tmp_path / "train").glob("events*"))) == 1, "one worker writes summaries"


def test_a_keras_script_with_callbacks(tmp_path: Path) -> None:
    said = run_on_ranks("keras_digits.py", tmp_path)
    assert "fit's data are dealt out" in said
    assert "12/12" in said, "1,350 samples in batches of 60, two at a time"
    history = json.loads((tmp_path / "history.json").read_text())
    with (tmp_path / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["val_loss"]) for row in rows] == pytest.approx(history["val_loss"])
    assert float(load(tmp_path / "keras_digits.npz")["accuracy"]) > 0.4, "a tenth by chance"
    assert (tmp_path / "digits.keras").exists()


def test_a_keras_script_with_tf_data(tmp_path: Path) -> None:
    said = run_on_ranks("keras_text.py", tmp_path)
    assert "13/13" in said, "25 batches, two at a time"
    assert float(load(tmp_path / "keras_text.npz")["accuracy"]) > 0.6


def test_half_precision_scales_the_rate_once_and_single_steps_keep_averages_alike(tmp_path: Path) -> None:
    said = run_on_ranks("keras_steps.py", tmp_path, AutoOptions(scale_lr=True))
    assert float(load(tmp_path / "keras_steps.npz")["rate"]) == pytest.approx(0.02)
    assert "gradients are averaged when they are applied" not in said, "fit has averaged them"
    # At the end the workers compare all weights, moving averages among them.
    assert "rate 0.020, loss" in said


def test_a_loop_of_tensorflow_2(tmp_path: Path) -> None:
    said = run_on_ranks("tf2_loop.py", tmp_path)
    assert "gradients are averaged when they are applied" in said
    found = load(tmp_path / "tf2_loop.npz")
    assert int(found["batches"]) == 30, "two epochs of 30 batches, two at a time"
    assert float(found["seen"]) == 3000, "two epochs of 1,500 samples, whoever has seen them"
    assert found["restored"]
    assert "worker 0's values are kept" in said, "moving averages"
    written = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert written == ["checkpoint", "ckpt-2.data-00000-of-00001", "ckpt-2.index"]
    assert len(list((tmp_path / "events").iterdir())) == 1, "one worker writes summaries"
    assert float(found["accuracy"]) > 0.4, "a tenth by chance"


@nightly.only
@pytest.mark.parametrize(
    ("script", "backend"),
    [("tf_digits_monitored", "tensorflow"), ("keras_digits", "torch"), ("keras_text", "tensorflow")],
)
def test_the_originals_command_runs_scripts(script: str, backend: str, tmp_path: Path) -> None:
    check_psd(run_psd(tmp_path, f"python {SCRIPTS / script}.py", KERAS_BACKEND=backend), tmp_path)
    assert float(load(tmp_path / f"{script}.npz")["accuracy"]) > (0.6 if script == "keras_text" else 0.3)


def check_psd(said: str, folder: Path) -> None:
    assert "server_nodes: not needed" in said
    logs = sorted(path.name for path in (folder / "logs_of_nodes").glob("worker-*"))
    assert logs == ["worker-0.log", "worker-1.log"]


def test_the_originals_command_takes_a_command_for_each_worker(tmp_path: Path) -> None:
    script = SCRIPTS / "tf_digits_feed.py"
    said = run_psd(tmp_path, f"python {script} --steps 12,python {script} --batch 64 --steps 12")
    check_psd(said, tmp_path)
    assert (tmp_path / "model.ckpt-12.index").exists()


NETWORKS = {"vgg19": "32", "vgg19-22k": "32", "inception3": "75", "resnet152": "32"}
"""Networks of the example, and a size of pictures that each can take."""


PARAMETERS = {
    "vgg19-22k": 229_052_817,
    **nightly.amount({}, {"inception3": 23_834_568, "vgg19": 143_667_240, "resnet152": 60_192_808}),
}
"""As published."""


def count_parameters() -> dict[str, int]:
    """Build networks of the example at full size, without values."""
    import tensorflow.compat.v1 as tf

    sys.path.insert(0, str(EXAMPLES))
    import networks  # type: ignore[import-not-found]

    found = {}
    for name in PARAMETERS:
        build, size, classes = networks.NETWORKS[name]
        with tf.Graph().as_default():
            build(networks.Builder(1.0), tf.placeholder(tf.float32, [None, size, size, 3]), classes)
            found[name] = sum(int(np.prod(variable.shape.as_list())) for variable in tf.trainable_variables())
    return found


def test_large_networks_have_their_published_numbers_of_parameters() -> None:
    (found,) = run_ranks(count_parameters, 1, env=QUIET, timeout_s=550, preload=PRELOAD)
    assert found == PARAMETERS


@pytest.mark.parametrize(
    "name", ["vgg19-22k", *(pytest.param(name, marks=nightly.only) for name in ("inception3", "resnet152"))]
)
def test_a_large_network_made_small_comes_out_as_alone(name: str, tmp_path: Path) -> None:
    small = ("--width", "0.05", "--classes", "30", "--size", NETWORKS[name])
    words = (name, *small, "--batch", "6", "--steps", "3", "--losses", "losses.json")
    found = {}
    for size in (1, 2):
        folder = tmp_path / str(size)
        env = {**QUIET, "POSEIDON_SYNC_BATCHNORM": "1"}
        launch(str(EXAMPLES / "networks.py"), size, folder, AutoOptions(), *words, env=env, preload=PRELOAD)
        found[size] = json.loads((folder / "losses.json").read_text())
    assert found[1]["parameters"] == found[2]["parameters"]
    # In float32, with sums in another order.
    assert found[2]["losses"] == pytest.approx(found[1]["losses"], rel=1e-3)


def test_the_example_trains(tmp_path: Path) -> None:
    words = ("--steps", "3", "--batch", "8")
    launch(str(EXAMPLES / "cifar10.py"), 1, tmp_path, AutoOptions(), *words, env=QUIET, preload=PRELOAD)
    assert "3 steps, test accuracy" in (tmp_path / "out0").read_text()
