import os
import subprocess
import sys

import pytest

from poseidon.cli.main import main
from poseidon.errors import ConfigError
from poseidon.lab.cluster import Lab
from poseidon.lab.environment import WorkerPlace, places, shared_gpu_environment, worker_environment
from poseidon.lab.job import Job, JobOptions, describe_status, exit_status, resolve_command


def test_ranks_count_machine_by_machine():
    everyone = places(machines=3, workers_per_machine=2)
    assert [place.rank for place in everyone] == list(range(6))
    assert [(place.machine, place.local_rank) for place in everyone[2:4]] == [(1, 0), (1, 1)]
    assert everyone[3].label == "machine1.1"
    assert WorkerPlace(2, 3).label == "machine2"


def test_environment_is_torchruns():
    env = worker_environment(WorkerPlace(1, 3, local_rank=1, workers_per_machine=2), 1234, {"HOME": "/h", "RANK": "77"})
    assert {name: env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")} == {
        "RANK": "3",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
    }
    assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["HOME"]) == ("10.77.0.1", "1234", "/h")
    assert {env[f"{name}_SOCKET_IFNAME"] for name in ("GLOO", "NCCL", "TP")} == {"eth0"}


def test_threads_the_user_chose_stay():
    assert worker_environment(WorkerPlace(0, 1), 1, {})["OMP_NUM_THREADS"] == "1"
    assert worker_environment(WorkerPlace(0, 1), 1, {"OMP_NUM_THREADS": "6"})["OMP_NUM_THREADS"] == "6"


def test_workers_on_one_gpu_look_like_different_hosts_to_nccl():
    envs = [shared_gpu_environment(place, "job", "/mps") for place in places(2, 2)]
    assert len({env["NCCL_HOSTID"] for env in envs}) == 4
    assert all(env["NCCL_SHM_DISABLE"] == env["NCCL_P2P_DISABLE"] == "1" for env in envs)
    assert envs[0]["CUDA_MPS_PIPE_DIRECTORY"] == "/mps"
    assert "CUDA_MPS_PIPE_DIRECTORY" not in shared_gpu_environment(WorkerPlace(0, 1), "job", None)


def test_commands_are_checked_before_anything_starts(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    assert resolve_command([str(script), "--lr", "1"]) == [sys.executable, str(script), "--lr", "1"]
    assert resolve_command([sys.executable, "-c", "pass"]) == [sys.executable, "-c", "pass"]
    assert resolve_command([sys.executable, "-m", "no.such.script"])[1] == "-m"
    with pytest.raises(ConfigError, match="no command given"):
        resolve_command([])
    with pytest.raises(ConfigError, match=r"missing\.py' does not exist"):
        resolve_command([sys.executable, str(tmp_path / "missing.py")])
    with pytest.raises(ConfigError, match="'nosuchprogram' is not found"):
        resolve_command(["nosuchprogram"])


def test_a_job_needs_workers():
    with pytest.raises(ConfigError, match="at least 1 worker, not 0"):
        Job(Lab(2), [sys.executable], JobOptions(workers_per_machine=0))
    with pytest.raises(ConfigError, match="time limit of a job is 0 s"):
        Job(Lab(2), [sys.executable], JobOptions(timeout_s=0.0))


def test_statuses_in_a_shells_words():
    assert (exit_status(3), exit_status(-9), exit_status(0)) == (3, 137, 0)
    assert describe_status(-9) == "was killed by SIGKILL"
    assert describe_status(3) == "ended with status 3"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--rate", "10furlongs", "--", "true"], "10furlongs"),
        (["--machines", "0", "--", "true"], "1 to 250 machines"),
        (["--machines", "3", "--rate", "1gbit,1gbit", "--", "true"], "2 rates"),
        (["--slow", "9:2x", "--", "true"], "no machine 9"),
        (["--lab", "nosuchlab", "--", "true"], "no lab named 'nosuchlab'"),
        (["--lab", "some", "--rate", "1gbit", "--", "true"], "leave out --rate"),
        (["--name", "a/b", "--", "true"], "letters, digits"),
        ([], "no command given"),
        (["--", "nosuchprogram"], "nosuchprogram"),
    ],
)
def test_bad_input_gets_one_line_and_a_status(options, complaint, capsys):
    assert main(["lab", "run", *options]) == 1
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


class BareLab:
    """Machines that are none."""

    machines = 2

    def traffic(self):
        return ()

    def spawn(self, machine, command, env, **pipes):
        return subprocess.Popen(command, env=env, **pipes)


def test_output_that_cannot_be_shown_ends_the_job_with_that_error():
    shown = []

    def show(place, line):
        shown.append(line)
        raise ConfigError("the disk is full")

    program = "import time; print('done', flush=True); print('more', flush=True); time.sleep(60)"
    job = Job(BareLab(), [sys.executable, "-c", program], env=dict(os.environ), show=show)
    with pytest.raises(ConfigError, match="the disk is full"):
        job.run()
    assert shown == ["done"]
