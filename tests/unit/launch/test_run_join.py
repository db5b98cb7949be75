from __future__ import annotations

import pytest

from poseidon.errors import ConfigError
from poseidon.job.world import World, is_launched
from poseidon.launch.join import MachineShare, find_starter, joined_environment

PLACE = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
TORCHRUN = {
    **PLACE,
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "OMP_NUM_THREADS": "1",
}
SRUN = {
    "SLURM_JOB_ID": "4242",
    "SLURM_JOB_NODELIST": "gpu[03-05]",
    "SLURM_STEP_NODELIST": "gpu[03-05]",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "5",
}
SBATCH = {"SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": "gpu[03-05]", "SLURM_PROCID": "0", "SLURM_NTASKS": "5"}
PYTORCHJOB = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "PYTHONUNBUFFERED": "1",
    "MASTER_ADDR": "train-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "3",
    "RANK": "2",
    "PET_MASTER_ADDR": "train-master-0",
    "PET_MASTER_PORT": "23456",
    "PET_NNODES": "3",
    "PET_NODE_RANK": "2",
    "PET_NPROC_PER_NODE": "1",
}
TRAIN_JOB = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "poseidon-node-0-0.poseidon",
    "PET_MASTER_PORT": "29400",
}
SPARK = {
    **PLACE,
    "LOCAL_WORLD_SIZE": "1",
    "TORCHELASTIC_RUN_ID": "spark",
    "SPARK_ENV_LOADED": "1",
}
RAY = {
    "RAY_JOB_ID": "01000000",
    "RAY_RAYLET_PID": "77",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "NODE_RANK": "1",
    "MASTER_ADDR": "10.0.0.4",
    "MASTER_PORT": "41235",
}


@pytest.mark.parametrize(
    ("environ", "starter", "world"),
    [
        (TORCHRUN, "torchrun", World(5, 8, 1, 4, "node7", 29500)),
        (SRUN, "Slurm (srun)", World(4, 5, 0, 1, "gpu03", 24242)),
        (PYTORCHJOB, "Kubernetes (PyTorchJob)", World(2, 3, 2, None, "train-master-0", 23456)),
        (TRAIN_JOB, "Kubernetes (Kubeflow Trainer)", World(1, 3, 0, 1, "poseidon-node-0-0.poseidon", 29400)),
        (SPARK, "torchrun", World(5, 8, 1, 1, "node7", 29500)),
        (RAY, "Ray", World(1, 2, 0, 1, "10.0.0.4", 41235)),
        ({**PLACE, "POSEIDON_RUN": "x"}, "poseidon run", World(5, 8, 1, None, "node7", 29500)),
        (PLACE, "RANK and WORLD_SIZE in the environment", World(5, 8, 1, None, "node7", 29500)),
    ],
)
def test_who_started_this_process_is_known_from_its_environment(
    environ: dict[str, str], starter: str, world: World
) -> None:
    joined = find_starter(environ)
    assert joined is not None
    assert (joined.starter, joined.world, joined.share) == (starter, world, None)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PATH": "/bin"},
        SBATCH,
        {"RAY_ADDRESS": "auto"},
        {"KUBERNETES_PORT": "1"},
        {**TRAIN_JOB, "PET_NNODES": "1", "PET_NODE_RANK": "0"},
    ],
)
def test_a_process_started_by_hand_may_launch(environ: dict[str, str]) -> None:
    assert find_starter(environ) is None


def test_a_pod_with_several_workers_is_one_machines_share() -> None:
    joined = find_starter({**PYTORCHJOB, "PET_NPROC_PER_NODE": "4", "WORLD_SIZE": "12"})
    assert joined is not None
    assert joined.share == MachineShare(2, 3, 4, "train-master-0", 23456)


@pytest.mark.parametrize(("asked", "workers"), [("2", 2), ("auto", 4), ("gpu", 4)])
def test_a_pod_that_is_told_only_torchruns_arguments_is_a_share_too(asked: str, workers: int) -> None:
    joined = find_starter({**TRAIN_JOB, "PET_NPROC_PER_NODE": asked}, gpus=4)
    assert joined is not None
    assert joined.share == MachineShare(1, 3, workers, "poseidon-node-0-0.poseidon", 29400)
    assert (joined.world.rank, joined.world.size) == (workers, 3 * workers)


def test_a_process_per_core_is_not_made() -> None:
    joined = find_starter({**TRAIN_JOB, "PET_NPROC_PER_NODE": "cpu"}, gpus=4)
    assert joined is not None
    assert (joined.world.size, joined.share) == (3, None)


def test_a_process_in_a_pod_of_several_workers_is_none_of_them_yet() -> None:
    with pytest.raises(ConfigError, match="PET_NPROC_PER_NODE is 2, but nothing has started"):
        World.from_environment({**TRAIN_JOB, "PET_NPROC_PER_NODE": "2"})
    with pytest.raises(ConfigError, match="PET_NNODES is '1:4'"):
        World.from_environment({**TRAIN_JOB, "PET_NNODES": "1:4"})


@pytest.mark.parametrize(
    ("environ", "is_one"),
    [
        ({}, False),
        (TORCHRUN, True),
        (SRUN, True),
        (SBATCH, False),
        (TRAIN_JOB, True),
        ({"RANK": "0", "WORLD_SIZE": "1"}, True),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "1", "NODE_RANK": "0"}, False),  # Lightning's own children
    ],
)
def test_whether_a_launcher_made_this_process_a_worker(environ: dict[str, str], is_one: bool) -> None:
    assert is_launched(environ) == is_one


def test_torchrun_inside_a_pod_has_made_workers_already() -> None:
    joined = find_starter({**PYTORCHJOB, **TORCHRUN, "PET_NPROC_PER_NODE": "4"})
    assert joined is not None
    assert (joined.starter, joined.share) == ("torchrun", None)


@pytest.mark.parametrize(
    ("changes", "match"),
    [({"PET_NNODES": "1:4"}, "PET_NNODES is '1:4'"), ({"PET_NODE_RANK": ""}, "PET_NODE_RANK is ''")],
)
def test_a_share_that_makes_no_sense_is_refused(changes: dict[str, str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        find_starter({**PYTORCHJOB, "PET_NPROC_PER_NODE": "4", **changes})


def test_a_worker_that_joins_finds_torchruns_words() -> None:
    joined = find_starter(SRUN)
    assert joined is not None
    env = joined_environment(joined, SRUN)
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == ("4", "5", "0", "1")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["SLURM_JOB_ID"]) == ("gpu03", "24242", "4242")
    assert World.from_environment(env) == joined.world
