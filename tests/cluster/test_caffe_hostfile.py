"""``poseidon train --hostfile``: a Caffe net on several machines, with the original Poseidon's flags."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sshd import serving

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


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_host_file_of_the_original_starts_all_machines(nothing_left: None, tmp_path: Path, staleness: int) -> None:
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
        f"--table_staleness={staleness}",
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
