"""Detects other launchers (torchrun, Slurm, Kubernetes, Ray), whose job is joined instead of starting one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from poseidon.errors import ConfigError
from poseidon.job.settings import RUN, WHOLE, refuse
from poseidon.job.world import World


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


def find_starter(environ: Mapping[str, str]) -> Joined | None:
    """Return the launcher that started this process; None if it was started by hand."""
    share = _kubernetes_share(environ)
    if share is not None:
        return Joined("Kubernetes (PyTorchJob)", World.from_environment(environ), share)
    world = World.from_environment(environ)
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return Joined(_name_of(environ), world)
    if world.size > 1:
        return Joined("Slurm (srun)", world)
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


def _kubernetes_share(environ: Mapping[str, str]) -> MachineShare | None:
    """Read the PET_ variables that the training operator sets for torchrun, if a pod runs several workers."""
    if "PET_NPROC_PER_NODE" not in environ or "TORCHELASTIC_RUN_ID" in environ or "LOCAL_RANK" in environ:
        return None
    workers = environ["PET_NPROC_PER_NODE"]
    if not workers.isdigit():  # "auto", "gpu", "cpu": torchrun resolves them; here they mean one
        return None
    if int(workers) < 2:
        return None
    values = {}
    for name in ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_PORT"):
        text = environ.get(name, "")
        # An elastic job has 1:4 here; its machines come and go, which is not supported.
        if not text.isdigit():
            raise refuse(f"environment variable {name}", text, WHOLE.expected)
        values[name] = int(text)
    if "PET_MASTER_ADDR" not in environ:
        raise ConfigError("environment variable PET_MASTER_ADDR is not set, so the workers cannot meet")
    return MachineShare(
        values["PET_NODE_RANK"],
        values["PET_NNODES"],
        int(workers),
        environ["PET_MASTER_ADDR"],
        values["PET_MASTER_PORT"],
    )


def _name_of(environ: Mapping[str, str]) -> str:
    if "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun"
    if RUN.name in environ:
        return "poseidon run"
    if any(name.startswith("RAY_") for name in environ):
        return "Ray"
    if "KUBERNETES_SERVICE_HOST" in environ:
        return "Kubernetes (PyTorchJob)"
    return "RANK and WORLD_SIZE in the environment"
