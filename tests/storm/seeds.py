"""Run seeds of the simulation: one job each, with its faults, and all invariants checked.

::

    python tests/storm/seeds.py --seeds 10000                      # stops at nothing; prints the seeds that failed
    python tests/storm/seeds.py --seeds 10000 --kept seeds.jsonl   # ... and goes on where it was interrupted
    python tests/storm/seeds.py --seed 1234 --trace                # one of them again, to the last bit

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
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")]

from poseidon import ps
from storm.faults import KINDS, Fault
from storm.jobs import JOBS, Launcher, Plan, draw_plan, usual_moves
from storm.patching import simulated
from storm.world import World

LIMIT_S = 300.0
"""Virtual seconds; longer than any job may take, with any fault."""
AT_ONCE = 25
"""How many seeds a process gets at a time..."""
FEW_IN_A_PROCESS = 16
"""... and how often, before another process takes its place."""


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
    faults = [Fault(chance, plan, kinds or list(KINDS), usual_moves(plan))]
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
    jobs = list(ps._open_jobs)
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
        # Killed workers have closed nothing, and who asks for the open job next must not get one of theirs.
        ps._open_jobs[:] = jobs
        gc.enable()


def run_few(seeds: list[int], kinds: list[str] | None) -> list[dict[str, Any]]:
    """Run some seeds; return what came of each, as plain data."""
    found = []
    for seed in seeds:
        outcome = run_seed(seed, kinds)
        (fault,) = outcome.faults
        found.append(
            {
                "seed": seed,
                "job": outcome.plan.kind,
                "fault": fault.kind.name,
                "came": fault.struck_at is not None,
                "said": [str(outcome), *outcome.said] if outcome.wrong else [],
            }
        )
    return found


def run_all(
    seeds: list[int], kinds: list[str] | None, parallel: int, last_start: float = float("inf")
) -> Iterator[list[dict[str, Any]]]:
    """Run seeds in several processes, a few at a time; yield what came of them, in any order."""
    waiting = [seeds[start : start + AT_ONCE] for start in range(0, len(seeds), AT_ONCE)]
    # Fresh processes: the threads of this one would not live on in a copy. And others after a while: each seed leaves
    # half a megabyte behind, of threads that were killed in the middle of something.
    renewed: dict[str, Any] = {"max_tasks_per_child": FEW_IN_A_PROCESS} if sys.version_info >= (3, 11) else {}
    with ProcessPoolExecutor(parallel, get_context("spawn"), **renewed) as pool:
        running: set[Future[list[dict[str, Any]]]] = set()
        while waiting or running:
            while waiting and len(running) < 2 * parallel and time.monotonic() < last_start:
                running.add(pool.submit(run_few, waiting.pop(0), kinds))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for few in done:
                yield few.result()


class Tally:
    """What came of many seeds; in a file too, so that an interrupted run can go on."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.results: dict[int, dict[str, Any]] = {}
        if path is not None and path.exists():
            # A run that was killed may have left half a line.
            with contextlib.suppress(ValueError):
                for line in path.read_text().splitlines():
                    result = json.loads(line)
                    self.results[result["seed"]] = result

    def add(self, results: list[dict[str, Any]]) -> None:
        self.results |= {result["seed"]: result for result in results}
        if self._path is not None:
            with self._path.open("a") as file:
                file.write("".join(json.dumps(result) + "\n" for result in results))
        for result in results:
            if result["said"]:
                print(*result["said"], sep="\n    ", flush=True)

    def __str__(self) -> str:
        rows = [f"{'fault':<14}{'seeds':>8}{'came':>8}{'failed':>8}"]
        total: Counter[str] = Counter()
        for fault in (*KINDS, ""):
            mine = [result for result in self.results.values() if not fault or result["fault"] == fault]
            total = Counter(came=sum(r["came"] for r in mine), failed=sum(bool(r["said"]) for r in mine))
            if mine:
                rows.append(f"{fault or 'all':<14}{len(mine):>8}{total['came']:>8}{total['failed']:>8}")
        return "\n".join(rows)

    @property
    def failed(self) -> list[int]:
        return sorted(seed for seed, result in self.results.items() if result["said"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--trace", action="store_true", help="with --seed: show everything that happened")
    parser.add_argument("--faults", help=f"of {', '.join(KINDS)}; default: all")
    parser.add_argument("--parallel", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no seed after that")
    parser.add_argument(
        "--kept", type=Path, help="a file of results: those in it are not run again, new ones are added"
    )
    arguments = parser.parse_args()
    kinds = arguments.faults.split(",") if arguments.faults else None
    if not set(kinds or ()) <= set(KINDS):
        parser.error(f"--faults must be of {', '.join(KINDS)}")
    if arguments.seed is not None:
        outcome = run_seed(arguments.seed, kinds, arguments.trace)
        print(*outcome.trace, outcome, *(f"    {text}" for text in outcome.said), sep="\n")
        return int(bool(outcome.wrong))
    began = time.monotonic()
    tally = Tally(arguments.kept)
    chosen = range(arguments.first, arguments.first + arguments.seeds)
    left = [seed for seed in chosen if seed not in tally.results]
    for few in run_all(left, kinds, arguments.parallel, began + 60 * arguments.minutes):
        tally.add(few)
    missing = sum(seed not in tally.results for seed in chosen)
    print(tally)
    print(
        f"{len(tally.results)} seeds, {len(left) - missing} of them now in {time.monotonic() - began:.1f} s, "
        f"{missing} not run, {len(tally.failed)} failed: {tally.failed[:50]}"
    )
    return int(bool(tally.failed or missing))


if __name__ == "__main__":
    sys.exit(main())
