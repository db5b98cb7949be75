"""Detects other launchers (torchrun, Slurm, Kubernetes, Ray), whose job is joined instead of starting one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from poseidon.job.settings import RUN
from poseidon.job.world import World, pod_address, pod_number


@dataclass(frozen=True)
class MachineShare:
    """One machine's part of a job in which another launcher started one process per machine."""

    machine: int
    machines: int
    workers: int
    """Number of workers per machine."""
    address: str
    port: int


@dataclass(frozen=True)
class Joined:
    """The launcher of this process, and the process's task: to be a worker, or to run a machine's workers."""

    starter: str
    world: World
    share: MachineShare | None = None


def find_starter(environ: Mapping[str, str], gpus: int = 0) -> Joined | None:
    """Return the launcher that started this process; None if it was started by hand. This machine has ``gpus``."""
    share = _pod_share(environ, gpus)
    if share is not None:
        first = World(share.machine * share.workers, share.machines * share.workers)
        return Joined(_name_of(environ), first, share)
    world = World.from_environment(environ)
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return Joined(_name_of(environ), world)
    if world.size > 1:
        return Joined("Slurm (srun)" if "SLURM_PROCID" in environ else _name_of(environ), world)
    return None


def joined_environment(joined: Joined, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a worker that joins, with torchrun's variables, which every script understands."""
    world = joined.world
    known = {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "MASTER_ADDR": world.master_addr,
        "MASTER_PORT": None if world.master_port is None else str(world.master_port),
        "LOCAL_WORLD_SIZE": None if world.local_size is None else str(world.local_size),
    }
    return {**{name: value for name, value in known.items() if value is not None}, **environ}


def _pod_share(environ: Mapping[str, str], gpus: int) -> MachineShare | None:
    """Read the PET_ variables that Kubeflow's operators set for torchrun, if a pod runs several workers."""
    if "PET_NPROC_PER_NODE" not in environ or "TORCHELASTIC_RUN_ID" in environ or "LOCAL_RANK" in environ:
        return None
    text = environ["PET_NPROC_PER_NODE"]
    # "auto" and "gpu" mean a worker per GPU. "cpu" is a process per core for torchrun; here one uses all cores.
    workers = int(text) if text.isdigit() else gpus if text in ("auto", "gpu") and "RANK" not in environ else 1
    if workers < 2:
        return None
    return MachineShare(
        pod_number(environ, "PET_NODE_RANK"),
        pod_number(environ, "PET_NNODES"),
        workers,
        pod_address(environ),
        pod_number(environ, "PET_MASTER_PORT"),
    )


def _name_of(environ: Mapping[str, str]) -> str:
    if "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun"
    if RUN.name in environ:
        return "poseidon run"
    if any(name.startswith("RAY_") for name in environ):
        return "Ray"
    if "PET_NNODES" in environ and "RANK" not in environ:
        return "Kubernetes (Kubeflow Trainer)"
    if "KUBERNETES_SERVICE_HOST" in environ:
        return "Kubernetes (PyTorchJob)"
    return "RANK and WORLD_SIZE in the environment"
