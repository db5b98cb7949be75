"""What a probe reports of its host and of its links, as plain data that travels as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

from poseidon.errors import MismatchError
from poseidon.job.interfaces import Interface

T = TypeVar("T")

OPEN = "open"
"""The outcome of a connection that reached the probe at the other end."""
TIMED_OUT = "timed out"
BUSY = "in use"
"""The outcome for a port on which some other program of the host listens already."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, as the driver or as torch sees it."""

    name: str
    memory_bytes: int
    free_bytes: int = 0


@dataclass(frozen=True)
class HostFacts:
    """One host; empty text, zero or None stand for what could not be found out."""

    hostname: str
    machine: str = ""
    """Equal on two hosts if they are one machine under two names."""
    python: str = ""
    executable: str = ""
    poseidon: str = ""
    torch: str = ""
    torch_error: str = ""
    """Why torch cannot be imported."""
    numpy: str = ""
    interfaces: tuple[Interface, ...] = ()
    resolved: tuple[str, ...] = ()
    """Addresses to which the host resolves its own name."""
    ssh_server: str = ""
    """Address at which ssh reached the host."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that change how torch, gloo and NCCL behave, where set."""
    cpu: str = ""
    cpu_capability: str = ""
    """Instruction set that torch's kernels use, such as AVX2."""
    cores: int = 0
    threads: int = 0
    """Threads a worker would compute with."""
    digest: int | None = None
    """Equal on two hosts if their CPUs multiply matrices alike, bit for bit, with the threads above."""
    digest_one_thread: int | None = None
    gpu_digest: int | None = None
    memory_bytes: int = 0
    free_memory_bytes: int = 0
    directory: str = ""
    directory_error: str = ""
    free_disk_bytes: int = 0
    free_shared_bytes: int | None = None
    """Room in /dev/shm, through which data loaders hand batches over; None where there is no such folder."""
    open_files: int = 0
    """How many files a process may have open."""
    gpus: tuple[Gpu, ...] = ()
    """What torch can use."""
    driver_gpus: tuple[Gpu, ...] = ()
    """What nvidia-smi shows."""
    driver: str = ""
    cuda: str = ""
    """CUDA version torch was built for; empty for a CPU build."""
    firewall: str = ""
    """The program that manages the firewall, if one of those we know is installed."""
    ephemeral_ports: tuple[int, int] = (32768, 60999)
    """Ports the system chooses from when a program asks for any."""

    def interface(self, address: str) -> Interface | None:
        """Return the interface that has this address."""
        return next((one for one in self.interfaces if one.address == address), None)


@dataclass(frozen=True)
class PairFacts:
    """What one host measured towards another; None where it could not be measured."""

    source: str
    target: str
    ports: Mapping[int, str] = field(default_factory=dict)
    """Port of the target -> open, timed out, in use, or the system's words for why not."""
    latency_s: float | None = None
    """Half of the median round trip of one byte, software included."""
    one_stream_bits_per_s: float | None = None
    many_stream_bits_per_s: float | None = None
    stream_error: str = ""
    """Why a stream failed although the port is open."""
    packets: Mapping[int, bool] = field(default_factory=dict)
    """Size of an IP packet that may not be cut -> whether it arrived."""

    @property
    def is_connected(self) -> bool:
        """Whether any port of the target could be reached."""
        return OPEN in self.ports.values()

    @property
    def is_stuck(self) -> bool:
        """Whether connections open but no stream got through."""
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
        """Return the best of two looks at the same link: a moment's load makes figures worse, nothing better."""
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
    """A host's clock beside the clock of the machine that asks."""

    ahead_s: float
    uncertainty_s: float
    """Half of the shortest round trip: the clock may be ahead by that much more or less."""


@dataclass(frozen=True)
class HostReport:
    """One host of the job, with what its probe said and which of its addresses the others use."""

    name: str
    facts: HostFacts
    slots: int = 1
    address: str = ""
    clock: Clock = Clock(0.0, 0.0)
    wanted_interface: str = ""
    """The interface that the user named, if any."""
    is_local: bool = False
    """Whether this is the machine that asks, whose clock all others are compared with."""

    @property
    def interface(self) -> Interface | None:
        """The interface that carries the job's traffic."""
        return self.facts.interface(self.address)


def to_json(value: Any) -> dict[str, Any]:
    """Return plain data for one of the classes above."""
    return asdict(value)


def host_from_json(data: Mapping[str, Any]) -> HostFacts:
    """Return the facts a probe sent; fields this version does not know are passed over, missing ones stay empty."""
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
