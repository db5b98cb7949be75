"""The doctor before real ssh servers on emulated machines: every fault is put there for real and must be found."""

import contextlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from sshd import serving

import poseidon
from patience import comes_true
from poseidon.job.settings import PROBE_CLOCK_OFFSET
from poseidon.lab import Lab

pytestmark = pytest.mark.cluster

RENDEZVOUS = 29500
# What a firewall would do, with nothing but the kernel's routing rules: answers from this port go nowhere.
DROP_ANSWERS_OF_A_PORT = f"""
from pyroute2 import IPRoute
with IPRoute() as netlink:
    netlink.rule("add", priority=5, action="blackhole", ip_proto=6, sport_range="{RENDEZVOUS}:{RENDEZVOUS}")
"""
# Offloading must go too: bridges let packets pass that are still to be cut, which no cable would.
PROMISE_LARGE_PACKETS = """
import array, fcntl, socket, struct
from pyroute2 import IPRoute
with IPRoute() as netlink:
    netlink.link("set", index=netlink.link_lookup(ifname="eth0")[0], mtu=9000)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as card:
    for set_segmentation in (0x1F, 0x24):
        off = array.array("B", struct.pack("II", set_segmentation, 0))
        fcntl.ioctl(card, 0x8946, struct.pack("16sP", b"eth0", off.buffer_info()[0]) + bytes(16))
"""


def on(lab, machine, code):
    assert lab.spawn(machine, [sys.executable, "-c", code]).wait(30) == 0


def python_with_names(folder, names):
    """Return an interpreter whose /etc/hosts says this, in a mount namespace of its own."""
    hosts = folder / "hosts"
    hosts.write_text("".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **names}.items()))
    wrapper = folder / "python"
    inside = f'mount --bind {shlex.quote(str(hosts))} /etc/hosts && exec {shlex.quote(sys.executable)} "$@"'
    wrapper.write_text(f'#!/bin/sh\nexec unshare --mount sh -c {shlex.quote(inside)} sh "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)


class Cluster:
    """Hosts as a cluster file describes them, and the doctor's view from the first."""

    def __init__(self, lab, ssh, folder):
        self.lab, self.ssh, self.folder = lab, ssh, folder
        addresses = {f"machine{number}": lab.address(number) for number in range(lab.machines)}
        (folder / "names").mkdir()
        python = python_with_names(folder / "names", addresses)
        self.hosts = [
            {"name": name, "address": address, "python": python, "env": {"OMP_NUM_THREADS": "1"}}
            for name, address in addresses.items()
        ]

    def examine(self, *options):
        file = self.folder / "cluster.json"
        file.write_text(json.dumps({"hosts": self.hosts}))
        command = [sys.executable, "-m", "poseidon.cli", "doctor", "-c", str(file), "--json", *options]
        asking = self.lab.spawn(0, command, env={**os.environ, **self.ssh.env}, stdout=subprocess.PIPE)
        output, _ = asking.communicate(timeout=110)
        return asking.returncode, json.loads(output)


def probes(lab, machine):
    """Return the probes that run on a machine."""
    found = []
    for pid in lab.processes(machine):
        with contextlib.suppress(OSError):
            if b"poseidon.doctor.probe" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def summary(data):
    return sorted((one["check"], *one["hosts"]) for one in data["findings"])


@pytest.fixture
def cluster(request, tmp_path):
    machines, rate = request.param
    with Lab(machines=machines, rate=rate) as lab, serving(lab, tmp_path) as ssh:
        yield Cluster(lab, ssh, tmp_path)


def of(machines, rate="100mbit"):
    return pytest.mark.parametrize("cluster", [(machines, rate)], indirect=True)


@of(3)
def test_a_healthy_cluster_is_found_healthy_and_measured(cluster):
    status, data = cluster.examine()
    assert (status, data["would_train"], data["findings"]) == (0, True, [])
    assert [host["address"] for host in data["hosts"]] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
    assert len(data["pairs"]) == 6
    for pair in data["pairs"]:
        assert set(pair["ports"].values()) == {"open"}
        assert str(RENDEZVOUS) in pair["ports"]
        assert pair["path_mtu"] == 1500
        assert 0 < pair["latency_s"] < 0.1
        # The shaped link was measured, not the kernel behind it, which carries a hundred times as much. A receiver
        # that had to wait for its core sees some of the data at once, so nothing sharper can be said; that enough gets
        # through is why nobody is called slow.
        assert max(pair["one_stream_bits_per_s"], pair["many_stream_bits_per_s"]) < 3e8


@of(4)
def test_blocked_port_wrong_version_loopback_name_and_skewed_clock_are_each_found_at_their_host(cluster):
    on(cluster.lab, 0, DROP_ANSWERS_OF_A_PORT)
    real = Path(poseidon.__file__).parent
    other = cluster.folder / "other" / "poseidon"
    other.mkdir(parents=True)
    (other / "version.py").write_text('__version__ = "0.0.9"\n')
    (other / "__init__.py").write_text(f"{(real / '__init__.py').read_text()}\n__path__.append({str(real)!r})\n")
    old = cluster.folder / "old-python"
    old.write_text(f'#!/bin/sh\nPYTHONPATH={other.parent} exec {cluster.hosts[1]["python"]} "$@"\n')
    old.chmod(0o755)
    cluster.hosts[1]["python"] = str(old)
    (cluster.folder / "debian").mkdir()
    cluster.hosts[2]["python"] = python_with_names(cluster.folder / "debian", {"machine2": "127.0.1.1"})
    cluster.hosts[3]["env"][PROBE_CLOCK_OFFSET.name] = "-30"

    status, data = cluster.examine("--seconds", "0.2")

    assert summary(data) == [
        ("clock", "machine3"),
        ("host-name", "machine2"),
        ("ports", "machine0"),
        ("poseidon-version", "machine1"),
    ], data["findings"]
    by_check = {one["check"]: one for one in data["findings"]}
    assert by_check["ports"]["severity"] == by_check["poseidon-version"]["severity"] == "error"
    assert f"port {RENDEZVOUS} (timed out)" in by_check["ports"]["seen"]
    assert "10.77.0.2" in by_check["ports"]["fix"]
    assert f"poseidon-dl=={poseidon.__version__}" in by_check["poseidon-version"]["fix"]
    assert "127.0.1.1" in by_check["host-name"]["seen"]
    assert "10.77.0.3 machine2" in by_check["host-name"]["fix"]
    assert "30 s behind" in by_check["clock"]["seen"]
    assert status == 1


@of(3, "100mbit,100mbit,10mbit")
def test_a_slow_link_is_blamed_on_the_host_that_has_it(cluster):
    status, data = cluster.examine("--seconds", "0.3")
    assert summary(data) == [("slow-link", "machine2")], data["findings"]
    assert status == 0, "slow is not broken"
    assert data["findings"][0]["severity"] == "warning"


@of(3)
def test_large_packets_that_vanish_between_two_hosts_are_found(cluster):
    for machine in (1, 2):
        on(cluster.lab, machine, PROMISE_LARGE_PACKETS)
    status, data = cluster.examine("--seconds", "0.2")
    errors = [one for one in data["findings"] if one["severity"] == "error"]
    assert status == 1, (data["findings"], data["pairs"])
    assert sorted((one["check"], *one["hosts"]) for one in errors) == [
        ("path-mtu", "machine1", "machine2"),
        ("path-mtu", "machine2", "machine1"),
    ]
    assert "above 1500 bytes" in errors[0]["seen"]


def test_every_way_in_which_ssh_fails_is_told_apart(tmp_path):
    with Lab(machines=5, rate="100mbit") as lab, serving(lab, tmp_path, without=(1,)) as ssh:
        cluster = Cluster(lab, ssh, tmp_path)
        known = ssh.config.with_name("known_hosts")
        kept = [line for line in known.read_text().splitlines() if not line.startswith("machine2,")]
        known.write_text("\n".join(kept) + "\n")
        cluster.hosts[3]["user"] = "stranger"
        cluster.hosts[4]["python"] = "/no/such/python"
        status, data = cluster.examine("--timeout", "30")
    assert status == 1
    assert summary(data) == [
        ("python", "machine4"),
        ("ssh-host-key", "machine2"),
        ("ssh-permission", "machine3"),
        ("ssh-refused", "machine1"),
    ]
    assert [host["name"] for host in data["hosts"]] == ["machine0"]


@of(2)
def test_no_probe_outlives_a_doctor_that_is_killed(cluster):
    file = cluster.folder / "cluster.json"
    file.write_text(json.dumps({"hosts": cluster.hosts}))
    command = [sys.executable, "-m", "poseidon.cli", "doctor", "-c", str(file)]
    asking = cluster.lab.spawn(0, command, env={**os.environ, **cluster.ssh.env})
    assert comes_true(lambda: probes(cluster.lab, 1))
    asking.kill()
    asking.wait()
    assert comes_true(lambda: not probes(cluster.lab, 0) + probes(cluster.lab, 1))
