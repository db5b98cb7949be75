"""Train for very long with batches of random sizes: memory, threads and descriptors must stay as they were.

::

    python benchmarks/soak.py                                     # 100,000 steps in every mode, on 2 and on 3 workers
    python benchmarks/soak.py --steps 10000 --modes server --workers 2

Batches hop about for some thousand steps, which should change no plan; then they stay small or large for some hundred
steps each, which makes a new plan where that is clearly faster. Every worker counts, twenty times, its memory, threads,
descriptors and the living objects of each of Poseidon's classes. From the fifth count on, when everything has been
used, none of them may grow; how many objects there are depends on the plan in use, so they are compared most strictly
between counts under one plan. It also says how often a plan was made, and how often one was put to use.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

MODES = ("wrapper", "distribute", "server", "together")
"""The first three as if on machines of their own, so that everything travels; the last in shared memory."""
COUNTS = 20
WARM = 4
"""How many of the counts are before everything has been used."""
LAST = 5
"""How many of the counts are the end: the least of them counts, for exchanges under way come and go."""
SPARE_MB, SPARE_SHARE = 12.0, 0.03
"""What memory may differ by: the allocator's scraps."""
SPARE_OBJECTS, SPARE_UNDER_ONE_PLAN = 30, 2
LARGEST_BATCH = 64
CLASSES, OBJECTS = "poseidon.", "objects of Poseidon"
STAYS = 4
"""How often, between two counts, a batch stays."""


def count_here() -> dict[str, float]:
    """Return what this process has at present."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found: dict[str, float] = {
        "MB": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        "threads": len([*Path("/proc/self/task").iterdir()]),
        "descriptors": len([*Path("/proc/self/fd").iterdir()]),
    }
    kinds = Counter(type(each) for each in gc.get_objects())
    for kind, number in kinds.items():
        if str(getattr(kind, "__module__", "")).startswith(CLASSES):
            found[f"{kind.__module__}.{kind.__qualname__}"] = number
    found[OBJECTS] = sum(number for name, number in found.items() if name.startswith(CLASSES))
    return found


def judge(counts: list[dict[str, float]], plans: list[str]) -> list[str]:
    """Return what has grown; ``plans`` names the plan under which each count was taken."""
    before, last = counts[WARM:-LAST], counts[-LAST:]
    grown = []
    for name in sorted({name for each in counts for name in each}):
        spare = SPARE_OBJECTS if name.startswith((CLASSES, OBJECTS)) else 2
        grown += _compare(name, before, last, SPARE_MB if name == "MB" else spare)
    for plan in sorted({*plans[WARM:-LAST]} & {*plans[-LAST:]}):
        under = [each if other == plan else None for each, other in zip(counts, plans, strict=True)]
        same = [[each for each in part if each] for part in (under[WARM:-LAST], under[-LAST:])]
        grown += [f"under one plan, {text}" for text in _compare(OBJECTS, *same, SPARE_UNDER_ONE_PLAN)]
    return grown


def _compare(name: str, before: list[dict[str, float]], last: list[dict[str, float]], spare: float) -> list[str]:
    highest, now = max(each.get(name, 0) for each in before), min(each.get(name, 0) for each in last)
    if name == "MB":
        spare += SPARE_SHARE * highest
    return [f"{name}: {highest:g} before, {now:g} at the end"] if now > highest + spare else []


def choose_batch(chance: random.Random, number: int, between: int) -> int:
    """Return the batch of a step: any between even and odd counts, and one that stays between odd and even ones."""
    season, inside = divmod(number - 1, between)
    if season % 2 == 0:
        return chance.randint(1, LARGEST_BATCH)
    return (2, LARGEST_BATCH)[inside * STAYS // between % 2]


def start_training(mode: str, timeout_s: float) -> tuple[Callable[[int], object], Callable[[], None]]:
    """Return what makes a step with a batch of some size, and what ends."""
    import torch
    from torch import nn

    import poseidon
    from poseidon.planning.cluster import Cluster, Link

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(500, 32)
            self.body = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))

        def forward(self, numbers: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.body(self.table(numbers).mean(1))
            return out

    torch.manual_seed(0)
    net = Net()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), 0.01)
    workers = int(os.environ["WORLD_SIZE"])
    # So slow that which route is best depends on the batch.
    cluster = Cluster(machines=workers, between=Link(bits_per_s=1e8, latency_s=1e-4), flops=1e11)
    options = {"timeout_s": timeout_s} | ({} if mode == "together" else {"cluster": cluster})
    if mode in ("wrapper", "together"):
        model = poseidon.DistributedDataParallel(net, **options)
    else:
        update = {"update": "server"} if mode == "server" else {}
        model, optimizer = poseidon.distribute(net, optimizer, **update, **options)

    def step(batch: int) -> None:
        numbers = torch.randint(0, 500, (batch, 4))
        optimizer.zero_grad()
        model(numbers).square().mean().backward()
        optimizer.step()

    def end() -> None:
        model.verify_replicas()
        model.close()

    return step, end


def work(mode: str, steps: int, seed: int) -> int:
    """Be one worker."""
    rank = int(os.environ["RANK"])
    if mode != "together":
        os.environ["POSEIDON_MACHINE"] = f"machine{rank}"
    import poseidon
    from poseidon.engine.schedules import Schedules

    made: Counter[str] = Counter()
    in_use: list[Schedules] = []

    def counted(name: str) -> None:
        real = getattr(Schedules, name)

        def call(self: Schedules, *args: object) -> object:
            made[name] += 1
            in_use[:] = [self]
            return real(self, *args)

        setattr(Schedules, name, call)

    for name in ("_plan", "_bind"):
        counted(name)
    poseidon.init()
    step, end = start_training(mode, 120.0)
    chance = random.Random(f"{seed}/{rank}")
    counts, plans = [], []
    between = steps // COUNTS
    began = time.monotonic()
    for number in range(1, steps + 1):
        step(choose_batch(chance, number, between))
        if number % between == 0:
            counts.append(count_here())
            planned = in_use[0].planned
            assert planned is not None
            schedule = planned.schedule
            plans.append(repr((schedule.route_of, [item.parameters for item in schedule.items])))
            if rank == 0:
                shown = {name: value for name, value in counts[-1].items() if not name.startswith(CLASSES)}
                took_s = time.monotonic() - began
                print(f"{mode}: {number} steps, {took_s:.0f} s, {json.dumps(shown)}, {dict(made)}", flush=True)
    end()
    grown = judge(counts, plans)
    for text in grown:
        print(f"GROWN on rank {rank}: {text}", flush=True)
    return int(bool(grown))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--workers", default="2,3", help="how many, one job after the other")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.steps < COUNTS:
        parser.error(f"--steps must be at least {COUNTS}")
    modes = arguments.modes.split(",")
    if not set(modes) <= set(MODES):
        parser.error(f"--modes must be of {', '.join(MODES)}")
    if "RANK" in os.environ:
        return work(modes[0], arguments.steps, arguments.seed)
    wrong = []
    for workers in map(int, arguments.workers.split(",")):
        for mode in modes:
            own = ["--modes", mode, "--steps", str(arguments.steps), "--seed", str(arguments.seed)]
            command = ["run", "--quiet", "--log-dir", "none", "--nproc", str(workers), __file__, *own]
            print(f"{mode} on {workers} workers:", flush=True)
            status = subprocess.run(
                [sys.executable, "-m", "poseidon.cli", *command], env={**os.environ, "OMP_NUM_THREADS": "1"}
            ).returncode
            wrong += [f"{mode} on {workers}"] if status else []
    print("all flat" if not wrong else f"WRONG: {', '.join(wrong)}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
