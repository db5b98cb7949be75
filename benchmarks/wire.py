# ruff: noqa: D102 - the systems' methods are described once, in their protocol
"""How close a sharded sum over the wire comes to what the links can carry, beside gloo's and NCCL's allreduce.

Usage: python benchmarks/wire.py [--machines 4] [--rate 1gbit] [--megabytes 67] [--peers gloo,nccl] [--output FILE]
                                 [--wires "chunk_kb=2048; chunk_kb=2048,encrypt=1"]

Makes a lab, sums one buffer over all its machines with every system in turn, several rounds, and prints each system's
median time, its share of the wire bound (2 (n-1)/n of the buffer's bytes through one link), the processor time it
took on each machine, and whether the sums were right. ``--wires`` lists the ways to carry the sharded sum, each by
settings of the transport that differ from the default, and ``chunk_kb``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

CHUNK_KB = 2048
LONGEST_S = 60.0


@dataclass(frozen=True)
class Measured:
    """One system's rounds, as rank 0 reports them."""

    name: str
    seconds: list[float]
    cpu_ms_per_rank: float
    is_exact: bool


def main(arguments: list[str]) -> int:
    options = read_options(arguments)
    if options.worker:
        work(options)
        return 0
    from poseidon.lab import Job, Lab
    from poseidon.lab.gpu import sharing
    from poseidon.lab.job import JobOptions

    report = Path(options.output).resolve()
    report.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--worker", *arguments, "--output", str(report)]
    uses_gpu = "nccl" in options.peers
    with Lab(machines=options.machines, rate=options.rate) as lab, sharing(lab.name, uses_gpu) as mps_folder:
        job = Job(lab, command, JobOptions(share_gpu=uses_gpu, mps_folder=mps_folder, timeout_s=options.timeout))
        result = job.run()
        bound_s = bound(options, lab.spec.rates_bits[0] / 8)
    if result.status:
        print(result.reason, file=sys.stderr)
        return result.status
    systems = [Measured(**system) for system in json.loads(report.read_text())]
    print_table(options, systems, bound_s)
    write_report(report, options, systems, bound_s)
    return 0


def read_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=4)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--megabytes", type=float, default=67.0, help="size of the buffer, in millions of bytes")
    parser.add_argument("--rounds", type=int, default=7, help="rounds measured, after one that is not")
    parser.add_argument(
        "--wires", default="chunk_kb=2048; chunk_kb=2048,encrypt=1", help="ways to carry the sharded sum"
    )
    parser.add_argument("--peers", default="gloo", help="systems to compare with: gloo, nccl, or nothing")
    parser.add_argument("--bucket-mb", type=float, default=25.0, help="MiB that one allreduce of the peers carries")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds after which everything is ended")
    parser.add_argument("--output", default="wire.json", help="where the figures go")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.peers = [peer for peer in options.peers.split(",") if peer]
    options.wires = [wire.strip() for wire in options.wires.split(";")]
    options.elements = int(options.megabytes * 1e6) // 4
    return options


def bound(options: argparse.Namespace, rate_bytes: float) -> float:
    """Return the seconds that the bytes alone need on one link."""
    return 2 * (options.machines - 1) / options.machines * options.elements * 4 / rate_bytes


def print_table(options: argparse.Namespace, systems: list[Measured], bound_s: float) -> None:
    width = max(20, *(len(system.name) + 2 for system in systems))
    print(
        f"\nsum of {options.elements * 4 / 1e6:.0f} MB over {options.machines} machines at {options.rate}: "
        f"wire bound {bound_s * 1e3:.0f} ms, {options.rounds} rounds, median"
    )
    print(f"{'system':<{width}}{'ms':>8}{'of bound':>10}{'CPU ms/machine':>16}{'exact':>7}")
    for system in systems:
        median_s = statistics.median(system.seconds)
        print(
            f"{system.name:<{width}}{median_s * 1e3:>8.0f}{bound_s / median_s:>10.1%}"
            f"{system.cpu_ms_per_rank:>16.0f}{'yes' if system.is_exact else 'NO':>7}"
        )


def write_report(path: Path, options: argparse.Namespace, systems: list[Measured], bound_s: float) -> None:
    facts = {name: getattr(options, name) for name in ("machines", "rate", "megabytes", "rounds", "bucket_mb")}
    figures = [vars(system) | {"of_bound": bound_s / statistics.median(system.seconds)} for system in systems]
    path.write_text(json.dumps(facts | {"bound_s": bound_s, "cpus": os.cpu_count(), "systems": figures}, indent=1))


def work(options: argparse.Namespace) -> None:
    """Be one machine's worker: run the systems in turn, one round each, and let rank 0 write what was measured."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    systems: dict[str, System] = {f"poseidon {wire}": ShardedSum(options, wire) for wire in options.wires}
    for peer in options.peers:
        systems[f"{peer} allreduce"] = Allreduce(options, peer)
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    cpu: dict[str, float] = dict.fromkeys(systems, 0.0)
    exact = dict.fromkeys(systems, True)
    for number in range(options.rounds + 1):
        for name, system in systems.items():
            system.prepare()
            dist.barrier()
            began, began_cpu = time.perf_counter(), time.process_time()
            system.sum()
            took, took_cpu = time.perf_counter() - began, time.process_time() - began_cpu
            exact[name] &= system.is_exact()
            if number:
                seconds[name].append(took)
                cpu[name] += took_cpu
    report(options, seconds, cpu, exact)
    for system in systems.values():
        system.close()
    sys.stdout.flush()
    # The end of a process group may wait for threads that are of no use any more; what matters is closed.
    os._exit(0)


def report(
    options: argparse.Namespace, seconds: dict[str, list[float]], cpu: dict[str, float], exact: dict[str, bool]
) -> None:
    """Bring the ranks' figures together; a round took as long as its slowest rank."""
    import torch.distributed as dist

    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (seconds, cpu, exact))
    if dist.get_rank() == 0:
        measured = [
            Measured(
                name,
                [max(times) for times in zip(*(one[0][name] for one in everyone), strict=True)],
                statistics.mean(one[1][name] for one in everyone) / options.rounds * 1e3,
                all(one[2][name] for one in everyone),
            )
            for name in seconds
        ]
        Path(options.output).write_text(json.dumps([vars(one) for one in measured]))
    dist.barrier()


class System(Protocol):
    """A way to sum one buffer over all ranks."""

    def prepare(self) -> None:
        """Fill the buffer; not measured."""

    def sum(self) -> None:
        """Sum it; returns when this rank has the whole sum."""

    def is_exact(self) -> bool:
        """Say whether the sum is right."""

    def close(self) -> None:
        """End what was begun."""


@cache
def own_values(elements: int, rank: int) -> np.ndarray:
    """Return a rank's buffer: small whole numbers, whose sums are exact in any order."""
    return (np.arange(elements) % 1021 + rank).astype(np.float32)


@cache
def all_sums(elements: int, size: int) -> np.ndarray:
    """Return what the sum of all ranks' buffers must be."""
    return own_values(elements, 0) * size + size * (size - 1) // 2


class ShardedSum:
    """Chunks go to the ranks that own them, are summed there in rank order, and come back."""

    def __init__(self, options: argparse.Namespace, wire: str) -> None:
        import torch.distributed as dist

        from poseidon.lab.spec import spread_rates
        from poseidon.sums.chunks import cut
        from poseidon.sums.host import host_adders
        from poseidon.sums.server import SumServer
        from poseidon.sums.slots import Slot
        from poseidon.wire.settings import PREFIX, WireSettings, suited_to
        from poseidon.wire.tcp import TcpTransport

        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._values = own_values(options.elements, self._rank)
        self._result = np.zeros_like(self._values)
        self._expected = all_sums(options.elements, self._size)
        words = dict(word.split("=") for word in wire.split(",") if word)
        chunk_bytes = int(words.pop("chunk_kb", CHUNK_KB)) << 10
        (chunks,) = cut([options.elements], range(self._size), chunk_bytes // 4)
        self._slot = Slot(0, chunks, 0)
        self._clock = 0
        secret = [os.urandom(32) if self._rank == 0 else None]
        dist.broadcast_object_list(secret)
        environment = {PREFIX + name.upper(): value for name, value in words.items()}
        # As the engine would choose it.
        slowest_bits = min(spread_rates(options.rate, self._size))
        suited = suited_to(slowest_bits / 8, peers=self._size - 1)
        settings = WireSettings.from_environment(environment, interface="eth0", **suited)
        self._transport = TcpTransport(self._rank, self._size, secret[0], settings)
        self._server = SumServer(self._transport)
        (adder,) = host_adders([self._slot], ["float32"], self._rank)
        self._server.book([(self._slot, adder)])
        addresses = [""] * self._size
        dist.all_gather_object(addresses, self._transport.address)
        self._transport.connect(addresses)

    def prepare(self) -> None:
        self._clock += 1
        np.copyto(self._result, self._values)

    def sum(self) -> None:
        self._server.start(self._result, self._slot, self._clock).result(LONGEST_S)

    def is_exact(self) -> bool:
        return bool(np.array_equal(self._result, self._expected))

    def close(self) -> None:
        self._transport.close()


class Allreduce:
    """PyTorch's allreduce of the same buffer, in buckets; 25 MiB is what DistributedDataParallel uses."""

    def __init__(self, options: argparse.Namespace, backend: str) -> None:
        import torch
        import torch.distributed as dist

        self._group = dist.new_group(backend=backend)
        self._bucket_values = int(options.bucket_mb * 2**20) // 4
        self._expected = all_sums(options.elements, dist.get_world_size())
        self._values = torch.from_numpy(own_values(options.elements, dist.get_rank()))
        if backend == "nccl":
            self._values = self._values.cuda()
        self._sums = self._values.clone()

    def prepare(self) -> None:
        self._sums.copy_(self._values)
        self._wait_for_device()

    def sum(self) -> None:
        import torch.distributed as dist

        buckets = self._sums.split(self._bucket_values)
        works = [dist.all_reduce(bucket, group=self._group, async_op=True) for bucket in buckets]
        for work in works:
            work.wait()
        self._wait_for_device()

    def is_exact(self) -> bool:
        return bool(np.array_equal(self._sums.cpu().numpy(), self._expected))

    def close(self) -> None:
        """Do nothing: the process group ends with the process."""

    def _wait_for_device(self) -> None:
        if self._sums.is_cuda:
            import torch

            torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
