"""Run seeds of the simulation: one job each, with its faults, and all invariants checked.

::

    python tests/storm/seeds.py --seeds 10000            # stops at nothing; prints the seeds that failed
    python tests/storm/seeds.py --seed 1234 --trace      # one of them again, to the last bit, and what happened

The invariants: every worker ends with exactly the right bits, or the job ends within the fault's limit and names the
worker that the fault struck; nobody hangs; a fault that can be survived is survived.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")]

from storm.faults import KINDS, Fault
from storm.jobs import JOBS, Launcher, Plan, draw_plan
from storm.patching import simulated
from storm.world import World

LIMIT_S = 300.0
"""Virtual seconds; longer than any job may take, with any fault."""
MOST_MOVES = {"sums": 2500, "engine": 3000, "tables": 2500, "stale": 2500}
"""About as many as a job makes without a fault."""


@dataclass
class Outcome:
    """What came of one seed."""

    seed: int
    plan: Plan
    faults: list[Fault]
    digest: int
    moves: int
    seconds: float
    wrong: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    """What the workers' errors say."""

    def __str__(self) -> str:
        what = "; ".join(map(str, self.faults))
        verdict = "WRONG: " + "; ".join(self.wrong) if self.wrong else "ok"
        return (
            f"seed {self.seed}: {self.plan.kind}, {self.plan.workers} workers, {self.plan.steps} steps, {what}: "
            f"{verdict} [{self.moves} moves, {self.seconds:.3f} s, {self.digest:08x}]"
        )


def run_seed(seed: int, kinds: list[str] | None = None, keep_trace: bool = False) -> Outcome:
    """Run one job; the same seed always does the same."""
    chance = random.Random(seed)
    plan = draw_plan(chance)
    faults = [Fault(chance, plan, kinds or list(KINDS), MOST_MOVES[plan.kind])]
    with (
        quiet(keep_trace),
        mock.patch.dict(os.environ, plan.wire),
        simulated(),
        World(seed, keep_trace=keep_trace) as world,
    ):
        launcher = Launcher(world, plan)
        for fault in faults:
            fault.arm(launcher)
        began = world.now
        is_over = world.run([launcher.task], LIMIT_S)
        outcome = Outcome(seed, plan, faults, world.digest, world.moves, world.now - began)
        if not is_over:
            running = [process.name for process in launcher.workers if not process.is_dead]
            outcome.wrong.append(f"{world.problem}; {running} still run")
        outcome.wrong += check(launcher, faults)
        outcome.said = [f"worker {rank}: {type(e).__name__}: {e}"[:400] for rank, e in launcher.errors.items()]
        outcome.said += [f"{name} of {process} died of {e!r}"[:400] for process, name, e in world.crashes]
        outcome.trace = world.trace
    return outcome


def check(launcher: Launcher, faults: list[Fault]) -> list[str]:
    """Return which invariants a job has broken."""
    plan = launcher.plan
    struck = [fault for fault in faults if fault.struck_at is not None]
    wrong = []
    expected = JOBS[plan.kind][1](plan)
    for rank, result in launcher.results.items():
        if result != expected and plan.kind != "stale":
            wrong.append(f"worker {rank} ended well with the wrong bits")
    has_failed = launcher.verdict is not None
    fatal = [fault for fault in struck if not fault.kind.is_survived]
    culprits = {rank for fault in fatal for rank in fault.culprits}
    if not has_failed:
        if plan.kind == "stale":
            for rank, (said,) in launcher.results.items():
                if not set(json.loads(said)) <= culprits:
                    wrong.append(f"worker {rank} counts {said.decode()} as lost")
        return wrong
    assert launcher.verdict is not None
    if not fatal:
        wrong.append(f"the job failed without a fault that it could not survive: {launcher.verdict.how}")
        return wrong
    if launcher.verdict.rank not in culprits:
        wrong.append(f"worker {launcher.verdict.rank} is named ({launcher.verdict.how}), not one of {sorted(culprits)}")
    first = min(fault.struck_at or 0.0 for fault in fatal)
    limit_s = max(fault.kind.limit_s for fault in fatal)
    if launcher.verdict_at - first > limit_s:
        wrong.append(f"the end came {launcher.verdict_at - first:.1f} s after the fault; the limit is {limit_s:g} s")
    return wrong


class TraceHandler(logging.Handler):
    """Writes what the simulated code logs into the trace."""

    def emit(self, record: logging.LogRecord) -> None:
        if World.current is not None:
            World.current.trace.append(f"{'':12} {'':>8} {'log':<22} {record.getMessage()}")


@contextlib.contextmanager
def quiet(keep_trace: bool) -> Iterator[None]:
    """Log into the trace or nowhere, and collect garbage between seeds only: its finalizers would come at any time."""
    gc.disable()
    log = logging.getLogger("poseidon")
    before = logging.root.manager.disable
    handler = TraceHandler()
    log.addHandler(handler)
    logging.disable(logging.NOTSET if keep_trace else logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
        log.removeHandler(handler)
        gc.enable()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--trace", action="store_true", help="show everything that happened")
    parser.add_argument("--faults", help=f"of {', '.join(KINDS)}; default: all")
    arguments = parser.parse_args()
    kinds = arguments.faults.split(",") if arguments.faults else None
    chosen = range(arguments.first, arguments.first + arguments.seeds) if arguments.seed is None else [arguments.seed]
    failed = []
    count: Counter[str] = Counter()
    began = time.monotonic()
    for seed in chosen:
        outcome = run_seed(seed, kinds, arguments.trace)
        count[f"{outcome.plan.kind}, {outcome.faults[0].kind.name}"] += 1
        if arguments.trace:
            print("\n".join(outcome.trace))
        if outcome.wrong or arguments.seed is not None:
            print(outcome)
            print(*(f"    {text}" for text in outcome.said), sep="\n", flush=True)
        if outcome.wrong:
            failed.append(seed)
    print(f"{len(chosen)} seeds in {time.monotonic() - began:.1f} s, {len(failed)} failed: {failed[:50]}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
