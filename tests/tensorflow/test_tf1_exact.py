"""TensorFlow 1 graphs on several workers, against the same graphs on one."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from needs_tensorflow import MARKS, PRELOAD, QUIET

from nightly import amount
from poseidon.following.options import AutoOptions
from poseidon.following.patches import Patches
from poseidon.following.script_report import ScriptReport
from poseidon.planning.cluster import Cluster, Link
from poseidon.team.team import Team
from ranks import run_ranks

pytestmark = MARKS

SLOW = Link(bits_per_s=1e8, latency_s=1e-5)
"""Assumed instead of measured: saves the time, and makes short forms of gradients worth while."""


def follow(options: AutoOptions | None = None) -> tuple[Any, Patches, io.StringIO]:
    """Put the hooks in place, as ``--auto`` does; return them, how to undo it, and where the report goes."""
    from poseidon.tensorflow.following import Following

    said = io.StringIO()
    sys.stderr = said
    team = Team(None, 300.0)
    patches = Patches()
    following = Following(team, options or AutoOptions(), 5, ScriptReport(True))
    following.install(patches)
    return following, patches, said


NAMES = ["mlp", "cnn", "layers", "fused", "embedding", "lstm", "transformer"]


def train_alone() -> dict[str, Any]:
    import graph_models as models

    return {name: models.train(name) for name in NAMES}


ON_FOUR = amount(["mlp", "cnn", "embedding"], NAMES)
"""On four workers, where each of them builds them all; on two they all run in the suite as well."""


def train_all(alone: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return for each model how far variables and losses are from one worker's, and a digest of the variables.

    Distances are in units of what is allowed.
    """
    import graph_models as models

    rank = int(os.environ["RANK"])
    following, patches, said = follow()
    results = {}
    for name in names:
        # The workers start from different values.
        variables, losses = models.train(name, seed=3 + rank, is_first=rank == 0)
        limit = models.TOLERANCES.get(name, 1e-9)
        apart = models.difference(alone[name][0], variables) if rank == 0 else 0.0
        worst = max(abs(a - b) for a, b in zip(alone[name][1], losses, strict=True)) if rank == 0 else 0.0
        results[name] = (apart / limit, worst / limit, models.digest(variables))
    following.conclude()
    patches.undo()
    return {**results, "said": said.getvalue()}


ENV = {**QUIET, "POSEIDON_SYNC_BATCHNORM": "1"}


@pytest.fixture(scope="module")
def alone() -> Any:
    """What one worker with all samples learns."""
    return run_ranks(train_alone, 1, env=ENV, timeout_s=600, preload=PRELOAD)[0]


@pytest.mark.parametrize(("size", "names"), [(2, NAMES), (4, ON_FOUR)], ids=["2", "4"])
def test_ten_steps_equal_those_of_one_worker(size: int, names: list[str], alone: Any, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.json"
    Cluster(machines=size, between=SLOW, inside=SLOW).save(cluster)
    env = {**ENV, "POSEIDON_CLUSTER": str(cluster)}
    results = run_ranks(train_all, size, alone, names, env=env, timeout_s=600, preload=PRELOAD)
    for name in names:
        apart, losses, _ = results[0][name]
        assert apart < 1, f"{name}: variables"
        assert losses < 1, f"{name}: the losses that the script sees"
        assert len({result[name][2] for result in results}) == 1, f"{name}: replicas are not the same bits"
    assert "factors (2)" in results[0]["said"], "the large layers of the MLP"
    assert "rows (2)" in results[0]["said"], "the tables of the embedding model"
