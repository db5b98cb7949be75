import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from statistics import median

import pytest
from sshd import ensure_sshd

from patience import comes_true
from poseidon.cli.main import main
from poseidon.errors import ConfigError
from poseidon.job import members
from poseidon.lab import Job, Lab, namespace, state
from poseidon.lab.job import JobOptions

pytestmark = pytest.mark.cluster

JOBS = str(Path(__file__).with_name("jobs.py"))
POSEIDON = [sys.executable, "-m", "poseidon.cli"]


class Output:
    """What the workers of a job said; may act on what it hears."""

    def __init__(self):
        self.lines = []
        self.actions = {}

    def __call__(self, place, line):
        self.lines.append((place.machine, line))
        action = self.actions.pop(line, None)
        if action is not None:
            action()

    def values(self, word):
        return [line.partition(" ")[2] for _, line in self.lines if line.startswith(word)]


def run_job(lab, *words, show=None, **options):
    return Job(lab, [sys.executable, JOBS, *words], JobOptions(timeout_s=60, **options), show=show or Output()).run()


def test_four_machines_at_200_mbit_move_data_at_that_rate_and_are_counted():
    medians = []
    with Lab(machines=4, rate="200mbit") as lab:
        # Shaping must never let more through; that it lets enough through shows when nothing else is in the way.
        while len(medians) < 3 and max(medians, default=0) < 180:
            output = Output()
            result = run_job(lab, "ring", show=output)
            assert result.status == 0, output.lines
            medians.append(median(float(value) for value in output.values("mbit")))
            for moved in result.traffic:
                assert 8e6 <= moved.sent <= 8.8e6
                assert 8e6 <= moved.received <= 8.8e6
    assert 180 <= max(medians) <= 220


def test_a_job_trains_and_its_replicas_agree():
    output = Output()
    with Lab(machines=3, rate="1gbit") as lab:
        result = run_job(lab, "train", show=output)
    assert result.status == 0, "\n".join(f"{machine}: {line}" for machine, line in output.lines)
    assert output.values("weights") == ["[2.0, -3.0, 1.0]"] * 3
    assert all(moved.sent > 1000 for moved in result.traffic)


def said_on(lab, machine, *argv):
    process = lab.spawn(machine, argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return process.communicate(timeout=60)[0].decode().split()


def test_machines_know_each_other_by_name_and_nobody_else_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = Path("/etc/hosts").read_bytes()
    with Lab(machines=2, rate="none") as lab:
        ask = (
            "import os, socket; print(socket.gethostbyname('machine1'), socket.gethostbyname('localhost'), os.getcwd())"
        )
        assert said_on(lab, 0, sys.executable, "-c", ask) == ["10.77.0.2", "127.0.0.1", str(tmp_path)]
    assert Path("/etc/hosts").read_bytes() == before
    assert Path.cwd() == tmp_path


def test_a_lab_with_ssh_lets_its_machines_log_in_on_each_other(capsys):
    problem = ensure_sshd()
    if problem:
        pytest.skip(problem)
    name = f"ssh-{os.getpid()}"
    own = Path("/etc/ssh/ssh_config").read_bytes()
    try:
        assert main(["lab", "up", "--machines", "2", "--rate", "none", "--name", name, "--ssh"]) == 0
        assert "ssh machine1" in capsys.readouterr().out
        lab = Lab.attach(name)
        assert said_on(lab, 0, "ssh", "machine1", "hostname")[-1] == "machine1"
        # One that was left running by a login ends with the lab.
        assert said_on(lab, 0, "ssh", "machine1", "sleep 600 >/dev/null 2>&1 & echo started")[-1] == "started"
        keys = state.ssh_folder(name)
        assert (keys / "user_key").stat().st_mode & 0o077 == 0
        assert any(member for member in lab.processes())
    finally:
        assert main(["lab", "down", name]) == 0
    assert not keys.exists()
    assert not members.pids_marked(members.LAB_MARK, name)
    assert Path("/etc/ssh/ssh_config").read_bytes() == own


@pytest.mark.parametrize("fault", ["cut", "pause"])
def test_a_cut_or_paused_machine_goes_silent_and_comes_back_when_healed(fault):
    output = Output()
    with Lab(machines=3, rate="100mbit") as lab:
        output.actions = {"all here": lambda: getattr(lab, fault)(1), "silent 1": lambda: lab.heal(1)}
        result = run_job(lab, "heartbeat", "wait", show=output)
    assert output.lines == [(0, "all here"), (0, "silent 1"), (0, "back 1")]
    assert result.status == 0


def test_a_killed_machine_is_seen_by_the_others():
    output = Output()
    with Lab(machines=3, rate="100mbit") as lab:
        output.actions = {"all here": lambda: lab.kill(2)}
        result = run_job(lab, "heartbeat", "give-up", show=output, stop_on_failure=False)
    assert [line for _, line in output.lines[:2]] == ["all here", "silent 2"]
    assert result.statuses[0] == 7
    assert result.statuses[2] == -signal.SIGKILL


def test_one_failing_worker_ends_the_job_with_its_status():
    output = Output()
    with Lab(machines=3) as lab:
        result = run_job(lab, "fail_on_one", show=output)
        assert lab.processes() == [], "what workers left in other sessions must be gone too"
    assert result.status == 3
    assert result.reason == "machine1 (rank 1) ended with status 3; the other 2 were ended"
    assert (1, "something is wrong here") in output.lines


def test_a_job_past_its_time_limit_is_ended():
    with Lab(machines=2) as lab:
        result = Job(lab, [sys.executable, JOBS, "daemons"], JobOptions(timeout_s=1.0), show=Output()).run()
    assert result.status == 124
    assert "time limit of 1 s" in result.reason


def test_a_slow_machine_gets_its_share_of_time_only():
    output = Output()
    with Lab(machines=2, slow=["1:3x"]) as lab:
        result = run_job(lab, "work", show=output)
    assert result.status == 0
    slow = [float(line.split()[1]) for machine, line in output.lines if machine == 1]
    assert slow[0] > 2.0


def test_workers_of_one_machine_share_it():
    output = Output()
    program = "import os, socket; print(socket.gethostname(), os.environ['RANK'], os.environ['LOCAL_RANK'])"
    with Lab(machines=2) as lab:
        options = JobOptions(workers_per_machine=2, timeout_s=30)
        assert Job(lab, [sys.executable, "-c", program], options, show=output).run().status == 0
    assert sorted(line for _, line in output.lines) == ["machine0 0 0", "machine0 1 1", "machine1 2 0", "machine1 3 1"]


def test_labs_do_not_see_each_other():
    with Lab(machines=1, name="first") as first, Lab(machines=1, name="second") as second:
        listeners = []
        for lab in (first, second):
            here = lab.state
            opened = os.open(f"/proc/{here.warden.pid}/fd/{here.machines[0].net_fd}", os.O_RDONLY)
            # The same address and port twice: possible only where the networks are apart.
            listeners.append(namespace.call_inside([opened], lambda: socket.create_server(("10.77.0.1", 5000))))
            os.close(opened)
        assert {lab.name for lab in state.load_all()} == {"first", "second"}
        for listener in listeners:
            listener.close()
        with pytest.raises(ConfigError, match="'first' is already running"):
            Lab(machines=1, name="first").up()


def test_a_machine_that_is_not_there_is_named():
    with Lab(machines=2) as lab:
        for act in (lab.cut, lab.pause, lab.heal, lab.kill):
            with pytest.raises(ConfigError, match="no machine 2 in this lab; it has machines 0 to 1"):
                act(2)


@contextlib.contextmanager
def running_lab():
    """Run ``poseidon lab run`` with daemons on two machines, until all of them are there."""
    command = [*POSEIDON, "lab", "run", "--machines", "2", "--name", "doomed", "--", sys.executable, JOBS, "daemons"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            for _ in range(2):
                assert "ready" in process.stdout.readline()
            yield process
        finally:
            process.kill()  # or a failed test would wait for it; its warden removes the lab


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_lab_in_good_order(number):
    with running_lab() as process:
        process.send_signal(number)
        assert process.wait(20) == 128 + number
    assert state.load_all() == []


def test_a_lab_killed_hard_is_cleaned_up_by_its_warden():
    with running_lab() as process:
        lab = state.load("doomed")
        process.kill()
        process.wait(20)
    assert comes_true(lambda: not lab.warden.is_alive)
    assert members.pids_in({place.inode for place in (lab.switch, *lab.machines)}) == []
    assert state.load_all() == []


def test_down_removes_what_a_lab_leaves_when_its_warden_is_killed_too(capsys):
    with running_lab() as process:
        lab = state.load("doomed")
        os.kill(lab.warden.pid, signal.SIGKILL)
        process.kill()
        process.wait(20)
        assert comes_true(lambda: lab.is_abandoned)
        assert len(lab.processes()) == 4, "two workers and two daemons are left behind"
        main(["lab", "status"])
        assert "lab doomed: left behind by a killed process" in capsys.readouterr().out
        assert main(["lab", "down"]) == 0
    assert capsys.readouterr().out == "lab doomed removed\n"


def test_a_lab_stays_up_for_several_jobs_and_faults(capfd, tmp_path):
    def say(*words):
        status = main(["lab", *words])
        return status, capfd.readouterr().out

    up = [*POSEIDON, "lab", "up", "--rate", "100mbit,10mbit", "--name", "mine"]
    # Returns only if the lab that stays does not hold on to the output of the command that made it.
    subprocess.run(up, capture_output=True, timeout=30, check=True)
    report = tmp_path / "report.json"
    status, out = say("run", "--report", str(report), "--lab", "mine", "--", sys.executable, "-c", "print('hello')")
    assert (status, sorted(out.splitlines())) == (0, ["machine0 | hello", "machine1 | hello"])
    assert json.loads(report.read_text())["statuses"] == [0, 0]
    assert say("exec", "1", "--", "hostname") == (0, "machine1\n")
    assert say("fault", "cut", "0-1") == (0, "lab mine: cut machine0\nlab mine: cut machine1\n")
    assert say("fault", "heal", "0")[0] == 0
    lines = say("status")[1].splitlines()
    assert lines[0].startswith("lab mine: 2 machines at 100mbit/10mbit, until")
    assert [line.endswith("cut") for line in lines[1:]] == [False, True]
    assert say("fault", "cut", "2")[0] == 1
    assert say("down") == (0, "lab mine removed\n")
    assert say("status") == (0, "no lab is running\n")


def test_down_leaves_a_running_job_alone_unless_told(capsys):
    with running_lab() as process:
        main(["lab", "down"])
        assert f"doomed left alone: process {process.pid} is using it" in capsys.readouterr().out
        assert process.poll() is None
        main(["lab", "down", "--all"])
        process.wait(20)
    assert capsys.readouterr().out == "lab doomed removed\n"


def test_bench_measures_systems_and_writes_what_it_found(tmp_path):
    out = tmp_path / "bench.json"
    options = "--models lenet,cifar10-quick --tiny --batch 4,cifar10-quick=2 --machines 2 --rate 1gbit"
    options += " --steps 2 --warmup 3 --repetitions 2"
    command = [*POSEIDON, "bench", *options.split(), "--against", "ddp,ddp-powersgd", "--output", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    cell, another = json.loads(out.read_text())["cells"]
    assert (cell["model"], cell["batch"], another["model"], another["batch"]) == ("lenet", 4, "cifar10-quick", 2)
    assert another["systems"]["ddp"]["verdict"] == "ok"
    systems = cell["systems"]
    assert {name: len(system["repetitions"]) for name, system in systems.items()} == {
        "linear": 2,
        "ddp": 2,
        "ddp-powersgd": 2,
    }
    assert systems["ddp"]["verdict"] == "ok"
    assert systems["ddp"]["sent_bytes"] > cell["parameter_bytes"] > 100 * systems["linear"]["sent_bytes"]
    assert systems["ddp-powersgd"]["sent_bytes"] < 0.5 * systems["ddp"]["sent_bytes"]
    assert out.with_suffix(".png").exists()


def test_a_delay_is_felt_twice_on_a_round_trip():
    try:
        lab = Lab(machines=2, delay="30ms")
        lab.up()
    except ConfigError as error:
        pytest.skip(str(error))
    output = Output()
    try:
        assert run_job(lab, "echo", show=output).status == 0
    finally:
        lab.down()
    assert float(output.values("round")[0].split()[1]) > 0.06


def test_threads_may_make_labs_at_once():
    errors = []

    def make():
        try:
            with Lab(machines=2) as lab:
                assert run_job(lab, "work").status == 0
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_marked_processes_are_found_wherever_they_are():
    env = {**os.environ, members.LAB_MARK: "lab-of-this-test"}
    command = [sys.executable, JOBS, "daemons"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, start_new_session=True) as child:
        child.stdout.readline()
        assert len(members.pids_marked(members.LAB_MARK, "lab-of-this-test")) == 2
        assert members.pids_marked(members.LAB_MARK, "lab-of-this") == []
        members.kill_all(lambda: members.pids_marked(members.LAB_MARK, "lab-of-this-test"))
        assert child.wait() == -signal.SIGKILL
    assert members.start_time(child.pid) is None
