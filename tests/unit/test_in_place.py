"""Poseidon in the place of torch's class: what is replaced, what is not, and what is said at the end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys, types
import torch
theirs = types.ModuleType("somebodys_library")
theirs.DDP = torch.nn.parallel.DistributedDataParallel
sys.modules["somebodys_library"] = theirs
import torch.distributed.checkpoint.state_dict as torchs_own
before = [torchs_own.DDP]

import poseidon
from poseidon.trainers import in_place
in_place.replace()
in_place.replace()  # once is enough, twice no harm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import DistributedDataParallel as Same

assert DistributedDataParallel is Same is theirs.DDP is torch.nn.parallel.DistributedDataParallel
assert issubclass(DistributedDataParallel, poseidon.DistributedDataParallel)
assert DistributedDataParallel.__name__ == "DistributedDataParallel"
assert [torchs_own.DDP] == before, "torch's own modules know the insides of its class"
assert poseidon.DistributedDataParallel is not DistributedDataParallel
net = torch.nn.Linear(2, 1)
os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="m", MASTER_PORT="1")
for _ in range(2):
    torch.optim.SGD(net.parameters(), lr=0.1).step()
for name in ("RANK", "WORLD_SIZE"):
    del os.environ[name]
model = torch.nn.parallel.DistributedDataParallel(net)
assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
assert in_place.wrapped == ["Linear, 3 parameters"]
assert DistributedDataParallel._get_active_ddp_module() is None, "the compiler asks"
"""


def test_the_class_is_replaced_wherever_programs_have_it() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], timeout=100, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("an optimizer steps, and no model was wrapped") == 1, "said early, and once"


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_job_that_wraps_nothing_is_told(
    is_asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from poseidon.trainers import __main__ as runner
    from poseidon.trainers import in_place

    script = tmp_path / "nothing.py"
    script.write_text("import sys; print(__name__, *sys.argv[1:]); sys.exit(0)")
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "m", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(in_place, "replace", lambda: None)
    monkeypatch.setattr(in_place, "choose_devices", lambda: None)
    monkeypatch.setattr(in_place, "wrapped", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["x", *(["--asked"] if is_asked else []), str(script), "--lr", "1"])
    assert runner.main() == (1 if is_asked else 0)
    printed = capsys.readouterr()
    assert printed.out == "__main__ --lr 1\n"
    assert "has wrapped no model" in printed.err
    in_place.wrapped.append("Linear")
    monkeypatch.setattr(sys, "argv", ["x", "--asked", str(script)])
    assert runner.main() == 0
