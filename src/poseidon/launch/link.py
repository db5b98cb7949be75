"""The launcher's connection to one agent: starts it, reads its messages, notices its silence."""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any, TypeAlias

from poseidon.errors import ConfigError
from poseidon.launch import protocol, ssh
from poseidon.launch.hosts import Host
from poseidon.launch.protocol import Message

AGENT = "poseidon.launch.agent"
CLOSED = "closed"
"""Kind of the event for a connection that has ended; made here, never sent."""

Events: TypeAlias = "queue.Queue[tuple[int, Message]]"


class AgentLink:
    """A running agent. Its events carry the number of its machine. Any thread may send and close."""

    def __init__(
        self,
        number: int,
        host: Host,
        is_local: bool,
        directory: str,
        settings: ssh.SshSettings,
        silence_s: float = protocol.SILENCE_S,
    ) -> None:
        self.number = number
        self.host = host
        self.is_local = is_local
        self.silence_s = silence_s
        """How long it may be silent, once it has answered."""
        self.last_heard = time.monotonic()
        self._has_answered = False
        self.is_closed = False
        self._stderr: collections.deque[str] = collections.deque(maxlen=30)
        self._sending = threading.Lock()
        self._errors_reader = threading.Thread(target=self._read_errors, daemon=True)
        pipe = subprocess.PIPE
        if is_local:
            python = host.python or sys.executable
            if os.sep in python:  # the agent starts elsewhere
                python = str(Path(directory) / python)
            try:
                self._process = subprocess.Popen(
                    [python, "-m", AGENT],
                    stdin=pipe,
                    stdout=pipe,
                    stderr=pipe,
                    env=_own_environment(),
                    # Python first looks for modules where it starts: the agent must not import a user's queue.py.
                    cwd="/",
                    # The launcher handles a Ctrl-C on the terminal.
                    start_new_session=True,
                )
            except OSError as error:
                raise ConfigError(
                    f"{host.name}: the interpreter {python!r} cannot be started ({error.strerror}); "
                    "name another with --python or python="
                ) from None
        else:
            python = ssh.remote_python(host, directory)
            self._process = ssh.start_command(host, [python, "-m", AGENT], settings)
        assert self._process.stdin is not None
        self._inlet: IO[bytes] = self._process.stdin

    def listen(self, events: Events) -> None:
        """Put the agent's messages into the queue, from threads of its own, and CLOSED at the end."""
        self._errors_reader.start()
        threading.Thread(target=self._read, args=(events,), daemon=True).start()

    def send(self, kind: str, **content: Any) -> None:
        """Send a message to the agent; the reader notices if it is gone."""
        with self._sending, contextlib.suppress(OSError, ValueError):
            self._inlet.write(protocol.pack(kind, **content))
            self._inlet.flush()

    def is_silent(self) -> bool:
        """Return whether the agent has been silent for too long."""
        limit_s = self.silence_s if self._has_answered else max(self.silence_s, protocol.SILENCE_S)
        return time.monotonic() - self.last_heard > limit_s

    def why(self) -> str:
        """Return in one line why an agent did not start."""
        try:
            status = self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            return f"{self.host.name} does not answer"
        stderr = "\n".join(self._said())
        if self.is_local:
            return f"the agent on {self.host.name} ended with status {status}: {stderr.strip() or 'no reason given'}"
        return ssh.explain(self.host, status, stderr)

    def why_lost(self) -> str:
        """Return in one line why the connection to a working agent has ended."""
        try:
            status = self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            return "the connection to its agent broke"
        last = next((line for line in reversed(self._said()) if line.strip()), "")
        said = f": {last.strip()}" if last else ""
        if status < 0 or status == ssh.FAILED:
            return f"its agent was killed or the connection broke{said}"
        return f"its agent ended with status {status}{said}"

    def close(self) -> None:
        """Disconnect; an agent that still runs ends its workers and exits."""
        with self._sending, contextlib.suppress(OSError):
            self._inlet.close()
        try:
            self._process.wait(timeout=3.0 if not self.is_silent() else 0.1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _said(self) -> list[str]:
        """Return the last lines that ssh or the agent wrote to stderr."""
        self._errors_reader.join(timeout=1.0)
        return list(self._stderr)

    def _read(self, events: Events) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            for line in pipe:
                self.last_heard = time.monotonic()
                self._has_answered = True
                message = protocol.unpack(line)
                if message is not None and message["kind"] != protocol.ALIVE:
                    events.put((self.number, message))
        self.is_closed = True
        events.put((self.number, {"kind": CLOSED}))

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as pipe:
            for line in pipe:
                self._stderr.append(line.decode(errors="replace").rstrip())


def _own_environment() -> dict[str, str]:
    """Return this process's environment, with Poseidon on the path wherever it was imported from."""
    source = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path}
