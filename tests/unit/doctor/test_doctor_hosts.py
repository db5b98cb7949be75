import subprocess
from dataclasses import replace

import pytest

from poseidon.doctor.choosing import choose_address
from poseidon.doctor.cluster_checks import check_cluster, odd_ones
from poseidon.doctor.facts import Clock, Gpu, HostFacts, HostReport, Interface, host_from_json, to_json
from poseidon.doctor.findings import Severity, would_train
from poseidon.doctor.host_checks import check_host, is_loopback, version_numbers

GIB = 1 << 30
CARD = Interface("eth0", "10.0.0.1", mtu=1500, speed_mbit=10_000)
LOOPBACK = Interface("lo", "127.0.0.1", mtu=65536, is_loopback=True)
HEALTHY = HostFacts(
    hostname="box",
    machine="boot-a",
    python="3.11.7",
    executable="/venv/bin/python",
    poseidon="0.1.0",
    torch="2.13.0+cpu",
    numpy="2.4.6",
    interfaces=(LOOPBACK, CARD),
    resolved=("10.0.0.1",),
    cpu="A CPU",
    cpu_capability="AVX2",
    cores=8,
    threads=8,
    digest=1,
    digest_one_thread=1,
    memory_bytes=16 * GIB,
    free_memory_bytes=12 * GIB,
    directory="/work",
    free_disk_bytes=100 * GIB,
    free_shared_bytes=8 * GIB,
    open_files=65536,
)
GPU = Gpu("H200", 140 * GIB)


def report(name="a", slots=1, clock=0.0, uncertainty=0.0, is_local=False, address=CARD.address, **facts):
    facts = replace(HEALTHY, **{"machine": f"boot-{name}", **facts})
    return HostReport(name, facts, slots, address, Clock(clock, uncertainty), is_local=is_local)


def checks(findings):
    return [(finding.severity.value, finding.hosts, finding.check) for finding in findings]


def test_a_healthy_host_gives_no_finding():
    assert check_host(report()) == []
    assert check_cluster([report("a"), report("b"), report("c")]) == []


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"python": "3.9.2"}, ("error", "python")),
        ({"torch": "", "torch_error": "OSError: libcudart.so.12"}, ("error", "torch")),
        ({"torch": "2.5.1"}, ("error", "torch")),
        ({"directory_error": "there is no such folder"}, ("error", "directory")),
        ({"free_disk_bytes": GIB}, ("warning", "disk")),
        ({"free_disk_bytes": 1 << 20}, ("error", "disk")),
        ({"free_memory_bytes": GIB // 2}, ("warning", "memory")),
        ({"free_memory_bytes": GIB // 8}, ("error", "memory")),
        ({"free_shared_bytes": 64 << 20}, ("warning", "shared-memory")),
        ({"open_files": 256}, ("warning", "open-files")),
        ({"driver_gpus": (GPU,), "driver": "550.1"}, ("warning", "gpu")),
        ({"resolved": ("127.0.1.1",)}, ("warning", "host-name")),
        ({"resolved": ("::1", "127.0.0.1")}, ("warning", "host-name")),
        ({"resolved": ()}, ("warning", "host-name")),
        ({"interfaces": (LOOPBACK, replace(CARD, is_wireless=True))}, ("warning", "interface")),
        ({"interfaces": (LOOPBACK, replace(CARD, speed_mbit=100))}, ("warning", "interface-speed")),
        ({"interfaces": (LOOPBACK,)}, ("error", "interface")),
        ({"environment": {"GLOO_SOCKET_IFNAME": "eth7"}}, ("error", "interface")),
    ],
)
def test_each_fault_of_a_host_is_found_alone_and_named(facts, expected):
    severity, check = expected
    findings = check_host(report("node7", **facts))
    assert checks(findings) == [(severity, ("node7",), check)]
    assert findings[0].fix
    assert would_train(findings) == (severity == "warning")


@pytest.mark.parametrize(
    "facts",
    [
        {"resolved": ("127.0.1.1", "10.0.0.1")},
        {"resolved": ("127.0.1.1",), "environment": {"GLOO_SOCKET_IFNAME": "eth0"}},
        {"open_files": -1},
        {"free_shared_bytes": None},
        {"gpus": (GPU, GPU), "driver_gpus": (GPU, GPU)},
        {"driver_gpus": (GPU,), "environment": {"CUDA_VISIBLE_DEVICES": ""}},
        {"interfaces": (replace(CARD, speed_mbit=None),)},
        {"environment": {"NCCL_SOCKET_IFNAME": "^docker0,lo"}},
    ],
)
def test_what_only_looks_like_a_fault_is_none(facts):
    assert check_host(report(slots=2, **facts)) == []


def test_a_machine_alone_needs_no_network():
    alone = report(resolved=("127.0.1.1",), interfaces=(LOOPBACK,), address="127.0.0.1")
    assert check_host(alone, is_alone=True) == []
    assert check_host(alone) != []


def test_more_workers_than_gpus_are_an_error_that_says_how_many_fit():
    (finding,) = check_host(report("a", slots=4, gpus=(GPU, GPU)))
    assert finding.severity is Severity.ERROR
    assert "a:2" in finding.fix


def test_an_interface_that_is_not_there_is_answered_with_those_that_are():
    (finding,) = check_host(replace(report(address=""), wanted_interface="eth7"))
    assert finding.severity is Severity.ERROR
    assert "no interface eth7" in finding.seen
    assert "eth0, lo" in finding.expected


def test_a_loopback_name_is_mended_with_the_address_the_others_use():
    (finding,) = check_host(report(resolved=("127.0.1.1",)))
    assert "127.0.1.1" in finding.seen
    assert finding.fix.endswith("&& echo '10.0.0.1 box' | sudo tee -a /etc/hosts")


def test_the_command_for_a_loopback_name_leaves_other_names_alone(tmp_path):
    (finding,) = check_host(report(resolved=("127.0.1.1",)))
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost box box.local\n127.0.1.1 box\n10.0.0.7 box7 inbox\n")
    command = finding.fix.replace("sudo ", "").replace("/etc/hosts", str(hosts))
    subprocess.run(command, shell=True, check=True, stdout=subprocess.DEVNULL)
    assert hosts.read_text() == "127.0.0.1 localhost box.local\n127.0.1.1\n10.0.0.7 box7 inbox\n10.0.0.1 box\n"


@pytest.mark.parametrize(
    ("field", "value", "severity", "check"),
    [
        ("poseidon", "0.2.0", "error", "poseidon-version"),
        ("torch", "2.12.0", "error", "torch-version"),
        ("numpy", "1.26.4", "warning", "numpy-version"),
        ("python", "3.12.1", "warning", "python-version"),
        ("digest_one_thread", 2, "warning", "arithmetic"),
        ("digest", 2, "warning", "arithmetic"),
    ],
)
def test_the_host_that_differs_is_named(field, value, severity, check):
    hosts = [report("a"), report("b", **{field: value}), report("c")]
    assert checks(check_cluster(hosts)) == [(severity, ("b",), check)]


def test_a_version_is_mended_with_that_of_the_others():
    (finding,) = check_cluster([report("a"), report("b", poseidon="0.2.0"), report("c")])
    assert finding.fix == "/venv/bin/python -m pip install CHECKOUT  (a checkout or wheel of poseidon-dl==0.1.0)"


def test_between_two_hosts_the_first_is_right():
    assert checks(check_cluster([report("a", torch="2.12.0"), report("b")])) == [("error", ("b",), "torch-version")]
    assert odd_ones({"a": 1, "b": 2, "c": 2}) == (2, {"a": 1})


def test_different_thread_counts_matter_only_if_they_round_differently():
    assert check_cluster([report("a"), report("b", threads=4)]) == []
    (finding,) = check_cluster([report("a"), report("b", threads=4, digest=5), report("c")])
    assert "OMP_NUM_THREADS=8" in finding.fix


def test_one_name_for_a_machine():
    hosts = [report("a", machine="m"), report("b", machine="m")]
    assert checks(check_cluster(hosts)) == [("warning", ("a", "b"), "same-machine")]


def test_gpus_must_be_on_all_hosts_or_none():
    with_gpu = {"gpus": (GPU,), "gpu_digest": 1, "driver": "550.1"}
    hosts = [report("a", **with_gpu), report("b", **with_gpu), report("c")]
    assert checks(check_cluster(hosts)) == [("error", ("c",), "gpu")]


def test_gpus_that_differ_are_warned_of():
    one = {"gpus": (GPU,), "gpu_digest": 1, "driver": "550.1"}
    other = {"gpus": (Gpu("T4", GIB),), "gpu_digest": 2, "driver": "535.2"}
    found = checks(check_cluster([report("a", **one), report("b", **other), report("c", **one)]))
    assert found == [("warning", ("b",), check) for check in ("arithmetic", "gpu", "gpu-driver")]


def test_cards_that_differ_are_warned_of():
    hosts = [
        report("a"),
        report("b", interfaces=(replace(CARD, mtu=9000, speed_mbit=1000),)),
        report("c"),
    ]
    found = check_cluster(hosts)
    assert checks(found) == [("warning", ("b",), "mtu"), ("warning", ("b",), "interface-speed")]
    assert found[0].fix == "sudo ip link set eth0 mtu 1500"


@pytest.mark.parametrize(
    ("hosts", "wrong"),
    [
        ([report("a", is_local=True), report("b", clock=30.0), report("c", clock=0.01)], ["b"]),
        ([report("a", clock=30.0), report("b", clock=30.1), report("c", clock=0.0), report("d", clock=30.0)], ["c"]),
        ([report("a", clock=-2.0), report("b", clock=0.1)], ["a"]),
        ([report("a", is_local=True), report("b", clock=-2.0)], ["b"]),
        ([report("a", is_local=True), report("b", clock=0.4), report("c", clock=-0.4)], []),
        # What a slow answer cannot tell is not held against the host.
        ([report("a", is_local=True), report("b", clock=1.0, uncertainty=0.8)], []),
    ],
)
def test_the_clock_that_is_wrong_is_found(hosts, wrong):
    found = check_cluster(hosts)
    assert [finding.hosts[0] for finding in found] == wrong
    assert all(finding.check == "clock" for finding in found)


def test_the_address_others_use():
    second = Interface("eth1", "192.168.0.5", mtu=1500)
    facts = replace(HEALTHY, interfaces=(LOOPBACK, CARD, second))
    assert choose_address(facts, "eth1", "10.0.0.1", []) == "192.168.0.5"
    assert choose_address(facts, "eth9", "10.0.0.1", []) == ""
    assert choose_address(facts, "", "10.0.0.1", ["192.168.0.5"]) == "10.0.0.1"
    assert choose_address(replace(facts, ssh_server="192.168.0.5"), "", "box", []) == "192.168.0.5"
    assert choose_address(facts, "", "127.0.0.1", ["", "192.168.0.5"]) == "192.168.0.5"
    assert choose_address(facts, "", "localhost", []) == "10.0.0.1"
    assert choose_address(replace(facts, environment={"GLOO_SOCKET_IFNAME": "eth1"}), "", "a", []) == "192.168.0.5"
    assert choose_address(replace(facts, interfaces=(LOOPBACK,)), "", "a", []) == "127.0.0.1"


def test_facts_survive_their_journey_and_other_versions():
    facts = replace(HEALTHY, gpus=(GPU,))
    data = to_json(facts)
    assert host_from_json(data) == facts
    assert host_from_json({**data, "smell": "fine"}) == facts
    del data["numpy"]
    assert host_from_json(data) == replace(facts, numpy="")


def test_words_of_the_trade():
    assert is_loopback("127.0.1.1")
    assert is_loopback("::1")
    assert not is_loopback("10.0.0.1")
    assert not is_loopback("box")
    assert version_numbers("2.13.0+cpu") == (2, 13)
    assert version_numbers("") == (0, 0)
