"""Kill a worker of the same training under Poseidon, torchrun and torchft: what is lost, and for how long.

::

    pip install --target FOLDER torchft            # without it, torchft is left out
    python benchmarks/elastic_peers.py --rounds 5 --torchft FOLDER

Four workers of this machine train the same small LeNet in double precision on the same samples in the same order. In
each round one of them gets SIGKILL at some step, the same in all systems, which take turns. Then it says how long it
took until the training was two steps further than at that moment, how many steps were taken twice, how many samples
went missing, and how far the result is from that of a run alone. torchrun goes on from a checkpoint of every fifth
step; torchft gets a new process for the killed one at once, as its launchers do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))

import torch  # noqa: E402

from elastic_play import JOB, RUN, Notes, Work, send, train_alone  # noqa: E402

PEERS_JOB = Path(__file__).with_name("elastic_peers_job.py")
FURTHER = 2
LIMIT_S = 150.0
Processes = list[subprocess.Popen[bytes]]


@dataclass(frozen=True)
class Result:
    """What came of one kill."""

    back_s: float
    """Until training was :data:`FURTHER` steps further than at the kill."""
    twice: int
    """Steps that were taken again."""
    missing: int
    """Samples of completed steps after the kill that no worker used."""
    off: float
    """The largest difference of a parameter from a run alone."""


class Jobs:
    """Starts the training under each system."""

    def __init__(self, work: Work, torchft: Path | None) -> None:
        self.work = work
        self._torchft = torchft
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}

    @property
    def systems(self) -> list[str]:
        """Those that can run here."""
        return ["poseidon", "torchrun", *(["torchft"] if self._torchft else [])]

    @contextlib.contextmanager
    def run(self, system: str, notes: Path) -> Iterator[tuple[Processes, Any]]:
        """Yield the processes that must end, and a function that replaces a killed worker."""
        started: Processes = []
        with (notes / "output").open("wb") as output:

            def start(*command: object, **env: str) -> None:
                words = [str(word) for word in command]
                options: Any = {"stdout": output, "stderr": output, "env": {**self._env, **env}}
                started.append(subprocess.Popen(words, start_new_session=True, **options))

            def worker(rank: int) -> None:
                start(sys.executable, PEERS_JOB, "torchft", "--rank", rank, *self._words(notes), **servers)

            servers: dict[str, str] = {}
            try:
                if system == "poseidon":
                    count = f"1:{self.work.workers}"
                    start(*RUN, "--nproc", count, "--replacements", 1, JOB, *self.work.arguments(notes))
                elif system == "torchrun":
                    options = ["--standalone", "--nproc-per-node", self.work.workers, "--max-restarts", 3]
                    words = ["-m", "torch.distributed.run", *options, PEERS_JOB, system, *self._words(notes)]
                    # Otherwise, as of torch 2.13, restarted workers find the addresses of the dead ones in the store.
                    start(sys.executable, *words, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
                else:
                    servers |= self._light(start)
                    for rank in range(self.work.workers):
                        worker(rank)
                # torchft's server, the first, runs on.
                yield started[1:] if system == "torchft" else started, worker if system == "torchft" else _nothing
            finally:
                for process in started:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def _words(self, notes: Path) -> list[str]:
        given = {"notes": notes, "model": self.work.model, "epochs": self.work.epochs, "pause": self.work.pause_s}
        given |= {"samples": self.work.samples, "batch": self.work.batch, "workers": self.work.workers}
        return [word for name, value in given.items() for word in (f"--{name}", str(value))]

    def _light(self, start: Any) -> dict[str, str]:
        """Start the server that torchft's workers meet at; return what they must know."""
        assert self._torchft is not None
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        options = [
            "--min_replicas",
            1,
            "--join_timeout_ms",
            1000,
            "--quorum_tick_ms",
            50,
            "--heartbeat_timeout_ms",
            2000,
        ]
        path = os.pathsep.join(filter(None, [str(self._torchft), os.environ.get("PYTHONPATH", "")]))
        server = self._torchft / "bin" / "torchft_lighthouse"
        start(sys.executable, server, "--bind", f"127.0.0.1:{port}", *options, PYTHONPATH=path)
        return {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "PYTHONPATH": path}


def _nothing(_rank: int) -> None:
    """Leave it to the launcher of the system."""


def play(jobs: Jobs, system: str, notes: Path, at: int, victim: int, expected: dict[str, torch.Tensor]) -> Result:
    """Train, kill a worker after step ``at``, and see what comes of it."""
    notes.mkdir()
    with jobs.run(system, notes) as (processes, replace):

        def has_ended() -> bool:
            return all(process.poll() is not None for process in processes)

        _until(lambda: Notes(notes).furthest >= at, "the training began", notes, has_ended)
        seen = Notes(notes)
        name = sorted(seen.pids)[victim]
        began = time.monotonic()
        send(seen.pids[name], signal.SIGKILL)
        replace(int(name.partition("-")[0]))
        before = max(at, Notes(notes).furthest)
        _until(lambda: Notes(notes).furthest >= before + FURTHER, "the training went on", notes, has_ended)
        back_s = time.monotonic() - began
        _until(has_ended, "the training ended", notes)
    found = Notes(notes)
    missing = twice = 0
    # Before the kill, torchft's first workers may have begun without the last.
    for step in range(before + 1, jobs.work.steps + 1):
        attempts = found.done.get(step) or found.left_with(step)
        used = found.tries[max(attempts), step].values() if attempts else ()
        missing += jobs.work.batch - len({number for ids in used for number in ids})
    for attempts in found.done.values():
        twice += len(attempts) - 1
    finals = [torch.load(path) for path in notes.glob("final-*.pt")]
    off = max(float((one[name] - value).abs().max()) for one in finals for name, value in expected.items())
    return Result(back_s, twice, missing, off)


def _until(is_so: Callable[[], bool], what: str, folder: Path, is_over: Callable[[], bool] = lambda: False) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        if is_over() or time.monotonic() > deadline:
            raise TimeoutError(f"not within {LIMIT_S:g} s: {what}\n{(folder / 'output').read_text()[-3000:]}")
        time.sleep(0.02)


def main() -> int:
    """Play the rounds and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="lenet", choices=["mlp", "lenet", "transformer"])
    parser.add_argument("--torchft", type=Path, help="a folder into which torchft was installed")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    jobs = Jobs(Work(model=arguments.model, mode="wrapper", replacements=1), arguments.torchft)
    chance = random.Random(arguments.seed)
    found: dict[str, list[Result]] = {system: [] for system in jobs.systems}
    failed: dict[str, list[str]] = {system: [] for system in jobs.systems}
    with tempfile.TemporaryDirectory() as text:
        expected = train_alone(jobs.work, Path(text, "alone"))
        for number in range(arguments.rounds):
            at, victim = chance.randint(5, jobs.work.steps // 2), chance.randrange(jobs.work.workers)
            for system in jobs.systems:
                try:
                    result = play(jobs, system, Path(text, f"{system}{number}"), at, victim, expected)
                except (TimeoutError, ValueError) as error:
                    failed[system].append(str(error))
                    print(f"round {number}, {system}: FAILED: {error}", flush=True)
                    continue
                found[system].append(result)
                print(f"round {number}, worker {victim} after step {at}, {system}: {result}", flush=True)
    head = f"{'system':<10}{'back after s':>14}{'worst':>8}{'twice':>7}{'samples missing':>17}{'off by':>10}"
    print(f"\n{head}{'failed':>8}")
    for system, results in found.items():
        if results:
            back = [one.back_s for one in results]
            line = (
                f"{system:<10}{statistics.median(back):>14.2f}{max(back):>8.2f}{sum(one.twice for one in results):>7}"
            )
            line += f"{sum(one.missing for one in results):>17}{max(one.off for one in results):>10.1e}"
            print(f"{line}{len(failed[system]):>8}")
    if arguments.output:
        rows = {system: [vars(one) for one in results] for system, results in found.items()}
        arguments.output.write_text(json.dumps({"results": rows, "failed": failed}, indent=1) + "\n")
    return int(bool(failed["poseidon"]) or any(one.twice or one.missing or one.off > 1e-9 for one in found["poseidon"]))


if __name__ == "__main__":
    sys.exit(main())
