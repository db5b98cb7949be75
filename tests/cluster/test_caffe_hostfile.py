"""``poseidon train --hostfile``: a Caffe net on several machines, with the original Poseidon's flags."""

from __future__ import annotations

import contextlib
import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sshd import serving

from poseidon.caffe.blob import stored_values
from poseidon.caffe.io.database import new_database
from poseidon.caffe.io.datum import image_datum
from poseidon.caffe.schema import NetParameter
from poseidon.caffe.solver import Solver, get_solver
from poseidon.lab import Lab

pytestmark = pytest.mark.cluster

NET = """
name: "small"
layer { name: "data" type: "DummyData" top: "x" top: "y" dummy_data_param {
  shape { dim: 4 dim: 6 } shape { dim: 4 dim: 2 } data_filler { value: 0.5 } data_filler { value: 1 } } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "z" inner_product_param {
  num_output: 2 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "z" bottom: "y" top: "loss" }
"""


def test_a_host_file_of_the_original_starts_all_machines(nothing_left: None, tmp_path: Path) -> None:
    (tmp_path / "net.prototxt").write_text(NET)
    (tmp_path / "solver.prototxt").write_text(
        'net: "net.prototxt" base_lr: 0.1 lr_policy: "fixed" max_iter: 20 display: 10 snapshot_prefix: "small"'
    )
    (tmp_path / "hosts").write_text("0 10.77.0.1 9999\n1 10.77.0.2 9999\n")
    flags = [
        "--solver=solver.prototxt",
        "--hostfile=hosts",
        "--num_clients=2",
        "--svb=true",
        "--table_staleness=2",
    ]
    with Lab(machines=2, rate="1gbit") as lab, serving(lab, tmp_path) as ssh:
        command = [sys.executable, "-m", "poseidon.cli", "train", *flags]
        env = {**os.environ, **ssh.env, "OMP_NUM_THREADS": "1"}
        process = lab.spawn(
            0, command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        text, _ = process.communicate(timeout=100)
        assert process.returncode == 0, text
        assert min(traffic.sent for traffic in lab.traffic()) > 1000
    assert "Worker 0 of 2" in text
    losses = [float(loss) for loss in re.findall(r"Iteration \d+ .*, loss = ([\d.e+-]+)", text)]
    assert len(losses) == 2, "worker 0 alone writes the log"
    assert losses[1] < losses[0]
    assert (tmp_path / "small_iter_20.caffemodel").exists()


LEVELS = """
name: "levels"
layer { name: "data" type: "Data" top: "x" top: "y" include { phase: TRAIN }
  transform_param { scale: 0.01 crop_size: 7 mirror: true }
  data_param { source: "records" backend: LMDB batch_size: %(batch)d } }
layer { name: "data" type: "Data" top: "x" top: "y" include { phase: TEST }
  transform_param { scale: 0.01 crop_size: 7 }
  data_param { source: "records" backend: LMDB batch_size: 24 } }
layer { name: "conv" type: "Convolution" bottom: "x" top: "conv" convolution_param {
  num_output: 6 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "wide" type: "InnerProduct" bottom: "conv" top: "wide" inner_product_param {
  num_output: 200 weight_filler { type: "xavier" } } }
layer { name: "drawn" type: "Sigmoid" bottom: "wide" top: "drawn" }
layer { name: "scores" type: "InnerProduct" bottom: "drawn" top: "scores" inner_product_param {
  num_output: 5 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "scores" bottom: "y" top: "loss" }
"""
LEVELS_SOLVER = (
    'net: "net.prototxt" base_lr: 0.05 momentum: 0.9 weight_decay: 0.001 lr_policy: "step" gamma: 0.5 stepsize: 4 '
    'max_iter: 9 display: 1 random_seed: 7 snapshot: 6 snapshot_prefix: "net" test_iter: 1 test_interval: 3 '
)


def test_two_machines_of_two_workers_train_as_one_worker_with_all_their_batches(tmp_path: Path) -> None:
    """Three levels: inside a worker, inside a machine, between the machines. Random crops are one worker's too."""
    write_records(tmp_path / "records", count=40)
    for name, batch in (("one", 16), ("four", 4)):
        home = tmp_path / name
        home.mkdir()
        (home / "records").symlink_to(tmp_path / "records")
        (home / "net.prototxt").write_text(LEVELS % {"batch": batch})
        (home / "solver.prototxt").write_text(LEVELS_SOLVER)
    (tmp_path / "four" / "hosts").write_text("10.77.0.1 slots=2\n10.77.0.2 slots=2\n")
    with Lab(machines=2, rate="1gbit") as lab, serving(lab, tmp_path) as ssh:
        flags = ["--solver=solver.prototxt", "--hostfile=hosts", "--net_outputs=outputs.csv"]
        command = [sys.executable, "-m", "poseidon.cli", "train", *flags]
        env = {**os.environ, **ssh.env, "OMP_NUM_THREADS": "1"}
        process = lab.spawn(
            0, command, env=env, cwd=tmp_path / "four", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        text, _ = process.communicate(timeout=150)
        assert process.returncode == 0, text
        assert min(traffic.sent for traffic in lab.traffic()) > 1000
    assert "Worker 0 of 4" in text
    alone, outputs = train_here(tmp_path / "one")
    shared = read_outputs(tmp_path / "four" / "outputs.csv")
    assert len(outputs) == 9 + 4
    assert shared.keys() == outputs.keys()
    for key, value in outputs.items():
        assert shared[key] == pytest.approx(value, rel=1e-5), key
    assert_same(tmp_path / "four" / "net_iter_9.caffemodel", alone)
    # What four workers have begun one can finish, with the records that follow.
    (tmp_path / "four" / "net.prototxt").write_text(LEVELS % {"batch": 16})
    resumed, _ = train_here(tmp_path / "four", "net_iter_6.solverstate")
    assert resumed.iter == 9
    assert_same(tmp_path / "four" / "net_iter_9.caffemodel", resumed)


def train_here(home: Path, resume: str | None = None) -> tuple[Solver, dict[tuple[str, int, str], float]]:
    """Train as a single worker, in this process; return the solver and its outputs."""
    outputs: dict[tuple[str, int, str], float] = {}
    with contextlib.chdir(home):
        solver = get_solver("solver.prototxt")
        solver.output_listeners.append(
            lambda which, iteration, found: outputs.update({(which, iteration, one.name): one.value for one in found})
        )
        solver.solve(resume)
    return solver, outputs


def read_outputs(path: Path) -> dict[tuple[str, int, str], float]:
    with path.open() as stream:
        return {
            (row["net"], int(row["iteration"]), row["output"]): float(row["value"]) for row in csv.DictReader(stream)
        }


def assert_same(path: Path, solver: Solver) -> None:
    """Compare the weights in a file with a solver's: equal but for the order of additions."""
    stored = NetParameter.FromString(path.read_bytes())
    found = {layer.name: [stored_values(blob, "data") for blob in layer.blobs] for layer in stored.layer}
    for name, blobs in solver.net.params.items():
        for number, blob in enumerate(blobs):
            expected = blob.data.ravel()
            np.testing.assert_allclose(found[name][number], expected, rtol=1e-4, atol=1e-6, err_msg=f"{name} {number}")


def write_records(path: Path, count: int) -> None:
    random = np.random.default_rng(3)
    with new_database("lmdb", str(path)) as writer:
        for number in range(count):
            image = random.integers(0, 256, (8, 8, 3)).astype(np.uint8)
            writer.put(b"%08d" % number, image_datum(image, int(random.integers(5))).SerializeToString())
