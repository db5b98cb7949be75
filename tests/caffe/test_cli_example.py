"""The LeNet example, shortened: digits to LMDB, a few passes, and most of them are recognised."""

from __future__ import annotations

import re
import runpy
import shutil
from pathlib import Path

from test_cli_train import poseidon

EXAMPLE = Path(__file__).parents[2] / "examples" / "caffe" / "mnist"


def test_lenet_learns_digits(tmp_path, monkeypatch, capfd):
    for file in EXAMPLE.glob("*.prototxt"):
        shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLE / "make_lmdb.py"))["main"](tmp_path)
    solver = Path("lenet_solver.prototxt")
    text = (
        solver.read_text().replace("max_iter: 600", "max_iter: 80").replace("test_interval: 200", "test_interval: 80")
    )
    solver.write_text(text + "test_initialization: false\n")
    assert poseidon("train", "--solver=lenet_solver.prototxt") == 0
    (accuracy,) = re.findall(r"accuracy = ([\d.]+)", capfd.readouterr().err)
    assert float(accuracy) > 0.85
    weights = "--weights=lenet_iter_80.caffemodel"
    assert poseidon("test", "--model=lenet_train_test.prototxt", weights, "--iterations=10") == 0
    assert f"] accuracy = {accuracy}" in capfd.readouterr().err
