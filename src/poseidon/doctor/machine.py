"""Reads the facts of this host: versions, names, processors, memory, disks. Any of them may be missing."""

from __future__ import annotations

import contextlib
import csv
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from poseidon.doctor.facts import Gpu, HostFacts
from poseidon.job.interfaces import read_interfaces
from poseidon.version import __version__

_VARIABLES = (
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "MKL_CBWR",
    "ATEN_CPU_CAPABILITY",
    "CUDA_VISIBLE_DEVICES",
)
_FIREWALLS = ("ufw", "firewall-cmd", "iptables", "nft")
_NVIDIA_SMI_S = 10.0


def read_facts(directory: str, slots: int) -> HostFacts:
    """Return the facts about this host for a job of ``slots`` workers in ``directory``."""
    folder = Path(directory).expanduser() if directory else Path.cwd()
    drivers, driver = read_driver_gpus()
    threads = _threads_of_a_worker(slots)
    return HostFacts(
        hostname=socket.gethostname(),
        machine=_identity(),
        python=platform.python_version(),
        executable=sys.executable,
        poseidon=__version__,
        numpy=_numpy_version(),
        interfaces=read_interfaces(),
        resolved=_resolve(socket.gethostname()),
        ssh_server=_ssh_server(os.environ.get("SSH_CONNECTION", "")),
        environment={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        cpu=cpu_model(_read("/proc/cpuinfo")),
        cores=len(os.sched_getaffinity(0)),
        threads=threads,
        memory_bytes=memory_field(_read("/proc/meminfo"), "MemTotal"),
        free_memory_bytes=memory_field(_read("/proc/meminfo"), "MemAvailable"),
        directory=str(folder),
        directory_error=_directory_error(folder),
        free_disk_bytes=_free_bytes(folder) or 0,
        free_shared_bytes=_free_bytes(Path("/dev/shm")),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        driver_gpus=drivers,
        driver=driver,
        firewall=next(filter(shutil.which, _FIREWALLS), ""),
        ephemeral_ports=_ephemeral_ports(),
        **_torch_facts(threads),
    )


def source_address(peer: str) -> str:
    """Return the source address of the route to ``peer``, empty if there is none; sends nothing."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, target = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as asking:
            asking.connect(target)
            return str(asking.getsockname()[0])
    return ""


def cpu_model(cpuinfo: str) -> str:
    """Return the processor's name from the text of /proc/cpuinfo."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "cpu"):
            return value.strip()
    return platform.machine()


def memory_field(meminfo: str, name: str) -> int:
    """Return one field of /proc/meminfo in bytes, 0 if it is missing."""
    for line in meminfo.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def parse_nvidia_smi(text: str) -> tuple[tuple[Gpu, ...], str]:
    """Return GPUs and driver version from nvidia-smi's CSV output."""
    gpus, driver = [], ""
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == 3 and row[2].isdigit():
            gpus.append(Gpu(row[0], int(row[2]) << 20))
            driver = row[1]
    return tuple(gpus), driver


def read_driver_gpus() -> tuple[tuple[Gpu, ...], str]:
    """Return the driver's GPUs and version; nothing without nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True)
        return parse_nvidia_smi(answer.stdout)
    return (), ""


def _torch_facts(threads: int) -> Mapping[str, Any]:
    try:
        import torch

        from poseidon.team.calibrate import arithmetic_digest
    except Exception as error:  # a broken installation may raise anything, and that is the fact to report
        return {"torch_error": f"{type(error).__name__}: {error}"}
    cpu = torch.device("cpu")
    torch.set_num_threads(1)
    one_thread = arithmetic_digest(cpu)
    torch.set_num_threads(threads)
    return {
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "digest": arithmetic_digest(cpu),
        "digest_one_thread": one_thread,
        "cuda": torch.version.cuda or "",
        **(_cuda_facts() if torch.cuda.is_available() else {}),
    }


def _cuda_facts() -> Mapping[str, Any]:
    import torch

    from poseidon.team.calibrate import arithmetic_digest

    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "gpus": tuple(Gpu(one.name, one.total_memory) for one in properties),
        "gpu_digest": arithmetic_digest(torch.device("cuda", 0)),
    }


def _threads_of_a_worker(slots: int) -> int:
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) else max(1, len(os.sched_getaffinity(0)) // max(1, slots))


def _numpy_version() -> str:
    try:
        import numpy
    except Exception:  # as with torch
        return ""
    return str(numpy.__version__)


def _identity() -> str:
    boot = _read("/proc/sys/kernel/random/boot_id").strip()
    with contextlib.suppress(OSError):
        return f"{boot}|{Path('/proc/self/ns/net').readlink()}"
    return boot


def _resolve(name: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def _ssh_server(connection: str) -> str:
    words = connection.split()
    return words[2] if len(words) == 4 else ""


def _directory_error(folder: Path) -> str:
    return "" if folder.is_dir() and os.access(folder, os.X_OK) else "no such directory, or no permission to enter it"


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _ephemeral_ports() -> tuple[int, int]:
    words = _read("/proc/sys/net/ipv4/ip_local_port_range").split()
    return (int(words[0]), int(words[1])) if len(words) == 2 else (32768, 60999)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
