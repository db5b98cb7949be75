"""Poseidon in the place of torch's class: what is said at the end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


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
