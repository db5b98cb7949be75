"""Which worker runs where, and every worker's environment. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from poseidon.job import settings
from poseidon.launch.hosts import Host

PASSED_ON = (
    "POSEIDON_",
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "KERAS_",
    "TF_",
    "JAX_",
    "XLA_",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "GLOG_",
    "PYTHONPATH",
)
"""Prefixes of the launcher's variables that workers on other machines get too."""

_PRIVATE = {
    variable.name
    for variable in (
        settings.SSH_OPTIONS,
        settings.LAB,
        settings.LAB_FOLDER,
        settings.TRACEBACK,
        settings.SECRET,
        settings.SECRET_FILE,
    )
} | {"TF_CONFIG"}
"""Variables that do not travel. ``TF_CONFIG`` describes a cluster of TensorFlow's own and one machine's place in it."""


@dataclass(frozen=True)
class Place:
    """Where one worker runs."""

    rank: int
    machine: int
    """Number of its host."""
    local_rank: int
    local_size: int
    host: str
    """The host's name, as the user wrote it."""

    @property
    def label(self) -> str:
        """The worker's name in messages."""
        return f"worker {self.rank} on {self.host}"


@dataclass(frozen=True)
class Meeting:
    """Where the workers of one run of a job meet."""

    address: str
    port: int
    secret: str
    run: str
    """Name of this run of the job; marks its processes."""
    restart: int = 0


def place_workers(hosts: Sequence[Host]) -> list[Place]:
    """Return every worker's place by rank, machine by machine as torchrun counts."""
    places: list[Place] = []
    for machine, host in enumerate(hosts):
        for local_rank in range(host.slots):
            places.append(Place(len(places), machine, local_rank, host.slots, host.name))
    return places


def worker_environment(
    place: Place, size: int, machines: int, meeting: Meeting, base: Mapping[str, str], cores: int
) -> dict[str, str]:
    """Return the variables of a worker on top of its machine's; the user's in ``base`` override defaults."""
    defaults = {
        # The workers share the cores; more threads than cores would only slow each other down.
        "OMP_NUM_THREADS": str(max(1, cores // place.local_size)),
        "PYTHONUNBUFFERED": "1",
        # A hung worker is ended with SIGABRT, upon which Python prints its stacks.
        "PYTHONFAULTHANDLER": "1",
    }
    variables = {
        **defaults,
        **base,
        "RANK": str(place.rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "GROUP_RANK": str(place.machine),
        "GROUP_WORLD_SIZE": str(machines),
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.port),
        settings.RESTART.name: str(meeting.restart),
    }
    return {**variables, settings.SECRET.name: meeting.secret} if meeting.secret else variables


def passed_on(environ: Mapping[str, str], asked: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for workers on other machines: ours, the libraries', and the user's."""
    ours = {name: value for name, value in environ.items() if name.startswith(PASSED_ON) and name not in _PRIVATE}
    return {**ours, **asked}
