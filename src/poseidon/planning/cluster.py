"""What the planner knows about a cluster: machines, workers, and the speeds of links and devices."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from poseidon import files
from poseidon.errors import ConfigError

_RATE = re.compile(r"^\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?)(?:bit(?:/s)?|bps)\s*$", re.IGNORECASE)
_SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}

MOST_WORKERS = 1 << 20
"""More than any cluster that plans and simulations are for."""


def parse_rate(text: str) -> float:
    """Return the bits per second that ``"10gbit"``, ``"2.5Gbit/s"`` or ``"100mbit"`` stand for."""
    match = _RATE.match(text)
    if match is None:
        raise ConfigError(f"rate {text!r} is not a number and a unit; write 10gbit, 2.5gbit or 100mbit")
    try:
        value = float(match[1]) * _SCALE[match[2].lower()]
    except ValueError as error:
        raise ConfigError(f"rate {text!r}: {match[1]!r} is not a number") from error
    if not value > 0 or math.isinf(value):
        raise ConfigError(f"rate {text!r} must be positive and finite")
    return value


def format_rate(bits_per_s: float) -> str:
    """Format a rate for people: ``9.41 Gbit/s``."""
    for scale, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if bits_per_s >= 0.9995 * scale:
            return f"{bits_per_s / scale:.3g} {unit}"
    return f"{bits_per_s:.3g} bit/s"


@dataclass(frozen=True)
class Link:
    """A full-duplex link."""

    bits_per_s: float
    """Throughput of a program in each direction, without headers."""
    latency_s: float
    """Time for a tiny message from one program to another, software included."""

    def __post_init__(self) -> None:
        if not 0 < self.bits_per_s < math.inf:
            raise ConfigError(f"link rate is {self.bits_per_s} bit/s; it must be positive and finite")
        if not 0 <= self.latency_s < math.inf:
            raise ConfigError(f"link latency is {self.latency_s} s; it must not be negative or infinite")

    @property
    def bytes_per_s(self) -> float:
        """The rate in bytes."""
        return self.bits_per_s / 8


@dataclass(frozen=True)
class Cluster:
    """Machines, the workers on each, and the speeds that decide between routes."""

    machines: int
    workers_per_machine: int = 1
    """The largest count on any machine, where machines differ."""
    between: Link = Link(bits_per_s=1e9, latency_s=200e-6)
    """The slowest link from one machine to another."""
    inside: Link = Link(bits_per_s=40e9, latency_s=30e-6)
    """From one worker to another on the same machine."""
    flops: float = 50e9
    """Matrix-product rate of one worker's device, in floating-point operations per second."""
    source: str = "assumed"
    """Where the figures come from: assumed, given or measured; shown with the plan."""
    shared: Link | None = None
    """For sums of whole gradients among the workers of a machine, in memory that they share: an allreduce takes as long
    as over a link of this kind. None: sums use ``inside``."""

    def __post_init__(self) -> None:
        for name in ("machines", "workers_per_machine"):
            if not isinstance(getattr(self, name), int) or isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}, expected a whole number")
        if self.machines < 1:
            raise ConfigError(f"a cluster has at least 1 machine, not {self.machines}")
        if self.workers_per_machine < 1:
            raise ConfigError(f"a machine has at least 1 worker, not {self.workers_per_machine}")
        if self.machines * self.workers_per_machine > MOST_WORKERS:
            raise ConfigError(
                f"a cluster has at most {MOST_WORKERS} workers, not {self.machines} x {self.workers_per_machine}"
            )
        if not 0 < self.flops < math.inf:
            raise ConfigError(f"the device's matrix rate is {self.flops} flop/s; it must be positive and finite")

    @property
    def crossing(self) -> Link:
        """The slowest link between two workers: between machines, or inside the only one."""
        return self.between if self.machines > 1 else self.inside

    @property
    def combining(self) -> Link:
        """What sums of whole gradients use inside a machine."""
        return self.inside if self.shared is None else self.shared

    @property
    def workers(self) -> int:
        """Number of workers in the whole cluster."""
        return self.machines * self.workers_per_machine

    def __str__(self) -> str:
        def link(text: str, value: Link) -> str:
            return f"{text} {format_rate(value.bits_per_s)}, {value.latency_s * 1e6:.0f} us"

        parts = [f"{self.machines} machine{'s' * (self.machines > 1)} x {self.workers_per_machine} worker(s)"]
        if self.machines > 1:
            parts.append(link("between machines", self.between))
        if self.workers_per_machine > 1:
            parts.append(link("inside a machine", self.inside))
            if self.shared is not None:
                parts.append(link("sums in shared memory", self.shared))
        parts.append(f"device {self.flops / 1e9:.3g} GFLOP/s")
        return "; ".join(parts) + f" ({self.source})"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that :meth:`from_dict` reads back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any], origin: str = "cluster") -> Cluster:
        """Build a cluster from plain data; links may be given as ``{"rate": "10gbit", "latency_s": 1e-4}``."""
        known = set(cls.__dataclass_fields__)
        unknown = sorted(set(data) - known)
        if unknown:
            raise ConfigError(f"{origin}: unknown field {unknown[0]!r}; known: {', '.join(sorted(known))}")
        fields = dict(data)
        for name in ("between", "inside", "shared"):
            if fields.get(name) is not None:
                fields[name] = _link_from_dict(fields[name], f"{origin}: {name}")
        try:
            return cls(**fields)
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error}") from error
        except TypeError as error:
            raise ConfigError(f"{origin}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the cluster to a JSON file that :meth:`load` reads."""
        files.write_json(path, self.to_dict(), "cluster file")

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a cluster from a JSON file."""
        data = files.read_json(path, "cluster file")
        if not isinstance(data, dict):
            raise ConfigError(f"cluster file {path} holds {type(data).__name__}, expected an object")
        return cls.from_dict(data, origin=f"cluster file {path}")


def _link_from_dict(data: Any, origin: str) -> Link:
    if isinstance(data, Link):
        return data
    if not isinstance(data, dict):
        raise ConfigError(f"{origin} is {data!r}, expected an object with rate and latency_s")
    unknown = sorted(set(data) - {"rate", "bits_per_s", "latency_s"})
    if unknown:
        raise ConfigError(f"{origin}: unknown field {unknown[0]!r}; known: rate, bits_per_s, latency_s")
    if ("rate" in data) == ("bits_per_s" in data):
        raise ConfigError(f"{origin}: give either rate or bits_per_s")
    try:
        rate = parse_rate(str(data["rate"])) if "rate" in data else float(data["bits_per_s"])
        return Link(bits_per_s=rate, latency_s=float(data.get("latency_s", 200e-6)))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{origin}: {error}") from error
