from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from poseidon.job.world import World
from poseidon.launch.hosts import read_cluster_file, read_hostfile
from poseidon.launch.join import find_starter
from poseidon.launch.run_settings import SETTINGS, resolve
from poseidon.launch.script import check_script

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "launch"
PODS = ROOT / "examples" / "kubernetes"


def test_every_host_file_is_one_that_works() -> None:
    assert [(host.name, host.slots) for host in read_hostfile(EXAMPLES / "hosts.txt")] == [
        ("node1", 2),
        ("node2", 2),
        ("node3", 1),
    ]
    original = read_hostfile(EXAMPLES / "hosts_original.txt")
    assert [(host.name, host.service_port) for host in original][:1] == [("192.0.2.1", 29500)]
    as_json = read_cluster_file(EXAMPLES / "cluster_original.json").hosts
    assert [host.name for host in as_json] == [host.name for host in original]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="TOML needs Python 3.11")
def test_the_cluster_file_sets_what_it_says() -> None:
    cluster = read_cluster_file(EXAMPLES / "cluster.toml")
    assert [(host.name, host.slots, host.user, host.port) for host in cluster.hosts] == [
        ("node1", 2, "ann", None),
        ("node2", 2, "ann", 2222),
    ]
    chosen = resolve({}, cluster.settings, "cluster.toml", {})
    assert (chosen["restarts"].value, chosen["hang_timeout"].value) == (2, 600.0)


@pytest.mark.parametrize("name", ["train.py", "ray_train.py", "spark.py"])
def test_the_scripts_can_be_read(name: str) -> None:
    check_script(EXAMPLES / name)


@pytest.mark.parametrize("name", ["torchrun.sh", "slurm.sbatch"])
def test_the_shell_scripts_can_be_read(name: str) -> None:
    subprocess.run(["bash", "-n", str(EXAMPLES / name)], check=True, timeout=20)


def test_the_guides_name_every_example_and_every_option() -> None:
    guide = (ROOT / "docs" / "launching.md").read_text()
    for setting in SETTINGS:
        assert f"--{setting.name.replace('_', '-')}" in guide
    cluster = (ROOT / "docs" / "cluster.md").read_text()
    for name in ("torchrun.sh", "slurm.sbatch", "ray_train.py", "skypilot.yaml", "spark.py"):
        assert name in cluster
        assert (EXAMPLES / name).exists()
    for path in PODS.iterdir():
        assert path.name in cluster
    trainers = (ROOT / "docs" / "trainers.md").read_text()
    for path in (ROOT / "examples" / "trainers").glob("*.py"):
        assert f"examples/trainers/{path.name}" in trainers
        check_script(path)


def test_the_pods_run_a_command_that_exists() -> None:
    commands = [
        re.findall(r"command: \[(.*)\]", (PODS / name).read_text()) for name in ("pytorchjob.yaml", "trainjob.yaml")
    ]
    assert [len(found) for found in commands] == [2, 1]
    assert all(command.startswith('"poseidon", "run"') for found in commands for command in found)


def test_the_templates_are_what_their_readers_expect() -> None:
    yaml = pytest.importorskip("yaml")
    runtime, job = yaml.safe_load_all((PODS / "trainjob.yaml").read_text())
    assert (runtime["kind"], job["kind"]) == ("ClusterTrainingRuntime", "TrainJob")
    assert runtime["apiVersion"] == job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert "torch" in runtime["spec"]["mlPolicy"], "the policy that sets the PET_ variables"
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    assert node["name"] == container["name"] == "node"
    assert container["command"][:2] == ["poseidon", "run"]
    (operated,) = yaml.safe_load_all((PODS / "pytorchjob.yaml").read_text())
    assert operated["kind"] == "PyTorchJob"
    sky = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    assert sky["num_nodes"] > 1
    assert "poseidon run" in sky["run"]


def test_skypilot_gives_each_machine_its_place() -> None:
    """Runs the template's commands with SkyPilot's variables, and `poseidon` replaced by a look at the environment."""
    text = (EXAMPLES / "skypilot.yaml").read_text()
    commands = text.partition("run: |\n")[2].replace(
        "poseidon run", "python3 -c 'import json, os; print(json.dumps(dict(os.environ)))' #"
    )
    sky = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "192.0.2.1\n192.0.2.2"}
    ran = subprocess.run(
        ["bash", "-euc", commands], env={"PATH": os.environ["PATH"], **sky}, check=True, capture_output=True, timeout=20
    )
    joined = find_starter(json.loads(ran.stdout))
    assert joined is not None
    assert joined.world == World(1, 2, 0, 1, "192.0.2.1", 29500)
