"""``poseidon run`` on this machine: training, output, every kind of death, clean stops, restarts."""

from __future__ import annotations

import contextlib
import os
import pty
import random
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from run_jobs import PROGRAM, Started, check, run_poseidon

TWO = ("--nproc", "2")


def test_two_workers_train_and_stay_alike(tmp_path: Path) -> None:
    ended = run_poseidon(*TWO, PROGRAM, "--steps", "4", "--notes", tmp_path, folder=tmp_path)
    assert ended.status == 0, ended.err
    assert ended.out.count("trained 4 steps") == 2
    weights = [(tmp_path / f"weights-{rank}").read_text() for rank in range(2)]
    assert weights[0] == weights[1]
    assert not ended.left


def test_workers_meet_at_one_address_only(tmp_path: Path) -> None:
    (tmp_path / "where.py").write_text(
        "import os, pathlib, poseidon\n"
        "poseidon.init()\n"
        "port = f\":{int(os.environ['MASTER_PORT']):04X}\"\n"
        "rows = [row.split() for name in ('tcp', 'tcp6') for row in pathlib.Path(f'/proc/net/{name}').open()]\n"
        "print('listens', [row[1] for row in rows if row[3] == '0A' and row[1].endswith(port)])\n"
    )
    ended = run_poseidon(*TWO, "where.py", folder=tmp_path)
    places = {line.split("listens")[1].split(":")[0] for line in ended.out.splitlines()}
    assert places == {" ['0100007F"}, ended.err


@pytest.mark.parametrize("when", ["start", "middle", "end"])
@pytest.mark.parametrize("fault", ["exit", "raise", "kill", "segv", "orphan", "stop"])
def test_every_kind_of_death_is_named_and_leaves_nothing(fault: str, when: str, tmp_path: Path) -> None:
    words = ("--pretend", "--fault", fault, "--rank", "1", "--when", when)
    patience = ("--hang-timeout", "1.5") if fault == "stop" else ()
    ended = run_poseidon(*TWO, *patience, PROGRAM, *words, folder=tmp_path)
    assert not check(ended, fault, 1, "localhost"), ended.err
    assert ended.seconds < 15


def test_a_worker_that_dies_in_a_real_step_is_told_from_those_it_takes_along(tmp_path: Path) -> None:
    ended = run_poseidon("--nproc", "3", PROGRAM, "--fault", "raise", "--rank", "1", folder=tmp_path)
    assert not check(ended, "raise", 1, "localhost"), ended.err
    assert "worker 0 on localhost" in ended.err
    assert "at step 2" in ended.err, "where the others stood"


def test_a_worker_that_hangs_in_a_real_step_is_named_by_those_who_wait_for_it(tmp_path: Path) -> None:
    words = ("--fault", "hang", "--rank", "1", "--timeout", "3")
    ended = run_poseidon(*TWO, PROGRAM, *words, folder=tmp_path)
    assert "worker 1 on localhost failed first: it hangs: the others gave up waiting for it" in ended.err
    assert ended.status == 124
    assert not ended.left


def test_where_a_hung_worker_stood_is_shown(tmp_path: Path) -> None:
    words = ("--pretend", "--fault", "hang", "--rank", "1")
    ended = run_poseidon(*TWO, "--hang-timeout", "1.5", PROGRAM, *words, folder=tmp_path)
    assert ended.status == 124
    assert "in wait_for_ever" in ended.err


def test_output_is_marked_and_logged(tmp_path: Path) -> None:
    ended = run_poseidon(*TWO, "--log-dir", "logs", PROGRAM, "--pretend", "--steps", "2", folder=tmp_path)
    lines = ended.out.splitlines()
    for rank in range(2):
        expected = ["step 0 loss 1.000", "step 1 loss 0.500"]
        assert [line[4:] for line in lines if line.startswith(f"[{rank}] ")] == expected
        assert (tmp_path / "logs" / f"worker-{rank}.log").read_text().splitlines() == expected
    assert "\x1b" not in ended.out + ended.err


def test_on_a_terminal_there_are_colours_and_a_live_line(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(
        "import time\n"
        "for step in range(8):\n"
        "    print(f'step {step} loss 0.5 10 samples/s', flush=True)\n"
        "    time.sleep(0.1)\n"
    )
    ours, theirs = pty.openpty()
    words = ["run", "--quiet", "--nproc", "2", "--log-dir", "none", "steps.py"]
    command = [sys.executable, "-m", "poseidon.cli", *words]
    env = {**os.environ, "TERM": "xterm"}
    env.pop("NO_COLOR", None)
    job = subprocess.Popen(command, cwd=tmp_path, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # a terminal without anybody on it
        while piece := os.read(ours, 1 << 16):
            shown += piece
    os.close(ours)
    assert job.wait(timeout=30) == 0
    text = shown.decode()
    assert "\x1b[36m[0]\x1b[0m step 3 loss 0.5" in text
    assert re.search(r"\x1b\[2K0:0\d \| 2/2 workers \| step \d \| 20 samples/s \| loss 0.5", text)


def test_a_reader_that_has_seen_enough_does_not_end_the_job(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(
        "import pathlib, sys\nfor n in range(20000): print('line', n)\npathlib.Path('done').touch()\n"
    )
    command = f"{sys.executable} -m poseidon.cli run --quiet --nproc 1 --log-dir none talk.py | head -1"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[0] line 0\n"
    assert done.stderr == ""
    assert (tmp_path / "done").exists()


def test_settings_are_shown_with_their_origin_and_no_secret(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text("import os; print('secret', os.environ['POSEIDON_SECRET'], os.environ['WANTED'])")
    words = ["--nproc", "1", "--restarts", "2", "--env", "WANTED=here", script]
    ended = Started(words, tmp_path, {"POSEIDON_RUN_GRACE": "4"}).end()
    assert "1 worker: " in ended.err
    for line in ("localhost:1", "(argument --nproc)", "(argument --restarts)", "(environment POSEIDON_RUN_GRACE)"):
        assert line in ended.err
    _, secret, wanted = ended.out.split()[1:]
    assert wanted == "here"
    assert len(secret) == 64
    assert secret not in ended.err


def test_one_interrupt_lets_workers_end_in_order(tmp_path: Path) -> None:
    script = tmp_path / "careful.py"
    script.write_text(
        "import time\n"
        "try:\n"
        "    print('at work', flush=True)\n"
        "    time.sleep(1000)\n"
        "except KeyboardInterrupt:\n"
        "    print('saved', flush=True)\n"
    )
    job = Started([*TWO, "--log-dir", "none", script], tmp_path)
    job.wait_for("at work", times=2)
    job.process.send_signal(signal.SIGINT)
    ended = job.end()
    assert ended.status == 130
    assert ended.out.count("saved") == 2
    assert "stopping" in ended.err
    assert not ended.left


STUBBORN = (
    "import signal, time\nsignal.signal({}, lambda *_: None)\nprint('at work', flush=True)\nwhile 1: time.sleep(9)\n"
)


def test_a_second_interrupt_ends_everything_at_once(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(STUBBORN.format("signal.SIGINT"))
    job = Started([*TWO, "--log-dir", "none", "--grace", "1000", "s.py"], tmp_path)
    job.wait_for("at work", times=2)
    job.process.send_signal(signal.SIGINT)
    job.wait_for("stopping")
    job.process.send_signal(signal.SIGINT)
    ended = job.end(limit_s=15)
    assert ended.status == 130
    assert not ended.left


def test_workers_that_do_not_end_in_time_are_ended(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(STUBBORN.format("signal.SIGINT") + "")
    job = Started([*TWO, "--log-dir", "none", "--grace", "0.5", "s.py"], tmp_path)
    job.wait_for("at work", times=2)
    job.process.send_signal(signal.SIGTERM)
    ended = job.end(limit_s=15)
    assert ended.status == 143
    assert not ended.left


def test_the_hook_saves_at_the_same_step_everywhere(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(
        "import time, torch, torch.distributed as dist, poseidon\n"
        "from poseidon.launch.stopping import Stopping\n"
        "poseidon.init()\n"
        "with Stopping() as stop:\n"
        "    for step in range(100000):\n"
        "        if step == 3: print('at work', flush=True)\n"
        "        if stop.agreed(): print('saved at', step, flush=True); break\n"
        "        time.sleep(0.001)\n"
        "dist.barrier()\n"
    )
    job = Started([*TWO, "--log-dir", "none", "loop.py"], tmp_path)
    job.wait_for("at work", times=2)
    job.process.send_signal(signal.SIGINT)
    ended = job.end()
    steps = [line.split("saved at")[1] for line in ended.out.splitlines() if "saved at" in line]
    assert len(steps) == 2, ended.err
    assert len(set(steps)) == 1
    assert ended.status == 130


@pytest.mark.parametrize("victim", ["poseidon.cli", "poseidon.launch.agent"])
def test_no_worker_outlives_a_launcher_or_agent_that_is_killed(victim: str, tmp_path: Path) -> None:
    job = Started([*TWO, "--log-dir", "none", PROGRAM, "--pretend", "--fault", "orphan", "--rank", "9"], tmp_path)
    job.wait_for("step 4", times=2)
    for pid in job.pids(victim):
        os.kill(pid, signal.SIGKILL)
    if "cli" in victim:
        # Nobody is there to wait for any more: the agent notices, and ends what it started.
        job.process.wait()
        job.wait_until_gone()
    ended = job.end()
    assert ended.status == (-signal.SIGKILL if "cli" in victim else 75)
    assert "agent" not in victim or "its agent was killed" in ended.err
    assert not ended.left


def test_a_job_is_started_again_as_often_as_asked(tmp_path: Path) -> None:
    words = ("--pretend", "--fault", "raise", "--rank", "0", "--when", "start", "--restart")
    once = run_poseidon(*TWO, "--restarts", "1", PROGRAM, *words, "0", folder=tmp_path)
    assert once.status == 0, once.err
    assert "restarting (1 of 1)" in once.err
    script = tmp_path / "always.py"
    script.write_text(
        "import os, sys; print('try', os.environ['POSEIDON_RESTART'], os.environ['POSEIDON_SECRET']); sys.exit(5)"
    )
    ended = run_poseidon("--nproc", "1", "--restarts", "2", script, folder=tmp_path)
    assert ended.status == 5
    tries = [line.split()[2:] for line in ended.out.splitlines()]
    assert [number for number, _ in tries] == ["0", "1", "2"]
    assert len({secret for _, secret in tries}) == 3


def test_modules_and_pycaffe_scripts_run_too(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "main.py").write_text("import sys; print('args', sys.argv[1:])")
    ended = run_poseidon("--nproc", "1", "-m", "mine.main", "--lr", "3", folder=tmp_path)
    assert "args ['--lr', '3']" in ended.out, ended.err
    (tmp_path / "net.py").write_text("import caffe, sys; print(caffe.__name__, sys.argv[1:])")
    ended = run_poseidon("--nproc", "1", "--as-caffe", "net.py", "--gpu", "0", folder=tmp_path)
    assert "poseidon.caffe ['--gpu', '0']" in ended.out, ended.err


def test_a_script_for_one_device_is_distributed(tmp_path: Path) -> None:
    script = PROGRAM.with_name("auto_scripts") / "digits_mlp.py"
    ended = run_poseidon(*TWO, "--auto", "--batch", "total", script, folder=tmp_path)
    assert ended.status == 0, ended.err
    assert "2 workers" in ended.out + ended.err
    assert "batches are divided" in ended.out + ended.err


def test_under_torchrun_it_joins(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    command += [sys.executable, "-m", "poseidon.cli", "run", str(PROGRAM), "--steps", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained 2 steps") == 2


def free_port() -> int:
    """Return a port below those that the kernel gives to connections, so that it stays free until it is used."""
    while True:
        port = random.randrange(12000, 32000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def test_as_tasks_of_slurm_it_joins(tmp_path: Path) -> None:
    port = free_port()
    step = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_STEP_NUM_TASKS": "2",
        "MASTER_PORT": str(port),
    }
    step |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "GLOO_SOCKET_IFNAME": "lo"}
    places = [{**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    tasks = [Started([PROGRAM, "--steps", "2"], tmp_path, place) for place in places]
    for task in tasks:
        ended = task.end()
        assert ended.status == 0, ended.err
        assert ended.out.count("trained 2 steps") == 1, "as it is: no prefix, no other worker"


@pytest.mark.parametrize("is_told_arguments_only", [False, True], ids=["PyTorchJob", "TrainJob"])
def test_in_a_pod_it_runs_the_machines_share(tmp_path: Path, is_told_arguments_only: bool) -> None:
    (tmp_path / "who.py").write_text(
        "import os; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR')))"
    )
    pod = {
        "PET_NNODES": "3",
        "PET_NODE_RANK": "1",
        "PET_NPROC_PER_NODE": "2",
        "PET_MASTER_ADDR": "m",
        "PET_MASTER_PORT": "9",
    }
    if not is_told_arguments_only:
        pod |= {"RANK": "1", "WORLD_SIZE": "6", "MASTER_ADDR": "m", "MASTER_PORT": "9", "KUBERNETES_SERVICE_HOST": "x"}
    ended = run_poseidon("who.py", folder=tmp_path, env=pod)
    assert sorted(ended.out.splitlines()) == ["[0] 2 6 m", "[1] 3 6 m"]


def test_a_process_that_was_launched_already_launches_no_more(tmp_path: Path) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "m", "MASTER_PORT": "9", "TORCHELASTIC_RUN_ID": "x"}
    ended = run_poseidon("--nproc", "2", PROGRAM, folder=tmp_path, env=place)
    assert ended.status == 1
    assert "already worker 1 of 2, started by torchrun; leave --nproc out" in ended.err
