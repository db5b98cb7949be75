"""What one step costs beyond its computation: processor time, Python calls, context switches and messages.

Usage: python benchmarks/small_steps.py MODEL [--workers 2] [--machines] [--rate 500mbit] [--batch 32] [--rounds 7]

MODEL is ``mlp`` (three linear layers) or a network of the zoo. Workers are processes on this machine. Without
``--machines`` Poseidon knows that they share it. With it each worker counts as a machine, and the plan is made for
links of ``--rate``; nothing is shaped, so times show the work and not the wire.

Rounds of all systems alternate, so that other load affects them alike; ``compute`` is the model without an exchange.
A second run counts Python calls and messages per step and worker: direct messages and the server's chunks, collectives
apart (those that DDP starts from C++ are not seen).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import poseidon
from poseidon import zoo
from poseidon.launch.local import follow_launcher, run_workers
from poseidon.planning.cluster import Cluster, Link, parse_rate
from poseidon.wire.transport import WireStats

SYSTEMS = ("compute", "ddp", "wrapper", "distribute", "server")
WARM_STEPS, TRIAL_STEPS = 6, 200
"""Steps before anything is measured: the plan is made, and collectives are reordered; with trials, plans are tried."""
COUNTED_STEPS = 10
Step = Callable[[], None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--machines", action="store_true", help="every worker counts as a machine")
    parser.add_argument("--rate", default="500mbit", help="of the links between the machines, for the plan")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--image-size", type=int, help="of a network of the zoo that reads images")
    parser.add_argument("--width", type=float, help="of a network of the zoo")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20, help="in a round")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--routes", type=json.loads, default=None, help='such as {"*": "sharded"}')
    parser.add_argument("--trials", action="store_true", help="let Poseidon try several plans first")
    parser.add_argument("--show-plan", action="store_true")
    parser.add_argument("--worker", choices=("times", "counts"), help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return 0
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("times", "counts"):
            file = Path(folder, kind)
            command = [sys.executable, __file__, *sys.argv[1:], "--worker", kind, "--output", str(file)]
            status = run_workers(command, options.workers)
            if status:
                return status
            for system, figures in json.loads(file.read_text()).items():
                found.setdefault(system, {}).update(figures)
    show(found)
    return 0


def show(found: dict[str, dict[str, float]]) -> None:
    columns = list(dict.fromkeys(name for figures in found.values() for name in figures))
    print(f"{'per step and worker':<20}" + "".join(f"{column:>13}" for column in columns))
    for system, figures in found.items():
        cells = (f"{figures[column]:13.2f}" if column in figures else " " * 13 for column in columns)
        print(f"{system:<20}" + "".join(cells))


def work(options: argparse.Namespace) -> None:
    follow_launcher()
    torch.set_num_threads(1)
    if options.machines:
        os.environ["POSEIDON_MACHINE"] = f"machine {os.environ['RANK']}"
    if not options.trials:
        os.environ["POSEIDON_TRIALS"] = "0"
    counter = Counted() if options.worker == "counts" else None
    poseidon.init()
    systems = {name: make(name, options) for name in options.systems.split(",")}
    for _ in range(WARM_STEPS + TRIAL_STEPS * options.trials):
        for step, _ in systems.values():
            step()
    for step, model in systems.values():
        while getattr(model, "is_choosing", False):
            step()
    if counter is None:
        figures = measure({name: step for name, (step, _) in systems.items()}, options.rounds, options.steps)
    else:
        figures = {name: counter.count(step) for name, (step, _) in systems.items() if name != "compute"}
    if dist.get_rank() == 0:
        options.output.write_text(json.dumps(figures))
    for name, (_, model) in systems.items():
        if isinstance(model, poseidon.DistributedDataParallel):
            if options.show_plan and dist.get_rank() == 0 and counter is None:
                print(name, model.plan, sep="\n", flush=True)
            model.close()
    dist.barrier()
    dist.destroy_process_group()


def make(system: str, options: argparse.Namespace) -> tuple[Step, nn.Module]:
    torch.manual_seed(0)
    plain, inputs, targets, loss = build(options)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3, momentum=0.9)
    model: nn.Module = plain
    if system == "ddp":
        model = nn.parallel.DistributedDataParallel(plain)
    elif system != "compute":
        cluster = None
        if options.machines:
            cluster = Cluster(options.workers, between=Link(parse_rate(options.rate), 200e-6), source="given")
        given: Any = {"cluster": cluster, "routes": options.routes}
        if system == "wrapper":
            model = poseidon.DistributedDataParallel(plain, **given)
        elif system == "server":
            model, optimizer = poseidon.distribute(plain, optimizer, cluster=cluster, update="server")
        else:
            model, optimizer = poseidon.distribute(plain, optimizer, **given)

    def step() -> None:
        optimizer.zero_grad()
        loss(model(*inputs), targets).backward()
        optimizer.step()

    return step, model


def build(options: argparse.Namespace) -> tuple[nn.Module, tuple[Any, ...], torch.Tensor, Callable[..., torch.Tensor]]:
    if options.model == "mlp":
        plain = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        targets = torch.randint(10, (options.batch,))
        return plain, (torch.randn(options.batch, 256),), targets, F.cross_entropy
    sizes = {"image_size": options.image_size, "width": options.width}
    network = zoo.build(options.model, **{name: value for name, value in sizes.items() if value is not None})
    inputs, targets = network.batch(options.batch, seed=dist.get_rank())
    return network.model, inputs, targets, network.loss


def measure(systems: dict[str, Step], rounds: int, steps: int) -> dict[str, dict[str, float]]:
    """Return medians over the rounds; processor time and context switches are means over the workers."""
    seen: dict[str, list[list[float]]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, step in systems.items():
            dist.barrier()
            walls = []
            before = resource.getrusage(resource.RUSAGE_SELF)
            for _ in range(steps):
                began = time.perf_counter()
                step()
                walls.append(time.perf_counter() - began)
            after = resource.getrusage(resource.RUSAGE_SELF)
            processor_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            switches = after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw
            mine = torch.tensor([statistics.median(walls) * 1e3, processor_s / steps * 1e3, switches / steps])
            dist.all_reduce(mine)
            seen[name].append((mine / dist.get_world_size()).tolist())
    figures = {}
    for name, rows in seen.items():
        wall, processor, switches = (statistics.median(column) for column in zip(*rows, strict=True))
        figures[name] = {"wall ms": wall, "processor ms": processor, "switches": switches}
    return figures


class Counted:
    """Counts Python calls on all threads, messages and collectives. Make it before any other thread starts."""

    def __init__(self) -> None:
        self._seen: defaultdict[str, float] = defaultdict(float)
        self._is_on = False
        for name in ("send", "allreduce", "allgather", "broadcast", "alltoall_base"):
            what = "messages" if name == "send" else "collectives"
            setattr(dist.ProcessGroup, name, self._counting(getattr(dist.ProcessGroup, name), what))
        count_sent = WireStats.count_sent

        def count(stats: WireStats, size_bytes: int, messages: int = 1) -> None:
            self._seen["messages"] += messages * self._is_on
            self._seen["wire KB"] += size_bytes * messages / 1e3 * self._is_on
            count_sent(stats, size_bytes, messages)

        WireStats.count_sent = count  # type: ignore[method-assign]
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def count(self, step: Step) -> dict[str, float]:
        """Return the counts per step."""
        dist.barrier()
        self._seen.clear()
        self._is_on = True
        for _ in range(COUNTED_STEPS):
            step()
        self._is_on = False
        return {name: self._seen[name] / COUNTED_STEPS for name in ("calls", "messages", "wire KB", "collectives")}

    def _profile(self, _: Any, event: str, __: Any) -> None:
        if self._is_on and event == "call":
            self._seen["calls"] += 1

    def _counting(self, function: Callable[..., Any], what: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._seen[what] += self._is_on
            return function(*args, **kwargs)

        return call


if __name__ == "__main__":
    sys.exit(main())
