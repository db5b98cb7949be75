"""``python -m poseidon.auto`` as a launcher starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from poseidon.launch.local import run_workers

SCRIPTS = Path(__file__).parents[1] / "auto_scripts"


def auto(count: int, *words: str) -> int:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    return run_workers([sys.executable, "-m", "poseidon.auto", *words], count, environ)


def test_words_hash_alike_on_all_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = str(SCRIPTS / "text_stream.py")
    monkeypatch.chdir(tmp_path)
    assert auto(2, "--batch", "total", script) == 0
    ours = torch.load("text.pt")
    subprocess.run([sys.executable, script], env={**os.environ, "PYTHONHASHSEED": "0"}, check=True, timeout=60)
    alone = torch.load("text.pt")
    assert ours["words"] == alone["words"]
    for name, value in alone["model"].items():
        # Adam divides by small numbers, so sums in another order show more than elsewhere.
        torch.testing.assert_close(ours["model"][name], value, rtol=2e-4, atol=2e-4)


FAILING = """
import torch
from torch.utils.data import DataLoader

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    print("epoch", epoch)
    for batch in DataLoader(torch.arange(8.0).unsqueeze(1), batch_size=2):
        if epoch == 1 and 7 in batch:
            raise ValueError("sample 7 is broken")
        model(batch).sum().backward()
        optimizer.step()
"""


def test_a_failing_worker_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("failing.py").write_text(FAILING)
    assert auto(2, "failing.py") == 1
    captured = capfd.readouterr()
    assert captured.out.splitlines() == ["epoch 0", "epoch 1"]
    assert "worker 1 | epoch 1" in captured.err
    assert "ValueError: sample 7 is broken" in captured.err
    assert "poseidon: worker 1 ended with status 1" in captured.err
    assert "session.py" not in captured.err, "a traceback begins with the script"


SCRIPTED_GROUP = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"


@pytest.mark.parametrize(
    ("script", "count", "message"),
    [
        (SCRIPTED_GROUP, 2, "this script distributes itself"),
        (None, 1, "there is no script 'plain.py'"),
    ],
)
def test_what_cannot_work_is_said(
    script: str | None,
    count: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if script is not None:
        Path("plain.py").write_text(script)
    assert auto(count, "plain.py") == 1
    assert message in capfd.readouterr().err


def test_a_script_that_exits_keeps_its_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plain.py").write_text("import sys\nsys.exit(3)\n")
    assert auto(1, "plain.py") == 3


ENDING = """
from types import SimpleNamespace
from poseidon.following.patches import Patches

def work(original):
    raise {}("enough")

library = SimpleNamespace(work=print)
Patches().wrap(library, "work", work)
library.work()
"""


@pytest.mark.parametrize(
    ("error", "status", "calls"),
    [("SystemError", 1, ["plain.py", "patches.py", "plain.py"]), ("KeyboardInterrupt", 130, ["plain.py"])],
)
def test_a_traceback_begins_with_the_script_and_a_ctrl_c_tells_where_that_was(
    error: str,
    status: int,
    calls: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plain.py").write_text(ENDING.format(error))
    assert auto(1, "plain.py") == status
    shown = capfd.readouterr().err.splitlines()
    assert [Path(line.split('"')[1]).name for line in shown if line.startswith("  File ")] == calls
    assert f"{error}: enough" in shown
