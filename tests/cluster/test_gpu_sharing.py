import os
import sys

import pytest

from poseidon.cli.main import main
from poseidon.lab import gpu

pytestmark = pytest.mark.cluster

SERVICE = """#!/bin/sh
if [ "$1" = -d ]; then
    (sleep 1000 > /dev/null 2>&1 &)
    exit {status}
fi
cat >> {log}
"""


@pytest.fixture
def service(tmp_path, monkeypatch):
    """Put a stand-in for NVIDIA's control program on the path; it notes the commands it is given."""

    def make(status=0):
        program = tmp_path / "bin" / gpu.CONTROL
        program.parent.mkdir()
        program.write_text(SERVICE.format(status=status, log=tmp_path / "log"))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
        return tmp_path / "log"

    return make


def test_without_mps_the_job_is_told_and_goes_on(capfd, monkeypatch):
    monkeypatch.setattr(gpu, "CONTROL", "no-such-control-program")
    program = "import os; print(os.environ['NCCL_HOSTID'][-2:], os.environ.get('CUDA_MPS_PIPE_DIRECTORY'))"
    assert main(["lab", "run", "--machines", "2", "--gpu", "share", "--", sys.executable, "-c", program]) == 0
    seen = capfd.readouterr()
    assert sorted(seen.out.splitlines()) == ["machine0 | -0 None", "machine1 | -1 None"]
    assert "MPS is not running (no-such-control-program is not installed)" in seen.err


def test_mps_runs_for_the_length_of_the_job_and_leaves_nothing(service, capfd):
    log = service()
    program = "import os; print(os.path.isdir(os.environ['CUDA_MPS_PIPE_DIRECTORY']))"
    assert main(["lab", "run", "--machines", "1", "--gpu", "share", "--", sys.executable, "-c", program]) == 0
    assert capfd.readouterr().out == "machine0 | True\n"
    assert log.read_text().splitlines() == ["get_default_active_thread_percentage", "quit"]


def test_a_service_that_fails_to_start_is_done_without(service, capsys):
    service(status=5)
    with gpu.sharing("some-lab") as folder:
        assert folder is None
    assert "ended with status 5" in capsys.readouterr().err
