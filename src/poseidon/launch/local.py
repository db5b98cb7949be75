"""Workers on this machine: starts them, passes signals on to them, ends them all when one fails."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from poseidon.errors import ConfigError, WorkerLostError
from poseidon.job.interfaces import reserve_port
from poseidon.job.settings import LIFELINE
from poseidon.launch.hosts import MOST_WORKERS
from poseidon.launch.scratch import sweep

_POLL_S = 0.05
_GRACE_S = 5.0
_CAUSE_S = 10.0
"""For the worker that others blame to end too. It may be slower to do so than they are to notice."""
_PASSED_ON = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)


def run_workers(
    command: Sequence[str], count: int, environ: Mapping[str, str] | None = None, *, hears_interrupt: bool = True
) -> int:
    """Run ``command`` as ``count`` workers with torchrun's variables; return the exit status of the job.

    Workers share this process's output. The first one that fails ends the others. ``hears_interrupt=False`` is for
    workers that have nothing to do after a Ctrl-C: they are ended, and this function raises ``KeyboardInterrupt``.
    """
    if not 1 <= count <= MOST_WORKERS:
        raise ConfigError(f"a job on this machine has 1 to {MOST_WORKERS} workers, not {count}")
    reading, writing = os.pipe()
    workers: list[subprocess.Popen[bytes]] = []
    try:
        with _passing_signals_on(workers, hears_interrupt), reserve_port("127.0.0.1") as meeting:
            base = {**(os.environ if environ is None else environ), LIFELINE.name: str(reading)}
            for rank in range(count):
                env = worker_environment(rank, count, meeting.getsockname()[1], base)
                # Its own session: a Ctrl-C on the terminal reaches a worker once, through us, not twice.
                workers.append(subprocess.Popen(list(command), env=env, pass_fds=(reading,), start_new_session=True))
            return _wait(workers)
    finally:
        _end(workers)
        with contextlib.suppress(OSError):
            sweep(Path.cwd())
        os.close(reading)
        os.close(writing)


def worker_environment(rank: int, count: int, port: int, base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of one worker. Pure."""
    env = dict(base)
    env.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(count),
        LOCAL_WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # The workers share the cores; more threads than cores would only slow each other down.
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    return env


def follow_launcher() -> None:
    """End this worker when its launcher is gone; a no-op in a process that :func:`run_workers` did not start."""
    lifeline = LIFELINE.read()
    if lifeline is not None:
        threading.Thread(target=_wait_for_end, args=(lifeline,), name="poseidon-lifeline", daemon=True).start()


def _wait_for_end(lifeline: int) -> None:
    with contextlib.suppress(OSError):
        os.read(lifeline, 1)
    # No worker writes to the pipe, so the read ended because the launcher closed it.
    os._exit(1)


def _wait(workers: Sequence[subprocess.Popen[bytes]]) -> int:
    deadline = None
    while True:
        statuses = [worker.poll() for worker in workers]
        failed = {rank: status for rank, status in enumerate(statuses) if status}
        cause = next((rank for rank, status in failed.items() if status != WorkerLostError.exit_status), None)
        if failed and deadline is None:
            deadline = time.monotonic() + _CAUSE_S
        if cause is None and deadline is not None and (None not in statuses or time.monotonic() > deadline):
            cause = min(failed)
        if cause is not None:
            status = failed[cause]
            others = ", the others were ended" if None in statuses else ""
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            print(f"poseidon: worker {cause} {how}{others}", file=sys.stderr)
            return 128 - status if status < 0 else status
        if None not in statuses:
            return 0
        time.sleep(_POLL_S)


def _end(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        if worker.poll() is None:
            worker.terminate()
    deadline = time.monotonic() + _GRACE_S
    for worker in workers:
        try:
            worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


@contextlib.contextmanager
def _passing_signals_on(workers: Sequence[subprocess.Popen[bytes]], hears_interrupt: bool) -> Iterator[None]:
    def pass_on(number: int, _: object) -> None:
        for worker in workers:
            worker.send_signal(number)

    passed_on = [number for number in _PASSED_ON if hears_interrupt or number != signal.SIGINT]
    before = {number: signal.signal(number, pass_on) for number in passed_on}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
