from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from poseidon.cli.main import main
from poseidon.errors import ConfigError
from poseidon.launch import run
from poseidon.launch.hosts import Host
from poseidon.launch.run_settings import resolve, show


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    return parser.parse_args(list(words))


@pytest.mark.parametrize(
    ("words", "argv", "script"),
    [
        (["t.py", "--lr", "1"], ["t.py", "--lr", "1"], "t.py"),
        (["--nproc", "2", "t.py", "--nproc", "3"], ["t.py", "--nproc", "3"], "t.py"),
        (["--", "t.py"], ["t.py"], "t.py"),
        (["t.py", "--h", "3", "--n", "4"], ["t.py", "--h", "3", "--n", "4"], "t.py"),
        (["-m", "pkg.mod", "--x", "-m", "y"], ["-m", "pkg.mod", "--x", "-m", "y"], None),
        (["--as-caffe", "t.py", "a"], ["-m", "poseidon.caffe.as_caffe", "t.py", "a"], "t.py"),
        (["--auto", "t.py", "a"], ["-m", "poseidon.auto", "t.py", "a"], "t.py"),
        (["--as-ddp", "t.py", "a"], ["-m", "poseidon.trainers", "--asked", "t.py", "a"], "t.py"),
        (["--as-ddp", "-m", "mod"], ["-m", "poseidon.trainers", "--asked", "-m", "mod"], None),
        (
            ["--auto", "--scale-lr", "--batch", "total", "--eval", "shard", "-m", "mod"],
            ["-m", "poseidon.auto", "--scale-lr", "--batch", "total", "--eval", "shard", "-m", "mod"],
            None,
        ),
        (
            ["--auto", "--local", "0", "--density", "0", "--seed", "0", "--timeout", "0", "t.py"],
            ["-m", "poseidon.auto", "--local", "0", "--density", "0.0", "--seed", "0", "--timeout", "0.0", "t.py"],
            "t.py",
        ),
    ],
)
def test_what_runs(words: list[str], argv: list[str], script: str | None) -> None:
    program = run.read_program(parse(*words))
    assert list(program.argv) == argv
    assert program.script == script


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ([], "no script given"),
        (["-m"], "-m needs a module's name"),
        (["--auto", "--as-caffe", "t.py"], "use one of them"),
        (["--scale-lr", "t.py"], "--scale-lr needs --auto"),
        (["--rank", "0", "t.py"], "--rank needs --auto"),
        (["--as-ddp", "--auto", "t.py"], "leave --auto and --as-caffe out"),
        (["--as-caffe", "-m", "x"], "scripts, not modules"),
    ],
)
def test_what_cannot_run(words: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        run.read_program(parse(*words))


@pytest.mark.parametrize(
    ("source", "options", "is_taken"),
    [
        ("import accelerate", [], True),
        ("def main():\n    from transformers.trainer import Trainer", [], True),
        ("import pytorch_lightning as pl", [], True),
        ("import accelerate", ["--no-as-ddp"], False),
        ("import accelerate", ["--auto"], False),
        ("import accelerate, poseidon.api", [], False),
        ("import torch", [], False),
        ("from .transformers import x", [], False),
        ("import (", [], False),
    ],
)
def test_scripts_with_a_trainer_get_poseidon_as_torchs_class(
    tmp_path: Path, source: str, options: list[str], is_taken: bool
) -> None:
    script = tmp_path / "t.py"
    script.write_text(source)
    args = parse(*options, str(script), "--lr", "1")
    program = run.take_place(run.read_program(args), args)
    assert (program.argv == ("-m", "poseidon.trainers", str(script), "--lr", "1")) == is_taken
    assert program.script == str(script)


def test_settings_come_from_arguments_files_environment_and_defaults_in_this_order() -> None:
    environ = {"POSEIDON_RUN_RESTARTS": "1", "POSEIDON_RUN_GRACE": "2.5", "POSEIDON_RUN_HANG_TIMEOUT": "9"}
    file = {"restarts": 2, "grace": 7}
    chosen = resolve({"restarts": 3}, file, "c.toml", environ)
    assert (chosen["restarts"].value, chosen["restarts"].origin) == (3, "argument --restarts")
    assert (chosen["grace"].value, chosen["grace"].origin) == (7.0, "file c.toml")
    assert (chosen["hang_timeout"].value, chosen["hang_timeout"].origin) == (
        9.0,
        "environment POSEIDON_RUN_HANG_TIMEOUT",
    )
    assert (chosen["log_dir"].value, chosen["log_dir"].origin) == ("", "default")
    text = show(chosen)
    assert "restarts      3  (argument --restarts)" in text
    assert "log-dir" not in text, "what has no value is not shown"


@pytest.mark.parametrize(
    ("given", "file", "environ", "match"),
    [
        ({"restarts": -1}, {}, {}, "--restarts is -1, expected at least 0"),
        ({"master_port": 0}, {}, {}, "--master-port is 0, expected a port from 1 to 65535"),
        ({"ssh_port": 70000}, {}, {}, "--ssh-port is 70000, expected a port from 1 to 65535"),
        ({}, {"master_port": 65536}, {}, r"c\.json: master_port is 65536, expected a port"),
        ({}, {"restart": 1}, {}, r"unknown setting in c\.json 'restart'; did you mean 'restarts'\? known: .*restarts"),
        ({}, {"restarts": "many"}, {}, r"c\.json: restarts is 'many', expected a whole number"),
        ({}, {"restarts": 1.5}, {}, r"c\.json: restarts is 1\.5, expected a whole number"),
        ({}, {"restarts": True}, {}, r"c\.json: restarts is True, expected a whole number"),
        ({}, {}, {"POSEIDON_RUN_GRACE": "x"}, "environment variable POSEIDON_RUN_GRACE is 'x', expected a number"),
    ],
)
def test_settings_that_make_no_sense(
    given: dict[str, int], file: dict[str, object], environ: dict[str, str], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        resolve(given, file, "c.json", environ)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--trace", "5"], "argument --trace: '5' is given, expected a range of steps such as 100:110"),
        (["--balance-max", "0"], "argument --balance-max: '0' is given, expected a whole number above 0"),
        (["--grace", "nan"], "argument --grace: 'nan' is given, expected a number"),
    ],
)
def test_a_value_that_cannot_be_read_is_answered_with_what_is_expected(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(*words, "t.py")
    assert capsys.readouterr().err.rstrip().endswith(complaint)


def test_settings_for_all_hosts_give_way_to_a_hosts_own() -> None:
    values = {"user": "ann", "ssh_port": 2222, "identity": "", "python": "py", "directory": "", "interface": "eth1"}
    assert run.complete_host(Host("a"), values) == Host("a", user="ann", port=2222, python="py", interface="eth1")
    assert run.complete_host(Host("a", user="bob", port=22), values).user == "bob"
    assert run.complete_host(Host("localhost"), values).user == "", "nobody logs in on this machine"


def test_variables_for_the_workers() -> None:
    assert run.parse_variables(["A=1=2", "B"], {"B": "x"}) == {"A": "1=2", "B": "x"}
    for word in ("C", "=1"):
        with pytest.raises(ConfigError, match="--env"):
            run.parse_variables([word], {})


def test_gpus_are_counted_without_torch() -> None:
    assert run.count_gpus({"CUDA_VISIBLE_DEVICES": "0,2"}) == 2
    assert run.count_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert run.count_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nproc", "2", "--hosts", "a", "t.py"], "use one of them; write --hosts name:2"),
        (["--hosts", "a", "--hostfile", "f", "t.py"], "--hosts and --hostfile say the same thing"),
        (["--nproc", "0", "t.py"], "--nproc is 0"),
        (["--nproc", "2", "none.py"], "there is no script"),
        (["--hosts", "a,a", "none.py"], "names a twice"),
        (["--hostfile", "none.txt", "none.py"], "cannot read host file none.txt"),
        (["-c", "none.toml", "none.py"], "cannot read host file none.toml"),
        (["--nproc", "1", "--env", "NO_SUCH_VARIABLE", "good.py"], "--env 'NO_SUCH_VARIABLE'"),
    ],
)
def test_mistakes_are_one_line_and_nothing_starts(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "good.py").touch()
    assert main(["run", *words]) == 1
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()
