"""An examination of hosts that are only tables of answers."""

import itertools

import pytest

from poseidon.doctor import conduct
from poseidon.doctor.asking import LostProbeError, NoProbeError
from poseidon.doctor.conduct import ExaminationOptions, examine
from poseidon.doctor.facts import Clock
from poseidon.launch.hosts import Host
from poseidon.launch.ssh import SshSettings

GIB = 1 << 30


class Probe:
    """Answers as a probe on a healthy host would, unless a test changes that."""

    def __init__(self, host, number, cluster):
        self.host, self.number, self.cluster = host, number, cluster
        self.is_local = number == 0
        self.address = f"10.0.0.{number + 1}"
        self.has_hung_up = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.hang_up()

    def hang_up(self):
        self.has_hung_up = True

    def greet(self, _):
        if self.host.name in self.cluster.refused:
            raise NoProbeError(self.host, 255, "Connection refused")

    def read_clock(self, _):
        return Clock(0.0, 0.0)

    def ask(self, question, _, **details):
        if (self.host.name, question) in self.cluster.dying:
            raise LostProbeError(self.host, f"did not answer {question!r}")
        return getattr(self, question)(**details)

    def facts(self, **_):
        interfaces = [{"name": "eth0", "address": self.address, "mtu": 1500}]
        text = {"python": "3.11.7", "poseidon": "0.1.0", "torch": "2.13.0", "machine": self.address}
        sizes = dict.fromkeys(("free_memory_bytes", "free_disk_bytes", "free_shared_bytes"), 100 * GIB)
        resolved = [self.address]
        return {"hostname": "x", "interfaces": interfaces, "resolved": resolved, "open_files": 4096, **text, **sizes}

    def towards(self, peers):
        return [self.address for _ in peers]

    def listen(self, address, ports, token):
        assert address == self.address
        self.token = token
        return {"ports": [7, *ports], "failed": {}, "bulk_port": 7}

    def measure(self, address, token, bulk_port, ports, packets, **_):
        target = next(probe for probe in self.cluster.probes if probe.address == address)
        assert token == target.token
        link = (self.host.name, target.host.name)
        self.cluster.measured.append(link)
        rate = next(self.cluster.rates.get(link, itertools.repeat(1e9)))
        found = {"ports": {str(port): "open" for port in (bulk_port, *ports)}, "latency_s": 1e-4}
        found |= {"packets": {str(size): True for size in packets}}
        return {**found, "one_stream_bits_per_s": rate, "many_stream_bits_per_s": rate}


class Cluster:
    """The probes, what is wrong with them, and which links were measured."""

    def __init__(self):
        self.probes, self.measured = [], []
        self.refused, self.dying, self.rates = set(), set(), {}

    def start(self, host, _):
        probe = Probe(host, "abcdefgh".index(host.name), self)
        self.probes.append(probe)
        return probe

    def examine(self, names, tell=lambda _: None, **hosts):
        return examine([Host(name, **hosts) for name in names], ExaminationOptions(), SshSettings(), tell)


@pytest.fixture
def cluster(monkeypatch):
    one = Cluster()
    monkeypatch.setattr(conduct, "start", one.start)
    yield one
    assert all(probe.has_hung_up for probe in one.probes)


def summary(examination):
    return [(finding.severity.value, finding.hosts, finding.check) for finding in examination.findings]


def test_every_link_of_healthy_hosts_is_measured_once(cluster):
    told = []
    examination = cluster.examine("abcd", told.append)
    assert examination.findings == ()
    assert sorted(cluster.measured) == sorted(itertools.permutations("abcd", 2))
    assert {(pair.source, pair.target) for pair in examination.pairs} == set(cluster.measured)
    assert told == ["asking 4 hosts", *(f"measuring links: round {number} of 3" for number in (1, 2, 3))]


def test_a_machine_alone_has_no_links(cluster):
    examination = cluster.examine("a")
    assert (examination.findings, examination.pairs, cluster.measured) == ((), (), [])


def test_a_busy_moment_is_no_finding(cluster):
    cluster.rates = {("a", "b"): iter([1e8, 2e8, 1e9])}
    examination = cluster.examine("abc")
    assert examination.findings == ()
    assert cluster.measured.count(("a", "b")) == 3
    assert cluster.measured.count(("b", "a")) == 1


def test_a_link_that_stays_slow_is_a_finding(cluster):
    cluster.rates = {("a", "b"): itertools.repeat(1e8)}
    assert summary(cluster.examine("abc")) == [("warning", ("a", "b"), "slow-link")]


def test_a_host_that_cannot_be_reached_does_not_keep_the_others(cluster):
    cluster.refused = {"b"}
    examination = cluster.examine("abc")
    assert summary(examination) == [("error", ("b",), "ssh-refused")]
    assert [host.name for host in examination.hosts] == ["a", "c"]
    assert sorted(cluster.measured) == [("a", "c"), ("c", "a")]


@pytest.mark.parametrize("question", ["facts", "listen", "measure"])
def test_a_host_that_dies_on_the_way_is_named_once(cluster, question):
    cluster.dying = {("c", question)}
    examination = cluster.examine("abcd")
    assert summary(examination) == [("error", ("c",), "probe")]
    assert {("a", "b"), ("b", "a"), ("a", "d"), ("b", "d")} <= set(cluster.measured)


def test_nobody_listens_without_an_interface(cluster):
    examination = cluster.examine("ab", interface="eth7")
    assert summary(examination) == [("error", (name,), "interface") for name in "ab"]
    assert cluster.measured == []


def test_a_python_that_is_not_there_is_a_finding(monkeypatch):
    def start(host, settings):
        raise FileNotFoundError(2, "No such file or directory", "/no/python")

    monkeypatch.setattr(conduct, "start", start)
    examination = examine([Host("a", python="/no/python")], ExaminationOptions(), SshSettings())
    assert summary(examination) == [("error", ("a",), "python")]
