"""What the quickstart says about emulated machines."""

from __future__ import annotations

import pytest

from poseidon.cli import quickstart
from poseidon.cli.main import main
from poseidon.errors import ConfigError


def test_comparison_names_the_ratio_to_ddp_and_to_the_bound() -> None:
    text = quickstart.format_comparison(
        {
            "linear": {"step_ms": 50.0, "sent_mb": 0.0, "loss": 2.2},
            "ddp": {"step_ms": 300.0, "sent_mb": 35.0, "loss": 2.0},
            "poseidon": {"step_ms": 75.0, "sent_mb": 1.4, "loss": 2.0},
            "net": {"parameters": 5_800_000},
        }
    )
    assert "6.0x" in text
    assert "1.5x" in text
    assert "25x fewer bytes" in text
    assert "4.0x as fast" in text


def test_one_line_says_why_machines_are_not_emulated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(machines: int) -> str:
        raise ConfigError("not permitted to add bridge; run as root")

    figures = {"workers": 2, "batch": 32, "accuracy": 0.9, "loss": 0.5, "seconds": 1.0}
    monkeypatch.setattr(quickstart, "_train", lambda *_: figures)
    monkeypatch.setattr(quickstart, "compare_systems", refuse)
    assert main(["quickstart"]) == 0
    assert "left out: not permitted to add bridge; run as root\n" in capsys.readouterr().out
