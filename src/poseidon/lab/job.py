"""One distributed job in a lab: a worker on every machine, their output, their exit, the bytes they moved."""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which
from typing import IO

from poseidon.errors import ConfigError
from poseidon.job import members
from poseidon.lab.cluster import Lab
from poseidon.lab.environment import WorkerPlace, places, shared_gpu_environment, worker_environment
from poseidon.lab.network import Traffic

TIMED_OUT = 124
POLL_S = 0.01


@dataclass(frozen=True)
class JobOptions:
    """How a job is run."""

    workers_per_machine: int = 1
    share_gpu: bool = False
    """Let all workers use the same GPU, through MPS if ``mps_folder`` is set."""
    mps_folder: str | None = None
    stop_on_failure: bool = True
    """End the others as soon as one worker fails; otherwise wait for all, to see how they react."""
    timeout_s: float | None = None
    grace_s: float = 3.0
    """Time between SIGTERM and SIGKILL."""


@dataclass(frozen=True)
class JobResult:
    """How a job ended."""

    status: int
    """0 if every worker ended with 0, otherwise that of the first that did not; 124 past the time limit."""
    reason: str
    """Empty, or one line that says which worker failed and what happened to the others."""
    seconds: float
    statuses: tuple[int | None, ...]
    """Each worker's exit status by rank, negative for a signal; None for one that had to be killed."""
    traffic: tuple[Traffic, ...] = field(default=())
    """Bytes each machine moved during the job."""


class Job:
    """Run one command as a worker on every machine of a lab.

    ``Job(lab, ["python", "train.py"]).run()`` blocks until all workers have ended and nothing of the job is left.
    ``show`` receives each line of output with the worker's place; several threads call it, one at a time. An error in
    it ends the job, and ``run`` raises it.
    """

    def __init__(
        self,
        lab: Lab,
        command: Sequence[str],
        options: JobOptions | None = None,
        env: Mapping[str, str] | None = None,
        show: Callable[[WorkerPlace, str], None] | None = None,
    ) -> None:
        self._lab = lab
        self._command = resolve_command(command)
        self._options = options or JobOptions()
        self._env = env
        self._show = show or print_line
        self._id = secrets.token_hex(4)
        self._output_lock = threading.Lock()
        self._unshown: Exception | None = None
        """Why output could not be shown; no more of it is."""
        self._pumps: list[threading.Thread] = []
        self._counted_from = time.monotonic()
        if self._options.workers_per_machine < 1:
            raise ConfigError(f"a machine needs at least 1 worker, not {self._options.workers_per_machine}")
        if self._options.timeout_s is not None and not self._options.timeout_s > 0:
            raise ConfigError(f"the time limit of a job is {self._options.timeout_s:g} s, expected more than 0")
        self.places = places(lab.machines, self._options.workers_per_machine)

    def run(self) -> JobResult:
        """Start the workers, wait for them, end what is left, and return the result."""
        before = self._lab.traffic()
        began = time.monotonic()
        self.restart_clock()
        workers: list[subprocess.Popen[bytes]] = []
        try:
            self._start(workers)
            failed = self._watch(workers)
            statuses = [worker.poll() for worker in workers]
        finally:
            self._end(workers)
        if self._unshown is not None:
            raise self._unshown
        seconds = time.monotonic() - began
        moved = tuple(after - start for after, start in zip(self._lab.traffic(), before, strict=True))
        status, reason = self._judge(failed, statuses)
        return JobResult(status, reason, seconds, tuple(statuses), moved)

    def restart_clock(self) -> None:
        """Count the time limit from now on: the job's next part has all of it."""
        self._counted_from = time.monotonic()

    def _start(self, workers: list[subprocess.Popen[bytes]]) -> None:
        port = random.randint(20000, 30000)
        base = dict(os.environ if self._env is None else self._env) | {members.JOB_MARK: self._id}
        for place in self.places:
            env = worker_environment(place, port, base)
            if self._options.share_gpu:
                env |= shared_gpu_environment(place, self._id, self._options.mps_folder)
            worker = self._lab.spawn(
                place.machine, self._command, env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            workers.append(worker)
            assert worker.stdout is not None
            pump = threading.Thread(target=self._pump, args=(place, worker.stdout), daemon=True)
            pump.start()
            self._pumps.append(pump)

    def _pump(self, place: WorkerPlace, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                with self._output_lock:
                    if self._unshown is None:
                        self._show_line(place, line.decode(errors="replace").rstrip("\r\n"))

    def _show_line(self, place: WorkerPlace, line: str) -> None:
        # A worker whose output nobody reads any more would fail for that; the job ends for what was first.
        try:
            self._show(place, line)
        except Exception as error:
            self._unshown = error

    def _watch(self, workers: Sequence[subprocess.Popen[bytes]]) -> int | None:
        """Wait until all have ended, or one has failed and must end the job, or time is up, or output cannot be shown.

        Return the rank that failed first, None for none.
        """
        first_failed: int | None = None
        limit_s = self._options.timeout_s
        while True:
            statuses = [worker.poll() for worker in workers]
            if first_failed is None:
                first_failed = next((rank for rank, status in enumerate(statuses) if status), None)
            if None not in statuses:
                return first_failed
            if first_failed is not None and self._options.stop_on_failure:
                return first_failed
            if self._unshown is not None:
                return first_failed
            if limit_s is not None and time.monotonic() - self._counted_from > limit_s:
                return first_failed
            time.sleep(POLL_S)

    def _end(self, workers: Sequence[subprocess.Popen[bytes]]) -> None:
        """End the remaining workers, then everything they started, and print their remaining output."""

        def left() -> list[int]:
            # A worker may have dropped the mark by replacing its environment.
            unmarked = [worker.pid for worker in workers if worker.poll() is None]
            return [*unmarked, *members.pids_marked(members.JOB_MARK, self._id)]

        running = [worker.pid for worker in workers if worker.poll() is None]
        # A paused worker must be resumed before it can end.
        members.send_signal(running, signal.SIGTERM)
        members.send_signal(running, signal.SIGCONT)
        deadline = time.monotonic() + self._options.grace_s
        while any(worker.poll() is None for worker in workers) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        members.kill_all(left)
        for worker in workers:
            worker.wait()
        for pump in self._pumps:
            pump.join(timeout=5)

    def _judge(self, failed: int | None, statuses: Sequence[int | None]) -> tuple[int, str]:
        unfinished = sum(status is None for status in statuses)
        if failed is None:
            if not unfinished:
                return 0, ""
            return (
                TIMED_OUT,
                f"time limit of {self._options.timeout_s:g} s reached; {unfinished} workers were ended",
            )
        status = statuses[failed]
        assert status is not None
        others = f"; the other {unfinished} were ended" if unfinished else ""
        place = self.places[failed]
        return exit_status(status), f"{place.label} (rank {place.rank}) {describe_status(status)}{others}"


def resolve_command(command: Sequence[str]) -> list[str]:
    """Return the checked command; a bare script is run by this Python."""
    if not command:
        raise ConfigError("no command given; write it after --, as in: poseidon lab run -- python train.py")
    words = [sys.executable, *command] if command[0].endswith(".py") else list(command)
    if which(words[0]) is None:
        raise ConfigError(f"command {words[0]!r} is not found or not executable")
    script = next((word for word in words[1:] if not word.startswith("-")), "")
    runs_script = Path(words[0]).name.startswith("python") and words[1:2] == [script]
    if runs_script and not Path(script).exists():
        raise ConfigError(f"script {script!r} does not exist")
    return words


def exit_status(status: int) -> int:
    """Return a worker's status as a shell reports it: 128 + signal if it was killed."""
    return 128 - status if status < 0 else status


def describe_status(status: int) -> str:
    """Return in words how a worker ended."""
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def print_line(place: WorkerPlace, line: str) -> None:
    """Print a worker's line after its machine's name."""
    print(f"{place.label} | {line}", flush=True)
