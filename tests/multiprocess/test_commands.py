"""The commands and scripts that a newcomer runs first."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from made_runs import make_run
from poseidon.cli.main import main
from poseidon.launch.local import run_workers

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_quickstart_gives_the_same_accuracy_with_one_worker(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["quickstart", "--workers", "2", "--epochs", "1", "--machines", "0"]) == 0
    out, progress = capfd.readouterr()
    assert "route" in out, "no plan was shown"
    two, one = re.findall(r"^([12]) +\d+ +([\d.]+)%", out, flags=re.MULTILINE)
    assert (two[0], one[0]) == ("2", "1")
    # The same sums in another order: at most a few of the 1,000 test images may fall on the other side.
    assert abs(float(two[1]) - float(one[1])) <= 0.5
    assert float(one[1]) > 70
    shown = re.findall(r"loss ([\d.]+)$", progress, flags=re.MULTILINE)
    assert shown[-1] == re.findall(r"^1 .*% +([\d.]+)", out, flags=re.MULTILINE)[0], "two different losses were shown"


def test_an_interrupted_quickstart_ends_with_one_line() -> None:
    command = [sys.executable, "-m", "poseidon", "quickstart", "--workers", "2", "--machines", "0"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert any("training with 2 workers" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr.read() == "poseidon quickstart: interrupted\n"


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "poseidon", "status", str(make_run(tmp_path / "run")), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.wait(60) == 141
        assert b"Traceback" not in process.stderr.read()


def test_output_that_cannot_be_written_ends_with_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "poseidon", "completion", "bash"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "poseidon completion: cannot write its output, or a file: No space left on device\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_without_input_or_output_does_its_work(closed: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('done', 'w').close(); print('done')")
    command = f"exec {sys.executable} -m poseidon run --nproc 1 --log-dir logs train.py {closed}"
    ended = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, (tmp_path / "done").exists()) == (0, True)
    assert (tmp_path / "logs" / "worker-0.log").read_text() == "done\n"
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "1"], "--workers is 1; it takes at least 2"),
        (["--batch", "63"], "--batch is 63, which 4 workers cannot share evenly"),
        (["--epochs", "0"], "--epochs is 0; it takes at least 1"),
        (["--machines", "1"], "--machines is 1; it must be 2 to 8"),
    ],
)
def test_quickstart_refuses_what_cannot_work(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quickstart", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_first_steps_runs_on_two_workers(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_workers([sys.executable, str(EXAMPLES / "first_steps.py")], 2) == 0
    assert "512x32" in capfd.readouterr().out


def test_the_guide_shows_the_script_that_is_tested() -> None:
    guide = (EXAMPLES.parent / "docs" / "first-steps.md").read_text()
    shown = re.search(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    assert shown is not None
    code = [re.sub(r" +#", "  #", line) for line in shown[1].splitlines() if line.strip()]
    script = (EXAMPLES / "first_steps.py").read_text().splitlines()
    assert set(code) <= set(script)


def test_plan_of_a_network_of_the_zoo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    options = ["--batch", "8", "--machines", "4", "--rate", "1gbit", "--device-gflops", "50", "--json", str(file)]
    assert main(["plan", "lenet", *options]) == 0
    assert "factors" in capsys.readouterr().out
    routes = {entry["unit"]: entry["route"] for entry in json.loads(file.read_text())["entries"]}
    assert routes["5"] == "factors"


def test_plan_of_a_users_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_models.py").write_text(
        "import torch\ndef make(batch):\n    return torch.nn.Linear(900, 900), torch.zeros(batch, 900)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["plan", "my_models:make", "--batch", "4", "--device-gflops", "50"]) == 0
    assert "900x900 + 900" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "neither module:callable nor a .prototxt"),
        (["no_such_module:make"], "cannot load no_such_module:make"),
        (["lenet", "--machines", "0"], "at least 1 machine"),
        (["lenet", "--rate", "fast"], "rate 'fast'"),
        (["lenet", "--batch", "0"], "--batch is 0"),
        (["lenet", "--batch", str(10**20)], "so many samples of lenet take"),
    ],
)
def test_plan_refuses_what_makes_no_sense(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 1
    assert message in capsys.readouterr().err


ENDING = """
import atexit, sys, threading, time
from poseidon.job.closing import end_after_hooks

class Clinging:
    def __del__(self):
        while True:
            time.sleep(1)

def still_working():
    time.sleep(0.05)
    print("a thread has ended")

clinging = Clinging()
clinging.itself = clinging
atexit.register(lambda: print("first hook", end=""))
atexit.register(lambda: print("last hook"))
atexit.register(lambda: 1 / 0)
threading.Thread(target=still_working).start()
end_after_hooks(3)
sys.exit(3)
"""


def test_a_command_ends_after_its_hooks_whatever_the_interpreter_would_have_to_free() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 3
    assert ended.stdout == "a thread has ended\nlast hook\nfirst hook"
    assert "ZeroDivisionError" in ended.stderr


def test_output_that_nobody_reads_any_more_shows_in_the_status() -> None:
    code = "from poseidon.job.closing import end_after_hooks; print('x'); end_after_hooks(0)"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) == 120
