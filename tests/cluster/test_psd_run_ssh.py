"""``psd_run`` on machines that are reached over ssh, as the original's JSON names them."""

from __future__ import annotations

import getpass
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sshd import serving

from poseidon.lab import Lab

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def test_each_node_runs_its_command_and_has_a_log(nothing_left: None, tmp_path: Path) -> None:
    (tmp_path / "who.py").write_text("import sys\nprint('here is', sys.argv[1])\n")
    data = {
        "worker_nodes": ["machine1", "machine0"],
        "server_nodes": ["machine0", "machine1"],
        "master_node": "machine0",
        "virtualenv": str(Path(sys.executable).parents[1]),
        "username": getpass.getuser(),
        "pem_file": str(tmp_path / "ssh" / "user_key"),
    }
    (tmp_path / "cluster.json").write_text(json.dumps(data))
    words = ["-c", "cluster.json", "-o", "logs", "python who.py one, python who.py zero"]
    with Lab(machines=2, rate="1gbit") as lab, serving(lab, tmp_path) as ssh:
        env = {**os.environ, **ssh.env, "POSEIDON_AUTO": "--output each", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "poseidon.launch.psd_run", *words]
        job = lab.spawn(0, command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said = job.communicate(timeout=280)[0].decode()
        assert job.returncode == 0, said
    assert "[0 machine0] here is zero" in said
    assert "[1 machine1] here is one" in said
    assert "here is zero" in (tmp_path / "logs" / "worker-0.log").read_text()
    assert "here is one" in (tmp_path / "logs" / "worker-1.log").read_text()
