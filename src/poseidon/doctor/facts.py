"""What a probe reports about its host and its links, as plain data that travels as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

from poseidon.errors import MismatchError
from poseidon.job.interfaces import Interface

T = TypeVar("T")

OPEN = "open"
"""Outcome of a connection that reached the probe at the other end."""
TIMED_OUT = "timed out"
BUSY = "in use"
"""Outcome for a port on which another program of the host already listens."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, as reported by the driver or by torch."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class HostFacts:
    """One host; empty text, zero or None mean unknown."""

    hostname: str
    machine: str = ""
    """Equal on two hosts if they are the same machine under two names."""
    python: str = ""
    executable: str = ""
    poseidon: str = ""
    torch: str = ""
    torch_error: str = ""
    """Why torch cannot be imported."""
    numpy: str = ""
    interfaces: tuple[Interface, ...] = ()
    resolved: tuple[str, ...] = ()
    """Addresses that the host's own name resolves to there."""
    ssh_server: str = ""
    """Address that ssh connected to."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are set and affect torch, gloo or NCCL."""
    cpu: str = ""
    cpu_capability: str = ""
    """Instruction set that torch's kernels use, such as AVX2."""
    cores: int = 0
    threads: int = 0
    """Threads per worker."""
    digest: int | None = None
    """Equal on two hosts if their CPUs' matrix products are bit-identical, with the threads above."""
    digest_one_thread: int | None = None
    gpu_digest: int | None = None
    memory_bytes: int = 0
    free_memory_bytes: int = 0
    directory: str = ""
    directory_error: str = ""
    free_disk_bytes: int = 0
    free_shared_bytes: int | None = None
    """Free space in /dev/shm, through which data loaders pass batches; None if it does not exist."""
    open_files: int = 0
    """Limit of open files per process."""
    gpus: tuple[Gpu, ...] = ()
    """GPUs that torch can use."""
    driver_gpus: tuple[Gpu, ...] = ()
    """GPUs that nvidia-smi lists."""
    driver: str = ""
    cuda: str = ""
    """CUDA version that torch was built for; empty for a CPU build."""
    firewall: str = ""
    """The installed program that manages the firewall, if it is a known one."""
    ephemeral_ports: tuple[int, int] = (32768, 60999)
    """Range of ports that the system assigns."""

    def interface(self, address: str) -> Interface | None:
        """Return the interface that has this address."""
        return next((one for one in self.interfaces if one.address == address), None)


@dataclass(frozen=True)
class PairFacts:
    """What one host measured towards another; None if it could not be measured."""

    source: str
    target: str
    ports: Mapping[int, str] = field(default_factory=dict)
    """Port of the target -> open, timed out, in use, or the system's error text."""
    latency_s: float | None = None
    """Half the median round trip of one byte, software included."""
    one_stream_bits_per_s: float | None = None
    many_stream_bits_per_s: float | None = None
    stream_error: str = ""
    """Why a stream failed even though the port is open."""
    packets: Mapping[int, bool] = field(default_factory=dict)
    """Size of an IP packet that must not be fragmented -> whether it arrived."""

    @property
    def is_connected(self) -> bool:
        """Whether any port of the target could be reached."""
        return OPEN in self.ports.values()

    @property
    def is_stuck(self) -> bool:
        """Whether connections open but no stream gets through."""
        return bool(self.stream_error) and self.best_bits_per_s is None

    @property
    def path_mtu(self) -> int | None:
        """Largest packet that arrived."""
        return max((size for size, arrived in self.packets.items() if arrived), default=None)

    @property
    def best_bits_per_s(self) -> float | None:
        """The faster of one stream and many."""
        rates = [rate for rate in (self.one_stream_bits_per_s, self.many_stream_bits_per_s) if rate is not None]
        return max(rates, default=None)

    def better(self, other: PairFacts) -> PairFacts:
        """Return the best of two measurements of a link: load makes figures worse, nothing makes them better."""
        chosen = self if not other.is_connected or (other.stream_error and not self.stream_error) else other
        return replace(
            chosen,
            ports={port: OPEN if OPEN in (self.ports.get(port), seen) else seen for port, seen in other.ports.items()},
            latency_s=_best(min, self.latency_s, other.latency_s),
            one_stream_bits_per_s=_best(max, self.one_stream_bits_per_s, other.one_stream_bits_per_s),
            many_stream_bits_per_s=_best(max, self.many_stream_bits_per_s, other.many_stream_bits_per_s),
            packets={size: arrived or other.packets.get(size, False) for size, arrived in self.packets.items()}
            or other.packets,
        )


def _best(choose: Callable[[list[float]], float], *values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return choose(known) if known else None


@dataclass(frozen=True)
class Clock:
    """A host's clock compared with that of the machine that runs the doctor."""

    ahead_s: float
    uncertainty_s: float
    """Half the shortest round trip: ``ahead_s`` is accurate to this."""


@dataclass(frozen=True)
class HostReport:
    """One host of the job, with its probe's facts and the address that the others use."""

    name: str
    facts: HostFacts
    slots: int = 1
    address: str = ""
    clock: Clock = Clock(0.0, 0.0)
    wanted_interface: str = ""
    """The interface that the user named, if any."""
    is_local: bool = False
    """Whether this machine runs the doctor; all clocks are compared with its own."""

    @property
    def interface(self) -> Interface | None:
        """The interface that carries the job's traffic."""
        return self.facts.interface(self.address)


def to_json(value: Any) -> dict[str, Any]:
    """Return one of the classes above as plain data."""
    return asdict(value)


def host_from_json(data: Mapping[str, Any]) -> HostFacts:
    """Return the facts that a probe sent; unknown fields are ignored, missing ones stay empty."""
    known = _known(HostFacts, data)
    for name, kind in (("interfaces", Interface), ("gpus", Gpu), ("driver_gpus", Gpu)):
        known[name] = tuple(kind(**_known(kind, one)) for one in known.get(name, ()))
    for name in ("resolved", "ephemeral_ports"):
        if name in known:
            known[name] = tuple(known[name])
    return HostFacts(**known)


def _known(kind: type[Any], data: Any) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise MismatchError(f"a probe sent {type(data).__name__} where {kind.__name__} was expected")
    return {one.name: data[one.name] for one in fields(kind) if one.name in data}
