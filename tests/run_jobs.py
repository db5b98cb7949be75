"""Start ``poseidon run`` as a user would and see how it ends; used by tests and by ``benchmarks/kill_rounds.py``."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from poseidon.job import members

PROGRAM = Path(__file__).with_name("launched.py")
MARK = "POSEIDON_TEST_JOB"
"""Travels with the environment to every process of a job, on other machines too."""

Spawn = Callable[..., "subprocess.Popen[bytes]"]


@dataclass(frozen=True)
class Ended:
    """How a job ended, and what it left."""

    status: int
    out: str
    err: str
    seconds: float
    left: tuple[str, ...]


class Started:
    """A job that runs; ``spawn`` starts it elsewhere than here, such as on a machine of a lab."""

    def __init__(
        self,
        words: Sequence[str | Path],
        folder: Path,
        env: Mapping[str, str] | None = None,
        spawn: Spawn | None = None,
    ) -> None:
        self._id = secrets.token_hex(6)
        unwanted = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
        base = {name: value for name, value in os.environ.items() if name not in unwanted}
        base |= {"OMP_NUM_THREADS": "1", **(env or {}), MARK: self._id}
        command = [sys.executable, "-m", "poseidon.cli", "run", *map(str, words)]
        self._files = [(folder / f"{name}-{self._id}") for name in ("out", "err")]
        out, err = (path.open("wb") for path in self._files)
        self._began = time.monotonic()
        self.process = (spawn or subprocess.Popen)(command, env=base, stdout=out, stderr=err, cwd=folder)
        out.close()
        err.close()

    @property
    def out(self) -> str:
        return self._files[0].read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._files[1].read_text(errors="replace")

    def wait_for(self, text: str, times: int = 1, limit_s: float = 60.0) -> None:
        """Return when the job has written a text so often."""
        deadline = time.monotonic() + limit_s
        while (self.out + self.err).count(text) < times:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise AssertionError(f"{text!r} did not come; out:\n{self.out}\nerr:\n{self.err}")
            time.sleep(0.02)

    def pids(self, having: str = "") -> list[int]:
        """Return the job's processes, or those whose command line has a text."""
        return [pid for pid in members.pids_marked(MARK, self._id) if having in _command(pid)]

    def wait_until_gone(self, limit_s: float = 15.0) -> None:
        """Return when no process of the job is left."""
        deadline = time.monotonic() + limit_s
        while pids := self.pids():
            if time.monotonic() > deadline:
                raise AssertionError(f"left behind: {[_command(pid) for pid in pids]}")
            time.sleep(0.02)

    def end(self, limit_s: float = 90.0) -> Ended:
        """Wait for the job's end; whatever is there afterwards was left behind."""
        try:
            status = self.process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            members.kill_all(self.pids)
            self.process.wait()
            raise AssertionError(f"the job did not end within {limit_s:g} s:\n{self.out}\n{self.err}") from None
        seconds = time.monotonic() - self._began
        left = tuple(_command(pid) for pid in self.pids())
        members.kill_all(self.pids)
        return Ended(status, self.out, self.err, seconds, left)


def run_poseidon(
    *words: str | Path, folder: Path, env: Mapping[str, str] | None = None, limit_s: float = 90.0
) -> Ended:
    """Run a job to its end; keep no log files unless asked for."""
    options = [] if "--log-dir" in words else ["--log-dir", "none"]
    return Started(["--quiet", *options, *words], folder, env).end(limit_s)


EXPECTED = {
    "exit": (7, "it ended with status 7"),
    "raise": (1, "ValueError: the reason of it all"),
    "kill": (137, "it was killed by SIGKILL"),
    "orphan": (137, "it was killed by SIGKILL"),
    "segv": (139, "it was killed by SIGSEGV"),
    "hang": (124, "it hangs: no progress"),
    "stop": (124, "it hangs: no progress"),
    "machine": (75, "its machine was lost"),
}
"""What a job must say and return for each fault."""


def check(ended: Ended, fault: str, rank: int, host: str) -> list[str]:
    """Return what is wrong with the end of a job in which one worker failed; nothing, if all is as it should be."""
    status, words = EXPECTED[fault]
    wrong = []
    if ended.status != status:
        wrong.append(f"status {ended.status} instead of {status}")
    if f"worker {rank} on {host} failed first" not in ended.err:
        wrong.append("the wrong cause")
    if words not in ended.err:
        wrong.append(f"no word of {words!r}")
    if ended.left:
        wrong.append(f"left behind: {ended.left}")
    return wrong


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
