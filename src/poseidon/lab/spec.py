"""The description of a lab, as pure data: rates, delays, losses, addresses, and how users write them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from poseidon.errors import ConfigError
from poseidon.planning import cluster

MAX_MACHINES = 250
MAX_RATE_BITS = 34_000_000_000  # the kernel's tbf takes bytes per second in 32 bits
MIN_RATE_BITS = 64_000
UNSHAPED = 0

_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER_WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z%]+)", re.IGNORECASE)


@dataclass(frozen=True)
class LinkShape:
    """The shape of one end of a link: a token bucket in the terms of the kernel's ``tbf``."""

    rate_bytes: int
    """Bytes per second."""
    burst_bytes: int
    """Bytes that may leave at once after an idle time."""
    queue_bytes: int
    """Bytes that may wait, the burst included; more are dropped, as by a switch port."""


@dataclass(frozen=True)
class LabSpec:
    """A checked description of a lab: one rate per machine, in bits per second."""

    rates_bits: tuple[int, ...]
    """One per machine; 0 leaves that machine's link unshaped."""
    delay_s: float = 0.0
    """Added to every packet a machine sends, so a round trip takes twice this."""
    loss: float = 0.0
    """Fraction of packets lost as they leave a machine."""
    queue_s: float = 0.005
    """Depth of every port's queue; 5 ms is about what a switch port holds."""
    slow: Mapping[int, float] = field(default_factory=dict)
    """Machine -> how many times slower its processes run."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.rates_bits) <= MAX_MACHINES:
            raise ConfigError(f"a lab has 1 to {MAX_MACHINES} machines, not {len(self.rates_bits)}")
        for rate in self.rates_bits:
            if rate != UNSHAPED and not MIN_RATE_BITS <= rate <= MAX_RATE_BITS:
                raise ConfigError(f"a rate of {format_rate(rate)} cannot be shaped; use 64kbit to 34gbit, or 'none'")
        if not 0.0 <= self.delay_s <= 10.0:
            raise ConfigError(f"a delay of {self.delay_s} s is outside 0 to 10 s")
        if not 0.0 <= self.loss < 1.0:
            raise ConfigError(f"a loss of {self.loss:.2%} is outside 0% to 100%")
        if not 0.0001 <= self.queue_s <= 10.0:
            raise ConfigError(f"a queue of {self.queue_s} s is outside 0.1ms to 10s")
        for machine, factor in self.slow.items():
            check_machine(machine, self.machines)
            if not 1.0 < factor <= 100.0:
                raise ConfigError(f"machine {machine} cannot be {factor}x slower; use a factor above 1, at most 100")

    @property
    def machines(self) -> int:
        """How many machines the lab has."""
        return len(self.rates_bits)

    def shape(self, machine: int) -> LinkShape | None:
        """Return the shape of both ends of a machine's link; None if it is unshaped."""
        rate = self.rates_bits[machine]
        return None if rate == UNSHAPED else link_shape(rate, self.queue_s)

    def slower_shape(self, machine: int, factor: float) -> LinkShape:
        """Return the shape of a machine's link at a fraction of its speed."""
        rate = self.rates_bits[machine]
        if rate == UNSHAPED:
            raise ConfigError(
                f"the link of machine {machine} has no rate that could become slower; give the lab --rate"
            )
        if factor < 1.0:
            raise ConfigError(f"a link cannot be {factor:g} times slower; use a factor above 1")
        return link_shape(max(MIN_RATE_BITS, round(rate / factor)), self.queue_s)

    def describe(self) -> str:
        """Return one line for people, such as ``4 machines at 1gbit, delay 0.1 ms``."""
        rates = sorted(set(self.rates_bits), reverse=True)
        words = [f"{self.machines} machine{'s' if self.machines > 1 else ''} at "]
        words.append("/".join(format_rate(rate) for rate in rates))
        if self.delay_s:
            words.append(f", delay {self.delay_s * 1e3:g} ms")
        if self.loss:
            words.append(f", loss {self.loss * 100:g}%")
        for machine, factor in sorted(self.slow.items()):
            words.append(f", machine {machine} {factor:g}x slower")
        return "".join(words)

    def to_json(self) -> dict[str, Any]:
        """Return plain data from which :meth:`from_json` builds an equal spec."""
        return {
            "rates_bits": list(self.rates_bits),
            "delay_s": self.delay_s,
            "loss": self.loss,
            "queue_s": self.queue_s,
            "slow": {str(machine): factor for machine, factor in self.slow.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LabSpec:
        """Return the spec that :meth:`to_json` wrote."""
        return cls(
            rates_bits=tuple(data["rates_bits"]),
            delay_s=data["delay_s"],
            loss=data["loss"],
            queue_s=data["queue_s"],
            slow={int(machine): factor for machine, factor in data["slow"].items()},
        )


def make_spec(
    machines: int = 4,
    rate: str = "1gbit",
    delay: str = "",
    loss: str = "",
    queue: str = "5ms",
    slow: Sequence[str] = (),
) -> LabSpec:
    """Return the spec for options as written on the command line; empty words mean none."""
    if not 1 <= machines <= MAX_MACHINES:
        raise ConfigError(f"a lab has 1 to {MAX_MACHINES} machines, not {machines}")
    return LabSpec(
        rates_bits=spread_rates(rate, machines),
        delay_s=parse_duration(delay) if delay else 0.0,
        loss=parse_fraction(loss) if loss else 0.0,
        queue_s=parse_duration(queue),
        slow=dict(parse_slow(word) for word in slow),
    )


def link_shape(rate_bits: int, queue_s: float) -> LinkShape:
    """Return the token bucket for a rate.

    The burst covers the time a busy kernel may be late with tokens: 2 ms of the rate, 5 ms of a slow one. It stays
    above one 64 KB segment (larger packets would be segmented in software) and below 1 MB.
    """
    rate_bytes = rate_bits // 8
    burst = max(int(rate_bytes * 0.002), min(int(rate_bytes * 0.005), 1 << 17))
    burst = min(max(burst, 1 << 16), 1 << 20)
    return LinkShape(rate_bytes, burst, burst + max(int(rate_bytes * queue_s), burst))


def parse_rate(word: str) -> int:
    """Return bits per second for ``10gbit``, ``200mbit``, ``64kbit``; 0 for ``none``."""
    if word.strip().lower() == "none":
        return UNSHAPED
    return round(cluster.parse_rate(word))


def spread_rates(words: str, machines: int) -> tuple[int, ...]:
    """Return one rate per machine from one rate for all, or from exactly one for each."""
    rates = [parse_rate(word) for word in words.split(",")]
    if len(rates) == 1:
        return tuple(rates * machines)
    if len(rates) != machines:
        raise ConfigError(f"{len(rates)} rates ({words}) for {machines} machines; give one for all or one for each")
    return tuple(rates)


def format_rate(rate_bits: int) -> str:
    """Return a rate as users write it."""
    if rate_bits == UNSHAPED:
        return "none"
    for unit, bits in (("gbit", 10**9), ("mbit", 10**6)):
        if rate_bits >= bits:
            return f"{rate_bits / bits:g}{unit}"
    return f"{rate_bits / 1e3:g}kbit"


def parse_duration(word: str) -> float:
    """Return seconds for ``0.1ms``, ``50us``, ``2s``."""
    match = _NUMBER_WITH_UNIT.fullmatch(word.strip())
    if match is None or match[2].lower() not in _TIME_UNITS:
        raise ConfigError(f"duration {word!r} is not understood; write it as 0.1ms, 50us or 2s")
    return float(match[1]) * _TIME_UNITS[match[2].lower()]


def parse_fraction(word: str) -> float:
    """Return the fraction for ``0.01%``."""
    match = _NUMBER_WITH_UNIT.fullmatch(word.strip())
    if match is None or match[2] != "%":
        raise ConfigError(f"loss {word!r} is not understood; write it as 0.01%")
    return float(match[1]) / 100.0


def parse_slow(word: str) -> tuple[int, float]:
    """Return (machine, factor) for ``3:2.5x``."""
    match = re.fullmatch(r"(\d+):(\d+(?:\.\d+)?)x?", word.strip())
    if match is None:
        raise ConfigError(f"--slow {word!r} is not understood; write MACHINE:FACTOR, such as 3:2.5x")
    return int(match[1]), float(match[2])


def parse_machines(word: str, machines: int) -> list[int]:
    """Return machine numbers for ``2``, ``0,3`` or ``1-3``, each below ``machines``, without repeats."""
    numbers: list[int] = []
    for part in word.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            raise ConfigError(f"machines {word!r} are not understood; write them as 2, 0,3 or 1-3")
        numbers.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    for number in numbers:
        check_machine(number, machines)
    return list(dict.fromkeys(numbers))


def check_machine(machine: int, machines: int) -> None:
    """Raise unless the lab has this machine."""
    if not 0 <= machine < machines:
        raise ConfigError(f"no machine {machine} in this lab; it has machines 0 to {machines - 1}")


def machine_name(machine: int) -> str:
    """Return the host name a machine sees of itself."""
    return f"machine{machine}"


def machine_address(machine: int) -> str:
    """Return a machine's address; every lab is its own network, so all labs use the same addresses."""
    return f"10.77.0.{machine + 1}"
