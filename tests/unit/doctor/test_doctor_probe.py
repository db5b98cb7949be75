import argparse
import io
import json
import time

import pytest
import torch

import poseidon
from poseidon.cli import main as cli
from poseidon.doctor import command, machine
from poseidon.doctor.conduct import Examination
from poseidon.doctor.facts import Gpu, HostFacts, HostReport, PairFacts, host_from_json
from poseidon.doctor.findings import error, warning
from poseidon.doctor.probe import Probe
from poseidon.doctor.writing import examination_to_json, format_examination
from poseidon.job.interfaces import read_interfaces
from poseidon.job.settings import PROBE_CLOCK_OFFSET
from poseidon.launch.ssh import is_here

BAD = error("b", "ports", "port 29500 (timed out)", "open ports", "sudo ufw allow from 10.0.0.1")
SO_SO = warning("a", "clock", "30 s ahead", "less", "sudo timedatectl set-ntp true")
HOST = HostReport("a", HostFacts("a", python="3.11.7"))


@pytest.fixture
def probe():
    one = Probe()
    yield one
    one.close()


def ask(probe, question, **details):
    return json.loads(json.dumps(probe.answer(json.dumps({"ask": question, **details}))))


@pytest.fixture
def _same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_same_threads")
def test_a_probe_tells_the_facts_of_this_machine(probe, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MKL_CBWR", "to be replaced")
    answer = ask(probe, "facts", directory=str(tmp_path), slots=1, env={"MKL_CBWR": "AVX2"})
    facts = host_from_json(answer["answer"])
    assert facts.poseidon == poseidon.__version__
    assert facts.torch
    assert facts.digest == facts.digest_one_thread is not None
    assert facts.threads == 1
    assert facts.environment["MKL_CBWR"] == "AVX2"
    assert facts.free_memory_bytes > 0
    assert facts.directory_error == ""


def test_the_clock_can_be_set_wrong_for_rehearsals(probe, monkeypatch):
    monkeypatch.setenv(PROBE_CLOCK_OFFSET.name, "3600")
    assert 3500 < ask(probe, "clock")["answer"] - time.time() < 3700


def test_one_bad_question_does_not_end_a_probe(probe):
    assert "KeyError" in ask(probe, "weather")["error"]
    assert "error" in probe.answer("no json")
    assert "answer" in ask(probe, "clock")


def test_a_probe_measures_its_way_to_itself(probe):
    token = "00" * 16
    listening = ask(probe, "listen", address="127.0.0.1", ports=[], token=token)["answer"]
    details = {"bulk_port": listening["bulk_port"], "ports": [], "packets": [1000], "seconds": 0.05, "streams": 2}
    found = ask(probe, "measure", address="127.0.0.1", token=token, **details)["answer"]
    assert found["ports"] == {str(listening["bulk_port"]): "open"}
    assert found["packets"] == {"1000": True}
    assert found["many_stream_bits_per_s"] > 0
    assert ask(probe, "towards", peers=["127.0.0.1", "no such host"])["answer"] == ["127.0.0.1", ""]


def test_loopback_is_among_the_interfaces():
    loopback = next(one for one in read_interfaces() if one.address == "127.0.0.1")
    assert loopback.is_loopback
    assert loopback.mtu >= 1500
    assert loopback.speed_mbit is None


def test_what_the_system_s_files_say():
    assert machine.cpu_model("processor : 0\nmodel name\t: Some CPU @ 2 GHz\n") == "Some CPU @ 2 GHz"
    assert machine.memory_field("MemTotal: 10 kB\nMemAvailable:  4 kB\n", "MemAvailable") == 4096
    assert machine.memory_field("", "MemTotal") == 0
    assert machine.parse_nvidia_smi("NVIDIA H200, 570.86.15, 143771\n") == (
        (Gpu("NVIDIA H200", 143771 << 20),),
        "570.86.15",
    )
    assert machine.parse_nvidia_smi("No devices were found\n") == ((), "")


def test_the_report_shows_hosts_links_and_what_mends_the_worst_first():
    pairs = (PairFacts("a", "b", {29500: "timed out", 4: "open"}, 1e-4, 1e8, 2e8, "", {1500: True}),)
    text = format_examination(Examination((HOST,), pairs, (BAD, SO_SO)))
    for part in ("3.11.7", "100 us", "100 Mbit/s", "200 Mbit/s", "1500", "1 of 2 open", "error: b: ports"):
        assert part in text
    assert "fix:      sudo ufw allow from 10.0.0.1" in text
    assert text.endswith("training would not work: 1 error, 1 warning")


def test_of_many_links_the_slowest_are_shown():
    pairs = [PairFacts("a", f"h{number}", {1: "open"}, 1e-4, 1e6 * number, 1.0) for number in range(2, 102)]
    text = format_examination(Examination((HOST,), tuple(pairs), ()))
    assert "h2 " in text
    assert "h101" not in text
    assert "100 links" in text


@pytest.mark.parametrize(
    ("findings", "is_strict", "status"),
    [((), False, 0), ((), True, 0), ((SO_SO,), False, 0), ((SO_SO,), True, 1), ((SO_SO, BAD), False, 1)],
)
def test_the_status_says_whether_training_would_work(findings, is_strict, status):
    assert command.exit_status(Examination((), (), findings), is_strict) == status


def test_the_examination_as_data():
    data = json.loads(json.dumps(examination_to_json(Examination((HOST,), (), (BAD,)))))
    assert data["would_train"] is False
    assert data["hosts"][0]["facts"]["python"] == "3.11.7"
    assert data["findings"] == [
        {
            "severity": "error",
            "hosts": ["b"],
            "check": "ports",
            "seen": "port 29500 (timed out)",
            "expected": "open ports",
            "fix": "sudo ufw allow from 10.0.0.1",
        }
    ]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--seconds", "0"], "--seconds is 0"),
        (["--streams", "0"], "--streams is 0"),
        (["--timeout", "-1"], "--timeout is -1"),
        (["--ports", "x"], "ports 'x'"),
        (["--hosts", "a,,b"], "empty place"),
        (["--hostfile", "/no/such/file"], "cannot read"),
    ],
)
def test_wrong_options_are_answered_before_anything_starts(words, complaint, capsys, monkeypatch):
    monkeypatch.setattr(command, "examine", lambda *_, **__: pytest.fail("nothing may be started"))
    assert cli.main(["doctor", *words]) == 1
    assert complaint in capsys.readouterr().err


def parse(*words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def test_hosts_are_reached_as_a_job_would_reach_them(tmp_path, monkeypatch):
    monkeypatch.setenv("POSEIDON_RUN_PYTHON", "/venv/bin/python")
    first, second = command.find_hosts(parse("--hosts", "a,bob@b:2", "--user", "ann", "--interface", "eth1"))
    assert (first.user, first.python, first.interface) == ("ann", "/venv/bin/python", "eth1")
    assert (second.user, second.slots) == ("bob", 2)
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps({"hosts": ["a", "b"], "identity": "/key", "master_port": 4000}))
    first, second = command.find_hosts(parse("-c", str(file)))
    assert (first.identity, first.service_port, second.service_port) == ("/key", 4000, None)


def test_without_hosts_it_is_this_machine_with_a_worker_for_each_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    (host,) = command.find_hosts(parse())
    assert host.slots == 2
    assert is_here(host)


def test_progress_is_for_terminals_only(monkeypatch, capsys):
    command._tell("asking")
    assert capsys.readouterr().err == ""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    command._tell("asking")
    assert terminal.getvalue() == "\r\033[Kasking"
