"""Kill a training job in every way at every time, again and again: never a hang, never an orphan, the right cause.

::

    python benchmarks/kill_rounds.py --rounds 20             # on this machine
    python benchmarks/kill_rounds.py --rounds 20 --parallel 3 --hang-timeout 60  # the same, three jobs side by side
    python benchmarks/kill_rounds.py --rounds 20 --ssh       # on 4 emulated machines over ssh (needs root)
    python benchmarks/kill_rounds.py --rounds 20 --pretend   # without PyTorch: the launcher alone, in 15 minutes
    python benchmarks/kill_rounds.py --rounds 1 --faults kill --whens middle

Each job trains with Poseidon's engine on 2 workers (``--ssh``: on 4 machines); one of them fails. A job is wrong when
it takes too long, blames another worker, returns another status, or leaves a process anywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "cluster")]

from run_jobs import EXPECTED, PROGRAM, Started, check  # noqa: E402

WHENS = ("start", "middle", "end")
HERE = ("exit", "raise", "kill", "segv", "orphan", "hang", "stop")
OVER_SSH = (*HERE, "cut", "agent")
LIMIT_S = 15.0
"""From the failure to the end of the job."""


class Place:
    """Where jobs run: this machine, or a lab."""

    def __init__(self, folder: Path, lab: object = None, env: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.lab = lab
        self.env = env
        self.workers = 2 if lab is None else 4

    def start(self, words: list[str | Path]) -> Started:
        """Start a job."""
        where = ["--nproc", "2"] if self.lab is None else ["--hosts", "machine0,machine1,machine2,machine3"]
        spawn = None if self.lab is None else (lambda command, **options: self.lab.spawn(0, command, **options))
        return Started(["--quiet", "--log-dir", "none", *where, *words], self.folder, self.env, spawn)

    def host(self, rank: int) -> str:
        """Return the name of the machine a worker is on."""
        return "localhost" if self.lab is None else f"machine{rank}"


def one_job(place: Place, fault: str, when: str, rank: int, hang_s: float, pretend: bool) -> tuple[list[str], float]:
    """Run one job; return what was wrong, and the seconds from the failure to the job's end."""
    acted = "machine" if fault in ("cut", "agent") else fault
    hang = hang_s if fault in ("hang", "stop") else 0.0
    words = ["--hang-timeout", str(hang), PROGRAM, "--fault", acted, "--rank", str(rank), "--when", when]
    words += ["--pretend"] if pretend else []
    job = place.start(words)
    try:
        job.wait_for(f"now: {acted}", limit_s=120)
        began = time.monotonic()
        act(place, fault, rank)
        ended = job.end(limit_s=60 + hang)
        seconds = time.monotonic() - began
    except AssertionError as error:
        return [str(error)], 0.0
    finally:
        if fault == "cut":
            place.lab.heal(rank)
    if fault == "cut":
        # Nobody can ask a machine that is cut off; its agent ends its workers by itself, a little later.
        ended = type(ended)(ended.status, ended.out, ended.err, ended.seconds, ())
        job.wait_until_gone()
    wrong = check(ended, acted, rank, place.host(rank))
    if seconds > LIMIT_S + hang:
        wrong.append(f"took {seconds:.1f} s")
    return ([f"{'; '.join(wrong)}\n{ended.err}"] if wrong else []), seconds


def act(place: Place, fault: str, rank: int) -> None:
    if fault == "cut":
        place.lab.cut(rank)
    elif fault == "agent":
        for pid in place.lab.processes(rank):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"poseidon.launch.agent" in words and b"python" in words[0]:
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def places(over_ssh: bool) -> Iterator[Place]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not over_ssh:
            yield Place(folder)
            return
        from sshd import serving

        from poseidon.lab import Lab

        with Lab(machines=4, rate="1gbit") as lab, serving(lab, folder) as ssh:
            yield Place(folder, lab, ssh.env)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ssh", action="store_true", help="4 emulated machines with real ssh servers")
    parser.add_argument("--pretend", action="store_true", help="without PyTorch: the launcher alone, much faster")
    parser.add_argument(
        "--hang-timeout", type=float, help="seconds; longer than the start takes, in which workers are quiet too"
    )
    parser.add_argument("--faults", help=f"of {', '.join(OVER_SSH)}; default: all that are possible")
    parser.add_argument("--whens", default=",".join(WHENS))
    parser.add_argument("--parallel", type=int, default=1, help="jobs side by side; on this machine only")
    parser.add_argument("--seed", type=int, default=0, help="chooses which worker fails")
    arguments = parser.parse_args()
    known = OVER_SSH if arguments.ssh else HERE
    faults = arguments.faults.split(",") if arguments.faults else known
    if not set(faults) <= set(known):
        parser.error(f"--faults must be of {', '.join(known)}")
    assert set(EXPECTED) >= set(HERE)
    hang_s = arguments.hang_timeout or (3.0 if arguments.pretend else 15.0)
    if arguments.ssh and arguments.parallel > 1:
        parser.error("--parallel does not go with --ssh: a machine that is cut off would harm the other jobs")
    chance = random.Random(arguments.seed)
    failures = 0
    slowest: dict[str, float] = {}
    with places(arguments.ssh) as place, ThreadPoolExecutor(arguments.parallel) as pool:
        cases = [
            # The machine of rank 0 is where the launcher runs: cutting that off is another matter.
            (number, fault, when, chance.randrange(1 if fault in ("cut", "agent") else 0, place.workers))
            for number in range(1, arguments.rounds + 1)
            for fault in faults
            for when in arguments.whens.split(",")
        ]
        pending = [pool.submit(one_job, place, *case[1:], hang_s, arguments.pretend) for case in cases]
        for (number, fault, when, rank), job in zip(cases, pending, strict=True):
            wrong, seconds = job.result()
            failures += bool(wrong)
            slowest[fault] = max(seconds, slowest.get(fault, 0.0))
            verdict = "WRONG" if wrong else "ok"
            print(f"round {number} {fault:>6} {when:>6} worker {rank}: {verdict} {seconds:.1f} s", flush=True)
            for text in wrong:
                print(text, flush=True)
    print(f"\n{len(cases)} jobs, {failures} wrong; longest from failure to end:")
    for fault, seconds in slowest.items():
        print(f"  {fault:<7} {seconds:5.1f} s")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
