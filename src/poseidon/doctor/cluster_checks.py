"""Finds differences between hosts that should not exist. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from poseidon.doctor.facts import HostReport
from poseidon.doctor.findings import Finding, error, warning
from poseidon.doctor.host_checks import SLOW_CARD_MBIT, version_numbers

T = TypeVar("T")

MOST_SKEW_S = 0.5


def check_cluster(hosts: Sequence[HostReport]) -> list[Finding]:
    """Return the differences between hosts; each names the host that differs from the majority."""
    checks = (_check_versions, _check_machines, _check_arithmetic, _check_gpus, _check_cards, _check_clocks)
    return [finding for check in checks for finding in check(hosts)]


def odd_ones(values: Mapping[str, T]) -> tuple[T, dict[str, T]]:
    """Return the value of the majority, and the others' values; in a tie the first host is right."""
    counts = Counter(values.values())
    usual = max(values.values(), key=lambda value: counts[value])
    return usual, {name: value for name, value in values.items() if value != usual}


def _check_versions(hosts: Sequence[HostReport]) -> Iterator[Finding]:
    for package in ("poseidon", "torch", "numpy"):
        found = {host.name: getattr(host.facts, package) for host in hosts if getattr(host.facts, package)}
        # Different builds may choose other kernels or frames; numpy touches only a worker's own data.
        say = warning if package == "numpy" else error
        for host, expected, seen in _odd(hosts, found):
            # Poseidon is not on PyPI.
            is_ours = package == "poseidon"
            source = (
                f"CHECKOUT  (a checkout or wheel of poseidon-dl=={expected})" if is_ours else f"{package}=={expected}"
            )
            yield say(
                host.name,
                f"{package}-version",
                f"{package} {seen}",
                f"{expected}, as on the other hosts",
                f"{host.facts.executable} -m pip install {source}",
            )
    pythons = {host.name: version_numbers(host.facts.python) for host in hosts if host.facts.python}
    for host, expected, _ in _odd(hosts, pythons):
        wanted = ".".join(map(str, expected))
        yield warning(
            host.name,
            "python-version",
            f"Python {host.facts.python}",
            f"{wanted}, as on the other hosts",
            f"name a Python {wanted} of {host.name} with python= in the host file",
        )


def _check_machines(hosts: Sequence[HostReport]) -> Iterator[Finding]:
    first: dict[str, str] = {}
    for host in hosts:
        other = first.setdefault(host.facts.machine, host.name)
        if other != host.name and host.facts.machine:
            yield warning(
                (other, host.name),
                "same-machine",
                f"{other} and {host.name} are the same machine",
                "every machine once, with its number of workers",
                f"write {other}:2 instead of both",
            )


def _check_arithmetic(hosts: Sequence[HostReport]) -> Iterator[Finding]:
    consequence = "bit-identical matrix products: otherwise no layer travels as factors, and results depend on the host"
    singles = {host.name: one for host in hosts if (one := host.facts.digest_one_thread) is not None}
    differing = {host.name for host, _, _ in _odd(hosts, singles)}
    for host, _, _ in _odd(hosts, singles):
        usual = _find(hosts, next(name for name in singles if name not in differing)).facts
        yield warning(
            host.name,
            "arithmetic",
            f"{host.facts.cpu} ({host.facts.cpu_capability}) rounds differently from "
            f"{usual.cpu} ({usual.cpu_capability})",
            consequence,
            "on every host: export MKL_CBWR=AVX2 ATEN_CPU_CAPABILITY=avx2",
        )
    several = {host.name: (host.facts.threads, host.facts.digest) for host in hosts if host.name not in differing}
    for host, expected, seen in _odd(hosts, several):
        if expected[1] != seen[1]:
            yield warning(
                host.name,
                "arithmetic",
                f"with {seen[0]} threads it rounds differently from the others with {expected[0]}",
                consequence,
                f"on every host: export OMP_NUM_THREADS={expected[0]}",
            )
    gpus = {host.name: one for host in hosts if (one := host.facts.gpu_digest) is not None}
    for host, _, _ in _odd(hosts, gpus):
        yield warning(
            host.name,
            "arithmetic",
            f"its GPU ({host.facts.gpus[0].name}) rounds differently from the others",
            consequence,
            "use hosts with the same GPU and driver",
        )


def _check_gpus(hosts: Sequence[HostReport]) -> Iterator[Finding]:
    if not any(host.facts.gpus for host in hosts):
        return
    for host in hosts:
        if not host.facts.gpus:
            yield error(
                host.name,
                "gpu",
                "no GPU that torch can use",
                "GPUs on every host, as the others have, or on none",
                f"leave {host.name} out, or on every host: export CUDA_VISIBLE_DEVICES=",
            )
    kinds = {host.name: host.facts.gpus[0].name for host in hosts if host.facts.gpus}
    for host, usual_kind, kind in _odd(hosts, kinds):
        yield warning(
            host.name,
            "gpu",
            kind,
            f"{usual_kind}, as on the other hosts: the slowest sets the pace",
            "group hosts with equal GPUs into one job",
        )
    drivers = {host.name: host.facts.driver for host in hosts if host.facts.gpus and host.facts.driver}
    for host, usual_driver, driver in _odd(hosts, drivers):
        yield warning(
            host.name,
            "gpu-driver",
            f"driver {driver}",
            f"{usual_driver}, as on the other hosts",
            f"install driver {usual_driver} on {host.name} and restart it",
        )


def _check_cards(hosts: Sequence[HostReport]) -> Iterator[Finding]:
    cards = {host.name: card for host in hosts if (card := host.interface) is not None}
    for host, expected, seen in _odd(hosts, {name: card.mtu for name, card in cards.items()}):
        yield warning(
            host.name,
            "mtu",
            f"{cards[host.name].name} has MTU {seen}",
            f"{expected}, as on the other hosts",
            f"sudo ip link set {cards[host.name].name} mtu {expected}",
        )
    speeds = {name: card.speed_mbit for name, card in cards.items() if card.speed_mbit is not None}
    for host, fastest, speed in _odd(hosts, speeds):
        # A slower card already has a finding of its own.
        if SLOW_CARD_MBIT <= speed < fastest:
            yield warning(
                host.name,
                "interface-speed",
                f"{cards[host.name].name} runs at {speed} Mbit/s",
                f"{fastest} Mbit/s, as on the other hosts",
                f"sudo ethtool -r {cards[host.name].name}",
            )


def _check_clocks(hosts: Sequence[HostReport]) -> Iterator[Finding]:
    opinions = [host.clock.ahead_s for host in hosts]
    if not any(host.is_local for host in hosts):
        opinions.append(0.0)
    # The machine that runs the doctor breaks a tie between two.
    right = min((statistics.median_low(opinions), statistics.median_high(opinions)), key=abs)
    for host in hosts:
        ahead = host.clock.ahead_s - right
        if abs(ahead) - host.clock.uncertainty_s > MOST_SKEW_S:
            direction = "ahead" if ahead > 0 else "behind"
            yield warning(
                host.name,
                "clock",
                f"its clock is {abs(ahead):.3g} s {direction}",
                f"within {MOST_SKEW_S:g} s of the others: otherwise logs and traces do not line up",
                "sudo timedatectl set-ntp true  (or: sudo chronyc makestep)",
            )


def _odd(hosts: Sequence[HostReport], values: Mapping[str, T]) -> Iterator[tuple[HostReport, T, T]]:
    """Yield (host, usual value, its value) for every host that differs from the majority."""
    if not values:
        return
    usual, others = odd_ones(values)
    for name, value in others.items():
        yield _find(hosts, name), usual, value


def _find(hosts: Sequence[HostReport], name: str) -> HostReport:
    return next(host for host in hosts if host.name == name)
