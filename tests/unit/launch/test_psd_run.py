from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from poseidon.errors import ConfigError
from poseidon.launch import psd_run, run
from poseidon.launch.hosts import Host, parse_cluster
from poseidon.launch.launcher import JobSettings


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("python model.py --steps 10", ["python model.py --steps 10"]),
        ("python a.py,python b.py", ["python a.py", "python b.py"]),
        ("python a.py --x 1, /opt/bin/python3.11 b.py", ["python a.py --x 1", " /opt/bin/python3.11 b.py"]),
        ("python a.py --layers 10,20", ["python a.py --layers 10,20"]),
        ("python a.py 'x,python y',python b.py", ["python a.py 'x,python y'", "python b.py"]),
        ('python a.py "it\'s, python z"', ['python a.py "it\'s, python z"']),
    ],
)
def test_commas_between_commands_separate_and_others_do_not(text: str, parts: list[str]) -> None:
    assert psd_run.split_commands(text) == parts


@pytest.mark.parametrize(
    ("text", "python", "words"),
    [
        ("python m.py --a 'b c'", "", ("m.py", "--a", "b c")),
        ("python3 -u m.py", "", ("m.py",)),
        ("/opt/venv/bin/python -m pkg.train -u", "/opt/venv/bin/python", ("-m", "pkg.train", "-u")),
    ],
)
def test_what_a_command_runs(text: str, python: str, words: tuple[str, ...]) -> None:
    assert psd_run.read_command(text) == psd_run.Command(python, words)


@pytest.mark.parametrize(
    ("text", "nodes", "match"),
    [
        ("", ["a"], "does not begin with python"),
        ("cd x && python m.py", ["a"], "'cd x && python m.py' does not begin with python"),
        ("python", ["a"], "names no script"),
        ("python -c 'print(1)'", ["a"], "names no script"),
        ("python -m", ["a"], "names no script"),
        ("python a.py, python b.py", ["a", "b", "c"], "there are 2 commands for 3 worker nodes"),
        ("python a.py,", ["a", "b"], "does not begin with python"),
        ("python a.py 'x", ["a"], "an unclosed quote '"),
        ("python a.py, /x/python b.py", ["a", "b"], "different interpreters"),
    ],
)
def test_commands_that_make_no_sense_are_refused(text: str, nodes: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        psd_run.read_commands(text, nodes)


def test_commands_follow_their_nodes_when_the_master_comes_first() -> None:
    nodes = ["a", "b", "a", "c:5000"]
    cluster = parse_cluster({"worker_nodes": nodes, "master_node": "c"})
    commands = psd_run.read_commands("python 1.py,python 2.py,python 3.py,python 4.py", nodes)
    by_rank = [command.words[0] for command in psd_run.order_by_rank(commands, nodes, cluster)]
    assert [(host.name, host.slots) for host in cluster.hosts] == [("c", 1), ("a", 2), ("b", 1)]
    assert by_rank == ["4.py", "1.py", "3.py", "2.py"]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("{", "is not JSON"),
        ("[]", "has no worker_nodes"),
        ('{"server_nodes": ["a"]}', "has no worker_nodes"),
        ('{"worker_nodes": []}', "must be a list of addresses"),
        (
            '{"worker_nodes": ["a"], "worker_node": 1}',
            "'worker_node'; did you mean 'worker_nodes'? known: master_node, pem_file, server_nodes",
        ),
        ('{"worker_nodes": ["a"], "server_nodes": "a"}', "server_nodes is 'a'; it must be a list"),
        ('{"worker_nodes": ["a"], "pem_file": 3}', "pem_file is 3; it must be a text"),
    ],
)
def test_cluster_files_that_make_no_sense_are_refused_in_one_line(
    content: str, match: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(content)
    assert psd_run.main(["-c", str(file), "python m.py"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("psd_run: ")
    assert said.count("\n") == 1
    assert match in said


def test_a_missing_cluster_file_or_script_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert psd_run.main(["-c", "none.json", "python m.py"]) == 1
    assert "none.json" in capsys.readouterr().err
    Path("c.json").write_text('{"worker_nodes": ["localhost", "localhost"]}')
    Path("m.py").touch()
    assert psd_run.main(["-c", "c.json", "python m.py, python other.py"]) == 1
    assert "there is no script" in capsys.readouterr().err


@dataclass
class Recorded:
    """What would have been run."""

    settings: JobSettings | None = None
    log_dir: str = ""

    def __call__(self, settings: JobSettings, chosen: Any, *_: Any) -> int:
        self.settings, self.log_dir = settings, chosen["log_dir"].value
        return 0


def test_the_originals_arguments_become_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = Recorded()
    monkeypatch.setattr(run, "run_job", recorded)
    monkeypatch.chdir(tmp_path)
    data = {
        "worker_nodes": ["192.0.2.11", "192.0.2.15"],
        "server_nodes": ["192.0.2.70", "192.0.2.80"],
        "master_node": "192.0.2.9",
        "virtualenv": "/home/ubuntu/sandbox",
        "username": "ubuntu",
        "pem_file": "/keys/cluster.pem",
    }
    Path("c.json").write_text(json.dumps(data))
    assert psd_run.main(["--cluster_config", "c.json", "--out", "logs", "python m.py --n 1,python m.py --n 2"]) == 0
    assert recorded.settings is not None
    python = "/home/ubuntu/sandbox/bin/python"
    assert recorded.settings.hosts == tuple(
        Host(name, user="ubuntu", identity="/keys/cluster.pem", python=python) for name in data["worker_nodes"]
    )
    auto = ("-m", "poseidon.auto", "m.py", "--n")
    assert recorded.settings.each == ((*auto, "1"), (*auto, "2"))
    assert recorded.settings.script == "m.py"
    assert recorded.log_dir == "logs"
    said = capsys.readouterr().err
    assert "server_nodes: not needed" in said
    assert "192.0.2.9 is not a worker, so the workers meet on 192.0.2.11" in said


def test_one_command_is_for_all_and_logs_have_a_place_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded()
    monkeypatch.setattr(run, "run_job", recorded)
    monkeypatch.chdir(tmp_path)
    Path("c.json").write_text('{"worker_nodes": ["127.0.0.1", "127.0.0.1"]}')
    Path("m.py").touch()
    assert psd_run.main(["-c", "c.json", "--env", "TF_USE_LEGACY_KERAS=1", "python m.py"]) == 0
    assert recorded.settings is not None
    assert recorded.settings.env == {"TF_USE_LEGACY_KERAS": "1"}
    assert recorded.settings.each == ()
    assert [(host.name, host.slots) for host in recorded.settings.hosts] == [("127.0.0.1", 2)]
    assert recorded.log_dir.startswith("poseidon_log_")
