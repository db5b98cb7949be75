"""``poseidon bench --to-loss`` on emulated machines: curves, tempos and timed runs in one small comparison."""

import json

import pytest

from poseidon.cli.main import main

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]  # some 20 s where nothing else runs

COMMAND = (
    "bench", "--to-loss", "text", "--tiny", "--machines", "2", "--rate", "20mbit", "--paced", "4:8", "--steps", "8",
    "--every", "2", "--more", "1.5", "--seeds", "1", "--timeout", "60", "--dilate", "1",
)  # fmt: skip


def test_a_comparison_is_measured_shown_and_not_measured_again(tmp_path, capsys):
    path = tmp_path / "losses.json"
    command = [*COMMAND, "--output", str(path), "--against", "ddp,local:sync_every=4,ssp"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    found = json.loads(path.read_text())["to_loss"]
    runs = {run["system"]: run for run in found["runs"]}
    assert [mark[0] for mark in runs["ddp"]["marks"]] == [2, 4, 6, 8]
    assert [mark[0] for mark in runs["local:sync_every=4"]["marks"]][:4] == [2, 4, 6, 8]
    assert runs["ddp"]["marks"][-1][1] < runs["ddp"]["marks"][0][1]
    # Only workers that drift apart are trained on the clock.
    assert runs["ssp"]["marks"][-1][2] > 12 * 0.012
    assert runs["ddp"]["marks"][-1][2] is None
    tempos = found["tempos"]
    assert set(tempos) == {"linear", "ddp", "local:sync_every=4"}
    assert tempos["linear"]["step_ms"] >= 12
    assert tempos["local:sync_every=4"]["sent_bytes"] < 0.5 * tempos["ddp"]["sent_bytes"]
    assert "ddp's final validation loss within 0.5%" in shown
    assert main(command) == 0
    assert "to measure" not in capsys.readouterr().out
