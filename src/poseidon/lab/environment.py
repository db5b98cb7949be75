"""The environment of a worker, as torchrun would set it, plus variables that keep its traffic on the lab's links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from poseidon.lab.spec import machine_address

INTERFACE = "eth0"


@dataclass(frozen=True)
class WorkerPlace:
    """One worker's place in a job."""

    machine: int
    machines: int
    local_rank: int = 0
    workers_per_machine: int = 1

    @property
    def rank(self) -> int:
        """The worker's global rank; machine by machine, as torchrun counts."""
        return self.machine * self.workers_per_machine + self.local_rank

    @property
    def world_size(self) -> int:
        """How many workers the job has."""
        return self.machines * self.workers_per_machine

    @property
    def label(self) -> str:
        """The prefix of the worker's output: ``machine2``, or ``machine2.1`` if a machine has several."""
        return f"machine{self.machine}" + (f".{self.local_rank}" if self.workers_per_machine > 1 else "")


def places(machines: int, workers_per_machine: int) -> list[WorkerPlace]:
    """Return every worker's place, by rank."""
    return [
        WorkerPlace(machine, machines, local_rank, workers_per_machine)
        for machine in range(machines)
        for local_rank in range(workers_per_machine)
    ]


def worker_environment(place: WorkerPlace, port: int, base: Mapping[str, str]) -> dict[str, str]:
    """Return a worker's environment; the caller's own settings of threads and buffering win."""
    defaults = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return {
        **defaults,
        **base,
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.workers_per_machine),
        "GROUP_RANK": str(place.machine),
        "GROUP_WORLD_SIZE": str(place.machines),
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": machine_address(0),
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
        "TP_SOCKET_IFNAME": INTERFACE,
    }


def shared_gpu_environment(place: WorkerPlace, job: str, mps_folder: str | None) -> dict[str, str]:
    """Return the variables that let workers share one GPU and still talk over the lab's links.

    NCCL treats ranks with different host ids as different hosts, accepts that they use the same GPU and, with its
    shortcuts disabled, sends everything by TCP.
    """
    variables = {
        "NCCL_HOSTID": f"{job}-{place.rank}",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
    }
    if mps_folder is not None:
        variables["CUDA_MPS_PIPE_DIRECTORY"] = mps_folder
    return variables
