"""A conversation with the probe of one host, here or over ssh: one question at a time, each with a deadline."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from poseidon.doctor.facts import Clock
from poseidon.errors import WorkerLostError
from poseidon.launch.hosts import Host
from poseidon.launch.ssh import FAILED, SshSettings, is_here, remote_python, start_command

_MODULE = "poseidon.doctor.probe"
_CLOCK_TRIES = 7
_END_S = 5.0


class NoProbeError(WorkerLostError):
    """The probe of a host could not be started; holds how the attempt ended."""

    def __init__(self, host: Host, status: int, stderr: str) -> None:
        super().__init__(f"no probe on {host.name}: status {status}: {stderr}")
        self.host = host
        self.status = status
        self.stderr = stderr


class LostProbeError(WorkerLostError):
    """The probe of a host ran, but no longer answers."""

    def __init__(self, host: Host, problem: str) -> None:
        super().__init__(f"the probe on {host.name} {problem}")
        self.host = host


class Conversation:
    """One host's probe, made by :func:`start`; a context manager that ends the probe."""

    def __init__(self, host: Host, process: subprocess.Popen[bytes], is_local: bool) -> None:
        self.host = host
        self.is_local = is_local
        self._process = process
        self._is_over = False
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._stderr: list[bytes] = []
        self._threads = [
            threading.Thread(target=target, name=f"doctor-{host.name}", daemon=True)
            for target in (self._read_lines, self._read_stderr)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Conversation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hang_up()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(_END_S)

    def greet(self, timeout_s: float) -> str:
        """Wait until the probe runs and return its version of Poseidon; raise :class:`NoProbeError` if it never does.

        Whatever a login shell prints first is ignored.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            message = self._receive(deadline)
            if message is None:
                raise self._no_probe(timeout_s)
            if "poseidon" in message:
                return str(message["poseidon"])

    def ask(self, question: str, timeout_s: float, **details: Any) -> Any:
        """Return the answer to a question; after one without an answer every call raises :class:`LostProbeError`."""
        if self._is_over:
            raise LostProbeError(self.host, "was lost before")
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(OSError):
            pipe = _pipe(self._process.stdin)
            pipe.write(json.dumps({"ask": question, **details}).encode() + b"\n")
            pipe.flush()
        message = self._receive(deadline)
        if message is None:
            # A late answer would look like that to the next question, so there is no next one.
            self._is_over = True
            ended = self._process.poll()
            how = f"within {timeout_s:g} s" if ended is None else f"but ended with status {ended}"
            raise LostProbeError(self.host, f"did not answer {question!r} {how}")
        if "answer" not in message:
            raise LostProbeError(self.host, f"could not answer {question!r}: {message.get('error', message)}")
        return message["answer"]

    def read_clock(self, timeout_s: float) -> Clock:
        """Compare clocks over the quickest of several round trips."""
        tries = []
        for _ in range(_CLOCK_TRIES):
            before, began = time.time(), time.perf_counter()
            theirs = float(self.ask("clock", timeout_s))
            round_trip = time.perf_counter() - began
            tries.append(Clock(theirs - before - round_trip / 2, round_trip / 2))
        return min(tries, key=lambda one: one.uncertainty_s)

    def hang_up(self) -> None:
        """Close the conversation, which ends the probe; does not wait for that."""
        with contextlib.suppress(OSError):
            _pipe(self._process.stdin).close()

    def _receive(self, deadline: float) -> dict[str, Any] | None:
        """Return the next message, None if the probe has ended or time is up."""
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
            if not line:
                return None
            with contextlib.suppress(ValueError, RecursionError):
                message = json.loads(line)
                if isinstance(message, dict):
                    return message

    def _no_probe(self, timeout_s: float) -> NoProbeError:
        try:
            # The output has ended, or time is up; a process that ends takes a moment to be reaped.
            status = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return NoProbeError(self.host, FAILED, f"{self._complaints()}\nno answer within {timeout_s:g} s")
        return NoProbeError(self.host, status, self._complaints())

    def _complaints(self) -> str:
        self._threads[1].join(_END_S)
        return b"".join(self._stderr).decode(errors="replace").strip()

    def _read_lines(self) -> None:
        with _pipe(self._process.stdout) as pipe:
            for line in pipe:
                self._lines.put(line)
        self._lines.put(b"")

    def _read_stderr(self) -> None:
        with _pipe(self._process.stderr) as pipe:
            self._stderr.extend(pipe)


def start(host: Host, settings: SshSettings) -> Conversation:
    """Start the probe of a host, without ssh if it is this machine; call :meth:`Conversation.greet` next."""
    if not is_here(host):
        directory = host.directory or str(Path.cwd())
        return Conversation(host, start_command(host, [remote_python(host, directory), "-m", _MODULE], settings), False)
    python = host.python or sys.executable
    pipe = subprocess.PIPE
    process = subprocess.Popen([python, "-m", _MODULE], stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    return Conversation(host, process, True)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
