"""Some of the scripts that ``scripts/peers`` runs: workers give what a plain run gives, from the same samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from auto_runs import launch
from peers.strangers import HERE, STRANGERS, Stranger, judge
from poseidon.following.options import AutoOptions


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("detector_ema.py", 2),  # a mean times the batch's size, accumulated, with averages of weights
        ("vae_sums.py", 3),  # a sum over samples
        ("dicts_padded.py", 2),  # a mean over tokens that are not padding
        ("detector_lists.py images", 3),  # a loss for each image, added up
        ("half_labelled.py", 2),  # a teacher reads batches, without gradients, that are then trained on
        ("seq2seq_buckets.py batch", 2),  # a sampler that draws its order before torch draws the loader's seed
        ("endless_loader.py thread", 2),  # a thread reads the loader
        ("private_gradients.py mean", 3),  # torch.func's transformations, gradients set by hand
    ],
)
def test_workers_give_what_a_plain_run_gives(name: str, size: int, tmp_path: Path) -> None:
    (stranger,) = (one for one in STRANGERS if one.name == name)
    plain = _results(stranger, 1, tmp_path / "plain")
    assert judge(stranger, plain[0], _results(stranger, size, tmp_path / "together")).problems == ()


@pytest.mark.parametrize("name", ["memory_of_samples.py bank", "seq2seq_buckets.py token"])
def test_what_cannot_be_the_same_is_told(name: str, tmp_path: Path) -> None:
    (stranger,) = (one for one in STRANGERS if one.name == name)
    ours = _results(stranger, 2, tmp_path)
    assert stranger.says in (tmp_path / "err0").read_text()
    assert judge(stranger, ours[0], ours).difference == 0.0, "all workers go on alike"


def _results(stranger: Stranger, size: int, folder: Path) -> list[dict[str, object]]:
    options = AutoOptions(batch="total", files="shared", timeout_s=100.0)
    launch(str(HERE / stranger.script), size, folder, options, *stranger.words)
    return [torch.load(folder / str(rank) / "result.pt") for rank in range(size)]
