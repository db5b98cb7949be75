"""Which worker of the job this process is, from the variables that its launcher sets.

torchrun, ``poseidon run``, Kubernetes' PyTorchJob and Ray Train all set torchrun's variables; Slurm has its own.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from poseidon.errors import ConfigError
from poseidon.job import settings
from poseidon.job.settings import WHOLE


@dataclass(frozen=True)
class World:
    """A worker's place among all workers."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Rank among the workers of this machine; also the number of its device."""
    local_size: int | None = None
    """Number of workers on this machine, if the launcher says so."""
    master_addr: str | None = None
    master_port: int | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> World:
        """Read the place from the environment; a process that no launcher started is alone."""
        env = os.environ if environ is None else environ
        if "RANK" in env or "WORLD_SIZE" in env:
            return cls._from_torchrun(env)
        # Only tasks that srun started: a batch script has a rank too, but is alone.
        if "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env:
            return cls._from_slurm(env)
        return cls()

    @classmethod
    def _from_torchrun(cls, env: Mapping[str, str]) -> World:
        rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
        if size > 1 and ("MASTER_ADDR" not in env or "MASTER_PORT" not in env):
            raise ConfigError("RANK and WORLD_SIZE are set but MASTER_ADDR or MASTER_PORT is not; start with torchrun")
        port = _number(env, "MASTER_PORT") if "MASTER_PORT" in env else None
        local_size = _number(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else None
        return cls(rank, size, _number(env, "LOCAL_RANK", rank), local_size, env.get("MASTER_ADDR"), port)

    @classmethod
    def _from_slurm(cls, env: Mapping[str, str]) -> World:
        # Slurm names no port; derive one from the job's number, so that all its tasks agree.
        port = 20000 + _number(env, "SLURM_JOB_ID", 0) % 20000
        first_host = _first_host(env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", "127.0.0.1")))
        return cls(
            _number(env, "SLURM_PROCID"),
            _number(env, "SLURM_STEP_NUM_TASKS"),
            _number(env, "SLURM_LOCALID", 0),
            _tasks_on_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""), _number(env, "SLURM_NODEID", 0)),
            env.get("MASTER_ADDR", first_host),
            _number(env, "MASTER_PORT", port),
        )

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ConfigError(f"rank {self.rank} of {self.size} workers is impossible; ranks count from 0")


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None:
        if default is None:
            raise ConfigError(f"environment variable {name} is not set; start with torchrun or set it")
        return default
    return WHOLE.read(text, f"environment variable {name}")


def _first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list such as ``gpu[03-05,09],big1``."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodes)
    return nodes if match is None else match[1] + (match[2] or "")


def _tasks_on_node(counts: str, node: int) -> int | None:
    """Return how many tasks run on a node, from Slurm's ``2(x3),1``; None if it does not say."""
    tasks: list[int] = []
    for count, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        tasks += [int(count)] * int(repeats or 1)
    return tasks[node] if node < len(tasks) else None


def init(backend: str | None = None, timeout_s: float = 1800.0) -> World:
    """Join the job that the environment describes and return this worker's place in it.

    Makes the default process group (gloo; with GPUs NCCL as well) unless there is one, and selects the worker's GPU.
    For a process that is alone it is a no-op. Safe to call more than once.
    """
    import torch
    import torch.distributed as dist

    world = World.from_environment()
    if dist.is_initialized() and world.size != dist.get_world_size():
        world = World(dist.get_rank(), dist.get_world_size(), world.local_rank)
    if torch.cuda.is_available() and world.size > 1:
        torch.cuda.set_device(world.local_rank % torch.cuda.device_count())
    if world.size > 1 and world.local_size == 1:
        # One channel fills Ethernet; every further one costs the GPU multiprocessors and the host a busy thread. VGG19
        # on 8 x 10 GbE ran 5 % faster with one. Inside a machine NCCL needs its channels, so it chooses for itself.
        os.environ.setdefault("NCCL_MAX_NCHANNELS", "1")
    if world.size > 1 and not dist.is_initialized():
        chosen = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        timeout = timedelta(seconds=timeout_s)
        meeting: dict[str, Any] = {"init_method": f"tcp://{world.master_addr}:{world.master_port}"}
        if settings.RUN.read():
            meeting = {"store": _open_store(world, timeout)}
        dist.init_process_group(chosen, **meeting, rank=world.rank, world_size=world.size, timeout=timeout)
    return world


def _open_store(world: World, timeout: timedelta) -> Any:
    """Return the job's store, listening only on the address where workers meet; torch would listen on all."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    assert world.master_addr is not None
    assert world.master_port is not None
    if world.rank != 0:
        return TCPStore(world.master_addr, world.master_port, world.size, False, timeout)
    family = socket.getaddrinfo(world.master_addr, world.master_port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((world.master_addr, world.master_port), family=family, backlog=1024)
    # Only torch's older server, requested here, accepts an open socket; it owns the socket from now on.
    return TCPStore(
        world.master_addr,
        world.master_port,
        world.size,
        True,
        timeout,
        master_listen_fd=listener.detach(),
        use_libuv=False,
    )
