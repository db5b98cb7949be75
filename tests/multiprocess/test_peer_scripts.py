"""Three of the scripts that ``scripts/peers`` runs: workers give what a plain run gives, from the same samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from auto_runs import launch
from peers.strangers import HERE, STRANGERS, Stranger, judge
from poseidon.following.options import AutoOptions


@pytest.mark.parametrize(
    ("script", "size"),
    [
        ("detector_ema.py", 2),  # a mean times the batch's size, accumulated, with averages of weights
        ("vae_sums.py", 3),  # a sum over samples
        ("dicts_padded.py", 2),  # a mean over tokens that are not padding
    ],
)
def test_workers_give_what_a_plain_run_gives(script: str, size: int, tmp_path: Path) -> None:
    (stranger,) = (one for one in STRANGERS if one.script == script)
    plain = _results(stranger, 1, tmp_path / "plain")
    assert judge(stranger, plain[0], _results(stranger, size, tmp_path / "together")).problems == ()


def _results(stranger: Stranger, size: int, folder: Path) -> list[dict[str, object]]:
    options = AutoOptions(batch="total", files="shared", timeout_s=100.0)
    launch(str(HERE / stranger.script), size, folder, options, *stranger.words)
    return [torch.load(folder / str(rank) / "result.pt") for rank in range(size)]
