"""Who runs where, and what every worker finds in its environment. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from poseidon.job import settings
from poseidon.launch.hosts import Host

PASSED_ON = ("POSEIDON_", "NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_", "OPENBLAS_", "GLOG_", "PYTHONPATH")
"""Variables of the launcher's environment with these beginnings go to workers on other machines as well."""

_PRIVATE = {
    variable.name
    for variable in (settings.SSH_OPTIONS, settings.LAB, settings.LAB_FOLDER, settings.TRACEBACK, settings.SECRET)
}


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
        """How the worker is called in messages."""
        return f"worker {self.rank} on {self.host}"


@dataclass(frozen=True)
class Meeting:
    """Where the workers of one start of a job meet."""

    address: str
    port: int
    secret: str
    run: str
    """Names this start of the job; marks its processes."""
    restart: int = 0


def place_workers(hosts: Sequence[Host]) -> list[Place]:
    """Return every worker's place by rank: machine by machine, as torchrun counts."""
    places: list[Place] = []
    for machine, host in enumerate(hosts):
        for local_rank in range(host.slots):
            places.append(Place(len(places), machine, local_rank, host.slots, host.name))
    return places


def worker_environment(
    place: Place, size: int, machines: int, meeting: Meeting, base: Mapping[str, str], cores: int
) -> dict[str, str]:
    """Return the variables of a worker on top of its machine's; what the user set in ``base`` stands."""
    defaults = {
        # The workers share the cores; more threads than cores would only get in each other's way.
        "OMP_NUM_THREADS": str(max(1, cores // place.local_size)),
        "PYTHONUNBUFFERED": "1",
        # A worker that hangs is ended with SIGABRT: then Python shows where it stood.
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
    """Return the launcher's variables that workers elsewhere get: ours, the libraries', and those asked for."""
    ours = {name: value for name, value in environ.items() if name.startswith(PASSED_ON) and name not in _PRIVATE}
    return {**ours, **asked}
