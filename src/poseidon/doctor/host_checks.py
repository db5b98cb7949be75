"""Judges one host's facts. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from poseidon.doctor.facts import HostReport
from poseidon.doctor.findings import Finding, error, warning
from poseidon.planning.table import format_bytes

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 6)
GIB = 1 << 30
LITTLE_MEMORY = GIB
"""Per worker; Python and torch alone take a third of it."""
NO_MEMORY = GIB // 4
LITTLE_DISK = 2 * GIB
NO_DISK = 64 << 20
LITTLE_SHARED = GIB // 4
"""Docker's 64 MB are too little for a data loader with workers."""
FEW_FILES = 1024
SLOW_CARD_MBIT = 1000


def check_host(host: HostReport, is_alone: bool = False) -> list[Finding]:
    """Return the problems of one host; one that ``is_alone`` needs no network."""
    findings = [*_check_software(host), *_check_room(host), *_check_gpus(host)]
    if not is_alone:
        findings += [*_check_name(host), *_check_interface(host)]
    return findings


def is_loopback(address: str) -> bool:
    """Return whether an address always means the machine itself."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def version_numbers(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version, such as (2, 13) of ``2.13.0+cpu``."""
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (0, 0)


def _check_software(host: HostReport) -> Iterator[Finding]:
    facts = host.facts
    if facts.python and version_numbers(facts.python) < OLDEST_PYTHON:
        newest = ".".join(map(str, OLDEST_PYTHON))
        yield error(
            host.name,
            "python",
            f"Python {facts.python} at {facts.executable}",
            f"Python {newest} or newer",
            f"install Python {newest} or newer on {host.name} and name it with python= in the host file",
        )
    if facts.torch_error:
        yield error(
            host.name,
            "torch",
            f"torch cannot be imported: {facts.torch_error}",
            "an importable torch",
            f"{facts.executable} -m pip install --force-reinstall torch",
        )
    elif version_numbers(facts.torch) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        yield error(
            host.name,
            "torch",
            f"torch {facts.torch}",
            f"torch {oldest} or newer",
            f"{facts.executable} -m pip install --upgrade 'torch>={oldest}'",
        )


def _check_room(host: HostReport) -> Iterator[Finding]:
    facts = host.facts
    if facts.directory_error:
        yield error(
            host.name,
            "directory",
            f"{facts.directory}: {facts.directory_error}",
            "the working directory: the same path as here, or directory=",
            f"on {host.name}: mkdir -p {facts.directory}  (and copy or share the script)",
        )
    elif facts.free_disk_bytes < LITTLE_DISK:
        say = error if facts.free_disk_bytes < NO_DISK else warning
        yield say(
            host.name,
            "disk",
            f"{format_bytes(facts.free_disk_bytes)} free in {facts.directory}",
            f"{format_bytes(LITTLE_DISK)} for logs and checkpoints",
            f"du -xh {facts.directory} | sort -h | tail",
        )
    if facts.free_memory_bytes < LITTLE_MEMORY * host.slots:
        say = error if facts.free_memory_bytes < NO_MEMORY * host.slots else warning
        yield say(
            host.name,
            "memory",
            f"{format_bytes(facts.free_memory_bytes)} free for {host.slots} worker(s)",
            f"{format_bytes(LITTLE_MEMORY)} for each",
            "ps aux --sort=-rss | head",
        )
    if facts.free_shared_bytes is not None and facts.free_shared_bytes < LITTLE_SHARED:
        yield warning(
            host.name,
            "shared-memory",
            f"{format_bytes(facts.free_shared_bytes)} free in /dev/shm",
            f"{format_bytes(LITTLE_SHARED)} for data loaders with workers",
            "sudo mount -o remount,size=2G /dev/shm  (a container: start it with --shm-size=2g)",
        )
    if 0 <= facts.open_files < FEW_FILES:
        yield warning(
            host.name,
            "open-files",
            f"a process may open {facts.open_files} files",
            f"{FEW_FILES} or more",
            "ulimit -n 65536",
        )


def _check_gpus(host: HostReport) -> Iterator[Finding]:
    facts = host.facts
    if facts.driver_gpus and not facts.gpus and facts.torch and facts.environment.get("CUDA_VISIBLE_DEVICES") != "":
        why = (
            f"torch {facts.torch} is built for CUDA {facts.cuda}"
            if facts.cuda
            else f"torch {facts.torch} is a CPU build"
        )
        yield warning(
            host.name,
            "gpu",
            f"{len(facts.driver_gpus)} GPU(s) that torch cannot use; {why}, the driver is {facts.driver}",
            "GPUs that torch can use",
            f"{facts.executable} -m pip install --force-reinstall torch  (a CUDA build), or update the driver",
        )
    if facts.gpus and host.slots > len(facts.gpus):
        yield error(
            host.name,
            "gpu",
            f"{host.slots} workers for {len(facts.gpus)} GPU(s)",
            "at most one worker for each GPU",
            f"write {host.name}:{len(facts.gpus)} in the list of hosts",
        )


def _check_name(host: HostReport) -> Iterator[Finding]:
    facts = host.facts
    is_named = bool(facts.environment.get("GLOO_SOCKET_IFNAME"))
    if is_named or host.interface is None or any(not is_loopback(address) for address in facts.resolved):
        return
    seen = f"resolves to {', '.join(facts.resolved)}" if facts.resolved else "cannot be resolved"
    fix = f"echo '{host.address} {facts.hostname}' | sudo tee -a /etc/hosts"
    if facts.resolved:
        # The first entry wins, so remove this name, and only this one, from the loopback lines.
        words = f"/^(127\\.|::1)/s/[[:space:]]+{facts.hostname}([[:space:]]|$)/\\1/g"
        fix = f"sudo sed -i -E '{words}' /etc/hosts && {fix}"
    # `poseidon run` tells gloo the interface; under other launchers gloo guesses it from the host's name.
    yield warning(
        host.name,
        "host-name",
        f"its own name {facts.hostname} {seen} there",
        f"the address the others use, {host.address}: under torchrun or srun gloo listens where the name points",
        fix,
    )


def _check_interface(host: HostReport) -> Iterator[Finding]:
    names = {one.name for one in host.facts.interfaces}
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = host.facts.environment.get(variable, "")
        # NCCL accepts lists, prefixes and exclusions; only a plain name can be checked.
        if wanted and wanted not in names and re.fullmatch(r"\w+", wanted) and variable.startswith("GLOO"):
            yield error(
                host.name,
                "interface",
                f"{variable}={wanted}, but there is no such interface with an address",
                f"one of {', '.join(sorted(names))}",
                f"export {variable}={_name_of_interface(host)}",
            )
    card = host.interface
    if card is None:
        yield error(
            host.name,
            "interface",
            f"no interface {host.wanted_interface} with an address" if host.wanted_interface else "no network address",
            f"an interface that the other hosts reach; there are {', '.join(sorted(names)) or 'none'}",
            "name it: --interface NAME or interface= in the host file, or there: sudo ip link set NAME up",
        )
    elif card.is_wireless:
        yield warning(host.name, "interface", f"{card.name} is wireless", "a cable", "plug the cable in")
    elif card.speed_mbit is not None and card.speed_mbit < SLOW_CARD_MBIT:
        yield warning(
            host.name,
            "interface-speed",
            f"{card.name} runs at {card.speed_mbit} Mbit/s",
            f"{SLOW_CARD_MBIT} Mbit/s or more; one bad pair of wires makes a card fall back",
            f"change the cable or the switch port, then: sudo ethtool -r {card.name}",
        )


def _name_of_interface(host: HostReport) -> str:
    return host.interface.name if host.interface is not None else "NAME"
