"""Run the plain scripts of ``tests/auto_scripts`` on several ranks, as ``poseidon run --auto`` would."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from poseidon.auto.session import run
from poseidon.following.options import AutoOptions, ScriptTarget
from poseidon.planning.cluster import Cluster, Link
from ranks import run_ranks

SCRIPTS = Path(__file__).with_name("auto_scripts")

SLOW = Link(bits_per_s=1e8, latency_s=1e-5)
"""Assumed instead of measured: saves the time, and makes short forms of gradients worth while."""


def launch(
    script: str,
    size: int,
    folder: Path,
    options: AutoOptions,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    preload: Sequence[str] = ("sklearn.datasets",),
) -> None:
    """Run a script to its end, in ``folder`` or, if every worker's files are wanted, in a folder per rank."""
    folder.mkdir(exist_ok=True)
    cluster = folder / "cluster.json"
    Cluster(machines=size, between=SLOW, inside=SLOW).save(cluster)
    env = {"MASTER_PORT": "1", "POSEIDON_CLUSTER": str(cluster), **(env or {})}
    # pytest's own limit ends a run that hangs.
    call = (script, str(folder), options, arguments)
    statuses = run_ranks(_work, size, *call, env=env, timeout_s=600, preload=("poseidon.auto.session", *preload))
    cluster.unlink()
    problems = "".join((folder / f"err{rank}").read_text() for rank in range(size))
    assert statuses == [0] * size, problems


def _work(script: str, folder: str, options: AutoOptions, arguments: tuple[str, ...]) -> int:
    rank = os.environ["RANK"]
    place = Path(folder) / rank if options.files == "shared" else Path(folder)
    place.mkdir(exist_ok=True)
    os.chdir(place)
    # Ranks are daemons, which may not have children; a loader with processes of its own needs them.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    with (Path(folder) / f"out{rank}").open("w") as out, (Path(folder) / f"err{rank}").open("w") as err:
        sys.stdout, sys.stderr = out, err
        return run(options, ScriptTarget(str(SCRIPTS / script), False, arguments))
