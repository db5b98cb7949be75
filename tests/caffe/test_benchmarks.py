"""Benchmarks of the Caffe front end that nobody runs every day still run, on a small scale."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_large_database(tmp_path: Path) -> None:
    """It checks every record that it reads."""
    command = [sys.executable, str(BENCHMARKS / "caffe_22k.py"), "--records", "100000", "--batches", "20"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "resume a training" in done.stdout
