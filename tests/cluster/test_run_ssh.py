"""``poseidon run`` over real ssh servers on emulated machines: training, lost machines, refused logins."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from sshd import Ssh, serving

from poseidon.lab import Lab
from run_jobs import PROGRAM, Ended, Started, check

pytestmark = pytest.mark.cluster

HOSTS = "machine0,machine1,machine2,machine3"


class Cluster:
    """Four machines with ssh servers; jobs are started on the first."""

    def __init__(self, lab: Lab, ssh: Ssh, folder: Path) -> None:
        self.lab = lab
        self._ssh = ssh
        self._folder = folder

    def start(self, *words: str | Path, hosts: str = HOSTS) -> Started:
        def spawn(command: list[str], **options: object) -> object:
            return self.lab.spawn(0, command, **options)

        options = ["--quiet", "--log-dir", "none", "--hosts", hosts]
        return Started([*options, *words], self._folder, self._ssh.env, spawn)  # type: ignore[arg-type]

    def run(self, *words: str | Path, hosts: str = HOSTS) -> Ended:
        return self.start(*words, hosts=hosts).end()

    def agent_of(self, machine: int) -> int:
        """Return the process that looks after the workers of a machine."""
        for pid in self.lab.processes(machine):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"poseidon.launch.agent" in words and words[0].endswith(b"python"):
                return pid
        raise AssertionError(f"no agent on machine {machine}")


@pytest.fixture
def cluster(nothing_left: None, tmp_path: Path) -> Iterator[Cluster]:
    with Lab(machines=4, rate="1gbit") as lab, serving(lab, tmp_path) as ssh:
        yield Cluster(lab, ssh, tmp_path)


def test_four_machines_train_from_one_command_and_keep_nothing(cluster: Cluster, tmp_path: Path) -> None:
    before = set(cluster.lab.processes())
    ended = cluster.run(PROGRAM, "--steps", "4", "--notes", tmp_path)
    assert ended.status == 0, ended.err
    weights = {(tmp_path / f"weights-{rank}").read_text() for rank in range(4)}
    assert len(weights) == 1
    for rank in range(4):
        assert f"[{rank} machine{rank}] trained 4 steps" in ended.out
    assert not ended.left
    assert set(cluster.lab.processes()) <= before, "a login or an agent is still there"
    assert min(traffic.sent for traffic in cluster.lab.traffic()) > 1000


def test_no_secret_is_on_any_command_line(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "wait.py"
    script.write_text(
        "import os, time\nprint('secret', os.environ['POSEIDON_SECRET'], os.environ['GLOO_SOCKET_IFNAME'], "
        "os.environ['MASTER_ADDR'], os.environ['POSEIDON_WIRE_IP'], flush=True)\ntime.sleep(1000)\n"
    )
    job = cluster.start(script, hosts="machine0,machine1:2")
    job.wait_for("secret", times=3)
    secrets = {line.split()[3] for line in job.out.splitlines()}
    places = sorted(line.split()[4:] for line in job.out.splitlines())
    assert len(secrets) == 1
    assert places == [["eth0", "10.77.0.1", "10.77.0.1"], *[["eth0", "10.77.0.1", "10.77.0.2"]] * 2]
    for pid in [*cluster.lab.processes(), *job.pids()]:
        assert next(iter(secrets)).encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    job.process.send_signal(signal.SIGINT)
    ended = job.end()
    assert ended.status == 130
    assert not ended.left


def test_a_machine_that_disappears_ends_the_job_in_time(cluster: Cluster) -> None:
    job = cluster.start(PROGRAM, "--pretend", "--fault", "machine", "--rank", "2")
    job.wait_for("now: machine")
    cluster.lab.cut(2)
    ended = job.end(limit_s=15)
    assert not check(Ended(ended.status, ended.out, ended.err, 0, ()), "machine", 2, "machine2"), ended.err
    assert "machine2 could not be checked" in ended.err
    job.wait_until_gone()


@pytest.mark.parametrize("when", ["start", "middle", "end"])
def test_an_agent_that_is_killed_takes_its_workers_along(when: str, cluster: Cluster) -> None:
    job = cluster.start(PROGRAM, "--pretend", "--fault", "hang", "--rank", "2", "--when", when)
    job.wait_for("now: hang")
    os.kill(cluster.agent_of(2), signal.SIGKILL)
    ended = job.end()
    assert not check(ended, "machine", 2, "machine2"), ended.err
    assert "could not be checked" not in ended.err, "a second login has looked"


@pytest.mark.parametrize("fault", ["raise", "orphan"])
def test_a_worker_elsewhere_that_dies_is_named_and_leaves_nothing(fault: str, cluster: Cluster) -> None:
    ended = cluster.run(PROGRAM, "--pretend", "--fault", fault, "--rank", "3", hosts="machine1:2,machine3:2")
    assert not check(ended, fault, 3, "machine3"), ended.err


def test_no_worker_outlives_a_launcher_that_is_killed(cluster: Cluster) -> None:
    job = cluster.start(PROGRAM, "--pretend", "--fault", "hang", "--rank", "1")
    job.wait_for("now: hang")
    job.process.kill()
    job.process.wait()
    job.wait_until_gone()


def test_machines_that_cannot_start_are_named_before_anything_runs(tmp_path: Path, nothing_left: None) -> None:
    with Lab(machines=3) as lab, serving(lab, tmp_path, without=(1,)) as ssh:
        cluster = Cluster(lab, ssh, tmp_path)
        script = tmp_path / "touch.py"
        script.write_text("import pathlib; pathlib.Path('started').touch()")
        ended = cluster.run(script, hosts="10.77.0.1,machine1,machine2")
        assert ended.status == 1
        assert "cannot reach machine1 by ssh: no ssh server listens there" in ended.err
        (tmp_path / "ssh" / "known_hosts").write_text("")
        ended = cluster.run(script, hosts="machine2")
        assert "host key is not known yet" in ended.err
        hosts = tmp_path / "hosts"
        hosts.write_text("10.77.0.1 python=/opt/none/python\n")
        assert "/opt/none/python" in cluster.run("--python", "/opt/none/python", script, hosts="10.77.0.1").err
        assert not (tmp_path / "started").exists()


def test_a_missing_directory_or_interpreter_there_is_said_so(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "ok.py").write_text("print('fine')")
    ended = cluster.run("--python", "/opt/none/python", "ok.py", hosts="machine1")
    assert "machine1 has no Python at /opt/none/python" in ended.err
    ended = cluster.run("--directory", "/no/such/place", "ok.py", hosts="machine1,machine2")
    assert "machine1, machine2: there is no directory /no/such/place" in ended.err
    ended = cluster.run("--interface", "wlan7", "ok.py", hosts="machine1")
    assert "interface 'wlan7' has no address" in ended.err
    assert "eth0 (10.77.0.2)" in ended.err
