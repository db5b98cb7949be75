"""Which worker of the job this process is, from the variables that its launcher sets.

torchrun, ``poseidon run``, Kubernetes' PyTorchJob, Ray Train and Spark's TorchDistributor all set torchrun's variables;
Slurm has its own. Kubeflow Trainer tells each pod only what torchrun's arguments would be, in ``PET_`` variables.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from poseidon.errors import ConfigError
from poseidon.job import settings
from poseidon.job.agent import has_agent, open_agent_store
from poseidon.job.attempts import within_epoch
from poseidon.job.cutting import TORCH
from poseidon.job.elastic import NEWS_S, this_job
from poseidon.job.filter import admit_only_peers, shut_afterwards
from poseidon.job.limits import time_limit, torch_limit
from poseidon.job.settings import WHOLE, check_port, refuse
from poseidon.job.tell import tell


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
        if "PET_NNODES" in env:
            return cls._from_pod(env)
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
        # Slurm names no port; derive one from the job's number, so that all its tasks agree. Below 32768, where systems
        # begin to take ports for connections.
        port = 20000 + _number(env, "SLURM_JOB_ID", 0) % 12000
        first_host = _first_host(env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", "127.0.0.1")))
        return cls(
            _number(env, "SLURM_PROCID"),
            _number(env, "SLURM_STEP_NUM_TASKS"),
            _number(env, "SLURM_LOCALID", 0),
            _tasks_on_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""), _number(env, "SLURM_NODEID", 0)),
            env.get("MASTER_ADDR", first_host),
            _number(env, "MASTER_PORT", port),
        )

    @classmethod
    def _from_pod(cls, env: Mapping[str, str]) -> World:
        """Read torchrun's arguments, for a process that is its pod's only worker."""
        workers = env.get("PET_NPROC_PER_NODE", "1")
        if workers.isdigit() and int(workers) > 1:
            raise ConfigError(
                f"PET_NPROC_PER_NODE is {workers}, but nothing has started that many workers here; start the script "
                "with `poseidon run` or torchrun"
            )
        nodes = pod_number(env, "PET_NNODES")
        if nodes == 1:
            return cls()
        return cls(pod_number(env, "PET_NODE_RANK"), nodes, 0, 1, pod_address(env), pod_number(env, "PET_MASTER_PORT"))

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ConfigError(f"rank {self.rank} of {self.size} workers is impossible; ranks count from 0")
        if self.size > 1:  # one worker meets nobody
            check_port(self.master_port, "the port where workers meet (MASTER_PORT)")


def is_launched(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether a launcher has made this process a worker, be it the only one."""
    env = os.environ if environ is None else environ
    return "RANK" in env or ("WORLD_SIZE" not in env and World.from_environment(env).size > 1)


def pod_number(env: Mapping[str, str], name: str) -> int:
    """Return one of the numbers that an operator gives a pod for torchrun."""
    text = env.get(name, "")
    # An elastic job has 1:4 as its number of nodes; its machines come and go, which is not supported.
    if not text.isdigit():
        raise refuse(f"environment variable {name}", text, WHOLE.expected)
    return int(text)


def pod_address(env: Mapping[str, str]) -> str:
    """Return where the workers of pods meet."""
    if "PET_MASTER_ADDR" not in env:
        raise ConfigError("environment variable PET_MASTER_ADDR is not set, so the workers cannot meet")
    return env["PET_MASTER_ADDR"]


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


def init(backend: str | None = None, timeout_s: float | None = None) -> World:
    """Join the job that the environment describes and return this worker's place in it.

    Makes the default process group (gloo; with GPUs NCCL as well) unless there is one, and selects the worker's GPU.
    ``timeout_s`` (default: ``POSEIDON_TIMEOUT``) is how long to wait for another worker; torch's own collectives, which
    cannot know whether one is busy, wait six times as long. For a process that is alone it is a no-op. Safe to call
    more than once. A worker that joins an elastic job under way is alone until ``poseidon.Checkpoint.run``, and so is
    one that has not met the others when one of them is lost.
    """
    import torch
    import torch.distributed as dist

    job = this_job()
    if job is not None and "nccl" in (backend or ""):
        raise ConfigError(
            f"backend={backend!r} in an elastic job (--nodes, --nproc MIN:MAX): NCCL's operations cannot be "
            "interrupted when a worker is lost; leave it out, then gloo and Poseidon's wire serve GPUs too"
        )
    is_first = job is not None and job.seat is None and not dist.is_initialized()
    if is_first:
        assert job is not None
        if job.is_late:
            # Not LOCAL_RANK: it is where the launcher has started this worker, and says which GPU it gets.
            os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        else:
            job.arrive()
    world = World.from_environment()
    if dist.is_initialized() and world.size != dist.get_world_size():
        world = World(dist.get_rank(), dist.get_world_size(), world.local_rank)
    if torch.cuda.is_available() and (world.size > 1 or job is not None):
        torch.cuda.set_device(world.local_rank % torch.cuda.device_count())
    if world.size > 1 and world.local_size == 1:
        # One channel fills Ethernet; every further one costs the GPU multiprocessors and the host a busy thread. VGG19
        # on 8 x 10 GbE ran 5 % faster with one. Inside a machine NCCL needs its channels, so it chooses for itself.
        os.environ.setdefault("NCCL_MAX_NCHANNELS", "1")
    if world.size > 1 and not dist.is_initialized():
        # NCCL's operations cannot be interrupted when a worker is lost.
        has_nccl = torch.cuda.is_available() and job is None
        try:
            _make_group(world, backend or ("cpu:gloo,cuda:nccl" if has_nccl else "gloo"), timeout_s)
        except Exception:
            if job is None or not is_first or not job.wait_for_end(NEWS_S):
                raise
            # A worker was lost before all have met. Others may have met, and be further in the program than this one:
            # all meet without it in poseidon.Checkpoint.run, and nowhere else.
            job.leave()
            if dist.is_initialized():
                dist.destroy_process_group()
            os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
            world = World.from_environment()
    return world


def _make_group(world: World, backend: str, timeout_s: float | None) -> None:
    """Make the default process group. Collective."""
    import torch.distributed as dist

    timeout = timedelta(seconds=torch_limit(time_limit(timeout_s)))
    meeting: dict[str, Any] = {"init_method": f"tcp://{_in_brackets(world.master_addr)}:{world.master_port}"}
    if settings.RUN.read():
        with TORCH.noting():
            meeting = {"store": within_epoch(lambda: _open_store(world, timeout), "the first worker's store")}
    elif has_agent():
        assert world.master_addr is not None
        assert world.master_port is not None
        tell(startup="waits for the other workers to come to torchrun's store")
        meeting = {"store": open_agent_store(world.master_addr, world.master_port, world.rank, world.size, timeout)}
    with (
        contextlib.nullcontext() if _connects_late() else shut_afterwards(world.master_port),
        TORCH.noting(),
    ):
        tell(startup="waits for the other workers to join")
        if this_job() is not None:
            _name_groups_alike()
        within_epoch(
            lambda: dist.init_process_group(
                backend, **meeting, rank=world.rank, world_size=world.size, timeout=timeout
            ),
            "the other workers to join",
        )
    if settings.RUN.read() and world.rank == 0 and world.master_port is not None:
        admit_only_peers(world.master_port)


def _name_groups_alike() -> None:
    """Let torch give the default group the same name on all workers, whatever each of them has tried before.

    Workers find each other in the store by that name, which is the number of groups made so far. An attempt that failed
    counts, and a group that was made and destroyed does not: workers of which one had been interrupted while it joined
    would look for each other under different names.
    """
    import torch.distributed as dist

    made = dist.distributed_c10d._world
    made.group_count = 0
    # What an attempt that was left behind may have noted.
    for noted in (made.pg_map, made.pg_names, made.pg_group_ranks, made.pg_backend_config, made.pg_to_tag):
        noted.clear()
    made.tags_to_pg.clear()


def join_workers(timeout_s: float | None = None) -> int:
    """Join the job that the environment describes, if not yet done; return the number of workers."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else init(timeout_s=timeout_s).size


def _in_brackets(address: str | None) -> str:
    """Return an address as it stands in a URL."""
    return f"[{address}]" if address is not None and ":" in address else str(address)


def _connects_late() -> bool:
    """Return whether gloo was asked to connect workers when they first need it, and so must go on listening."""
    return os.environ.get("TORCH_GLOO_LAZY_INIT", "").lower() in ("1", "true", "yes", "y")


def _open_store(world: World, timeout: timedelta) -> Any:
    """Return the job's store, listening only on the address where workers meet; torch would listen on all."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    assert world.master_addr is not None
    assert world.master_port is not None
    if world.rank != 0:
        return TCPStore(world.master_addr, world.master_port, world.size, False, timeout)
    job = this_job()
    if job is not None and job.listener is not None:
        listener, job.listener = job.listener, None
    else:
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
