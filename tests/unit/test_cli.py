import argparse
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import poseidon
from poseidon.cli import main as cli
from poseidon.cli.parser import part_json, suggest
from poseidon.errors import EXTRAS, ConfigError, WorkerLostError


class Command(ModuleType):
    """A subcommand that does what a test tells it to."""

    def __init__(self) -> None:
        super().__init__("poseidon.launch.greet")
        self.error: BaseException | None = None
        self.names: list[str] = []

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("name")
        parser.add_argument("--status", type=int, default=0)

    def run(self, args: argparse.Namespace) -> int:
        if self.error is not None:
            raise self.error
        self.names.append(args.name)
        return int(args.status)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    one = Command()
    monkeypatch.setitem(sys.modules, one.__name__, one)
    monkeypatch.setitem(cli.COMMANDS, "greet", (one.__name__, "greet somebody"))
    monkeypatch.delenv("POSEIDON_TRACEBACK", raising=False)
    return one


def test_a_command_gets_its_arguments_and_gives_the_status(command: Command) -> None:
    assert cli.main(["greet", "ape"]) == 0
    assert cli.main(["greet", "bee", "--status", "3"]) == 3
    assert command.names == ["ape", "bee"]


def test_arguments_come_from_the_process_by_default(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["poseidon", "greet", "cat"])
    assert cli.main() == 0
    assert command.names == ["cat"]


@pytest.mark.parametrize(
    ("error", "status"), [(ConfigError("rate 'x' is wrong"), 1), (WorkerLostError("rank 'x' is wrong"), 75)]
)
def test_an_error_of_ours_is_one_line_and_a_status(
    command: Command, error: Exception, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    command.error = error
    assert cli.main(["greet", "ape"]) == status
    captured = capsys.readouterr()
    assert captured.err == f"poseidon greet: {error}\n"
    assert captured.out == ""


def test_the_traceback_is_shown_on_demand(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command.error = ConfigError("bad")
    monkeypatch.setenv("POSEIDON_TRACEBACK", "1")
    assert cli.main(["greet", "ape"]) == 1
    text = capsys.readouterr().err
    assert text.startswith("Traceback")
    assert text.endswith("poseidon greet: bad\n")


def test_a_bug_is_not_dressed_up(command: Command) -> None:
    command.error = ZeroDivisionError("oops")
    with pytest.raises(ZeroDivisionError):
        cli.main(["greet", "ape"])


def test_an_interrupt_ends_quietly(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    command.error = KeyboardInterrupt()
    assert cli.main(["greet", "ape"]) == 130
    assert capsys.readouterr().err == "poseidon greet: interrupted\n"


@pytest.mark.usefixtures("command")
def test_wrong_arguments_are_the_commands_own_affair(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["greet"])
    assert ended.value.code == 2
    assert "usage: poseidon greet" in capsys.readouterr().err


@pytest.mark.usefixtures("command")
def test_an_unknown_command_is_answered_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["grete"]) == 2
    text = capsys.readouterr().err
    assert "unknown command 'grete'" in text
    assert all(name in text for name in cli.COMMANDS)


@pytest.mark.usefixtures("command")
def test_no_command_is_answered_with_the_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    overview = capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == overview
    for name, (_, summary) in cli.COMMANDS.items():
        assert name in overview
        assert summary in overview


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"poseidon {poseidon.__version__}\n"


def test_a_command_is_loaded_only_when_asked_for(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def load(name: str) -> ModuleType:
        loaded.append(name)
        return command

    monkeypatch.setattr("poseidon.cli.main.importlib.import_module", load)
    cli.main(["greet", "ape"])
    assert loaded == ["poseidon.launch.greet"]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["greet", "you", "--statsu", "3"], "did you mean --status?"),
        (["lab", "statis"], "did you mean status?"),
        (["lab", "up", "--machins=3"], "did you mean --machines?"),
        (["completion", "bsh"], "did you mean bash?"),
        (["run", "--nprc", "2", "train.py"], "did you mean --nproc?"),
    ],
)
def test_a_word_that_is_nearly_right_is_named(
    words: list[str], meant: str, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.rstrip().endswith(meant)
    assert command.names == []


def test_nothing_is_suggested_for_what_is_far_from_everything() -> None:
    assert suggest("unrecognized arguments: --zzzzz x", ["--status", "--machines"]) == ""
    assert suggest("the following arguments are required: model", ["--model"]) == ""


def test_a_missing_package_is_named_with_its_extra(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    command.error = ModuleNotFoundError("No module named 'google'", name="google.protobuf")
    assert cli.main(["greet", "you"]) == 1
    said = capsys.readouterr().err
    assert "the package protobuf, which is not installed; the extra 'caffe' brings it" in said
    command.error = ModuleNotFoundError("No module named 'mine'", name="mine")
    with pytest.raises(ModuleNotFoundError):
        cli.main(["greet", "you"])


def test_extras_are_those_of_the_package() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for package, extra in EXTRAS.values():
        assert any(re.match(rf"{package}\b", line) for line in project["optional-dependencies"][extra]), (
            package,
            extra,
        )


@pytest.mark.parametrize("words", [["plan", "lenet", "--json"], ["simulate", "lenet", "--machines", "2", "--json"]])
def test_json_prints(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*words, "--device-gflops", "100"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)


@pytest.mark.parametrize("name", ["plan", "simulate"])
def test_a_command_without_its_model_says_so(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name])
    assert ended.value.code == 2
    assert "the following arguments are required: model" in capsys.readouterr().err


def test_json_takes_a_word_only_if_it_is_called_like_such_a_file() -> None:
    assert part_json(["plan", "--json", "alexnet", "--batch", "8"]) == ["plan", "--json=-", "alexnet", "--batch", "8"]
    assert part_json(["plan", "alexnet", "--json"]) == ["plan", "alexnet", "--json=-"]
    assert part_json(["plan", "alexnet", "--json", "out.json"]) == ["plan", "alexnet", "--json", "out.json"]
