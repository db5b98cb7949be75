"""Rounds of faults on elastic jobs: what is lost, repeated or wrong afterwards, and how long a recovery takes.

``python benchmarks/elastic_rounds.py --rounds 40`` on this machine, ``--machines 4`` on as many emulated ones at 1
Gbit/s (needs root, sshd and the extra ``lab``). Each round trains ``tests/elastic_job.py`` with faults at random
moments (``--seed`` repeats them):

======= ================================================================================
kill    a worker is killed; the first rank as often as any
stop    its process is stopped for good
pause   and goes on after a moment
leave   it gets SIGTERM, as when its machine is shut down
cut     its machine's cable is pulled, and put in again later; then it joins
sleep   all of a machine's processes are stopped, and go on later
two     two workers are killed at once
during  one is killed while the others recover from the loss of another
======= ================================================================================

With ``--replacements`` lost workers come back and join. What is checked after each round is in
``tests/elastic_play.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS / "cluster"))
sys.path.insert(0, str(TESTS))

from elastic_play import RUN, OneMachine, Round, Site, Work, check, train_alone  # noqa: E402

KINDS = ("kill", "stop", "pause", "leave", "two", "during")
LAB_KINDS = (*KINDS, "cut", "sleep")


class EmulatedMachines:
    """Workers on the machines of a lab, one on each; the launcher runs on the first."""

    def __init__(self, lab: Any, env: dict[str, str]) -> None:
        self._lab = lab
        self._env = {**os.environ, **env, "OMP_NUM_THREADS": "1"}
        self._harmed: set[int] = set()

    def start(self, work: Work, words: list[str], output: IO[str]) -> subprocess.Popen[Any]:
        """Start ``poseidon run`` with the words of its program."""
        hosts = ",".join(f"machine{number}" for number in range(self._lab.machines))
        command = [*RUN, "--nodes", f"{work.least}:{self._lab.machines}", "--hosts", hosts]
        command += ["--replacements", str(work.replacements)]
        started: subprocess.Popen[Any] = self._lab.spawn(
            0, [*command, *words], env=self._env, stdout=output, stderr=subprocess.STDOUT
        )
        return started

    def harm(self, kind: str, host: str) -> bool:
        """Cut a machine off, or let it sleep; not the first, where the launcher is."""
        number = int(host.removeprefix("machine"))
        if number == 0:
            return False
        (self._lab.cut if kind == "cut" else self._lab.pause)(number)
        self._harmed.add(number)
        return True

    def heal(self) -> None:
        """Undo what was done."""
        for number in self._harmed:
            self._lab.heal(number)
        self._harmed.clear()

    def is_harmed(self, host: str) -> bool:
        """Whether a machine is cut off or sleeps."""
        return int(host.removeprefix("machine")) in self._harmed


@contextlib.contextmanager
def site_of(machines: int | None, rate: str, folder: Path) -> Iterator[Site]:
    """Return where the jobs run."""
    if machines is None:
        yield OneMachine()
        return
    from sshd import ensure_sshd, serving

    from poseidon.lab import Lab

    problem = ensure_sshd()
    if problem:
        raise SystemExit(problem)
    with Lab(machines=machines, rate=rate) as lab, serving(lab, folder) as ssh:
        yield EmulatedMachines(lab, ssh.env)


def describe(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the worst of some times."""
    return {"median_s": round(statistics.median(values), 2), "worst_s": round(max(values), 2)} if values else {}


def main() -> int:
    """Play the rounds, say what went wrong, and return 1 if anything did."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--machines", type=int, help="emulated ones, with a worker on each")
    parser.add_argument("--rate", default="1gbit", help="of their links")
    parser.add_argument("--model", default="mlp", help="mlp, lenet, transformer, or several with commas, in turn")
    parser.add_argument("--update", default="worker", choices=["worker", "server"], help="who takes optimizer steps")
    parser.add_argument("--replicas", type=int, default=1, help="of each owner's state, with --update server")
    parser.add_argument("--kinds", help=f"of faults, with commas; {','.join(LAB_KINDS)}")
    parser.add_argument("--replacements", type=int, default=0, help="how many lost workers come back in each round")
    parser.add_argument("--epochs", type=int, default=6, help="more give workers time to come back")
    parser.add_argument("--balance", action="store_true", help="workers of different speeds share batches by speed")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for one round")
    parser.add_argument("--keep", type=Path, help="folder for the notes of rounds that went wrong")
    arguments = parser.parse_args()
    known = KINDS if arguments.machines is None else LAB_KINDS
    kinds = known if arguments.kinds is None else tuple(arguments.kinds.split(","))
    if unknown := set(kinds) - set(known):
        parser.error(f"kinds {sorted(unknown)}: expected some of {', '.join(known)}; cut and sleep need --machines")
    workers, models = arguments.machines or arguments.workers, arguments.model.split(",")
    wrong, joined = 0, 0
    faults: list[str] = []
    noticed: list[float] = []
    recoveries: list[float] = []
    with tempfile.TemporaryDirectory() as text, site_of(arguments.machines, arguments.rate, Path(text)) as site:
        scratch = Path(text)
        expected = {
            model: train_alone(Work(model=model, epochs=arguments.epochs), scratch / f"alone-{model}")
            for model in models
        }
        for seed in range(arguments.seed, arguments.seed + arguments.rounds):
            work = Work(
                workers=workers,
                mode="server" if arguments.update == "server" else ("wrapper", "distribute")[seed % 2],
                replicas=arguments.replicas,
                model=models[seed // 2 % len(models)],
                epochs=arguments.epochs,
                replacements=arguments.replacements,
                kinds=kinds,
                pause_s=0.0 if arguments.balance else 0.05,
                pace_s=0.01 if arguments.balance else 0.0,
            )
            folder = Path(arguments.keep or scratch, f"round-{seed}")
            folder.parent.mkdir(parents=True, exist_ok=True)
            outcome = Round(work, folder, seed, site).play(arguments.limit)
            outcome.problems += check(folder, work, expected[work.model])
            faults += outcome.faults
            noticed += outcome.noticed_s
            recoveries += outcome.recoveries_s
            joined += outcome.joined
            pairs = zip(outcome.noticed_s, outcome.recoveries_s, strict=True)
            took = ", ".join(f"{first:.2f} + {second:.2f}" for first, second in pairs)
            what = f"round {seed} ({work.model}, {work.mode}): {' '.join(outcome.faults)}"
            print(f"{what}; {outcome.joined} joined; noticed + recovered in {took} s", flush=True)
            for problem in outcome.problems:
                print(f"  WRONG: {problem}", flush=True)
            wrong += bool(outcome.problems)
    summary: dict[str, Any] = {"rounds": arguments.rounds, "workers": workers, "faults": len(faults), "joined": joined}
    summary |= {"wrong": wrong, "noticed": describe(noticed), "recovered": describe(recoveries)}
    print(json.dumps(summary))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
