"""``python -m poseidon.launch.agent``: starts one machine's workers and makes sure that none outlives the job.

The launcher starts one on each machine, over ssh or directly, and talks to it through stdin and stdout. An agent whose
stdin closes or goes silent has lost its launcher: it kills its workers and exits. Nothing secret is on its command
line; the job's description arrives on stdin.

The main thread only reads from the launcher, so that a full output pipe never delays a command.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from poseidon.errors import ConfigError
from poseidon.job import interfaces, settings
from poseidon.job import tell as report
from poseidon.launch import processes, protocol, scratch
from poseidon.launch.lines import LineCutter
from poseidon.launch.protocol import Message
from poseidon.launch.script import check_script
from poseidon.version import __version__

_DRAIN_S = 2.0
"""How long to wait for the last output of a worker that has ended."""
_DRAFT_S = 0.5
"""Seconds between two states of a progress bar that are passed on."""


class Agent:
    """The workers of one machine, and the connection to their launcher."""

    def __init__(self, inlet: int, outlet: int) -> None:
        self._inlet = inlet
        self._outlet = outlet
        self._speaking = threading.Lock()
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._news: dict[int, int] = {}
        """Pipes to the workers of an elastic job."""
        self._news_lock = threading.Lock()
        self._watchers: list[threading.Thread] = []
        self._run = ""
        self._silence_s = protocol.SILENCE_S
        self._directory = ""
        self._meeting: socket.socket | None = None
        """Reserves the port where workers meet."""

    def serve(self) -> int:
        """Obey the launcher until it says stop or is gone; return the exit status."""
        processes.adopt_orphans()
        threading.Thread(target=self._show_life, daemon=True).start()
        try:
            for message in self._messages():
                if message["kind"] == protocol.STOP:
                    self._stop(float(message["grace_s"]), str(message.get("run", "")))
                    return 0
                self._obey(message)
        except ConfigError as error:
            self._tell(protocol.REFUSED, reason=str(error))
            return 0
        finally:
            if self._run:
                processes.end_all(self._run)
                self._sweep()
        return 1

    def _messages(self) -> Iterator[Message]:
        """Yield the launcher's messages until it is gone."""
        pending = b""
        while True:
            ready, _, _ = select.select([self._inlet], [], [], self._silence_s)
            data = os.read(self._inlet, 1 << 16) if ready else b""
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                message = protocol.unpack(line)
                if message is not None:
                    yield message

    def _obey(self, message: Message) -> None:
        kind = message["kind"]
        if kind == protocol.PREPARE:
            self._silence_s = float(message["silence_s"])
            for mark in message.get("ends", ()):
                processes.end_all(str(mark))
            self._tell(protocol.READY, **look_around(message))
        elif kind == protocol.PORT:
            # Kept until this process ends: the workers come to use it only when they have imported torch.
            self._meeting = interfaces.reserve_port(str(message["address"]), message["wanted"])
            self._tell(protocol.PORT, port=self._meeting.getsockname()[1])
        elif kind == protocol.START:
            self._start(message)
        elif kind == protocol.SIGNAL:
            self._signal(signal.Signals(message["number"]))
        elif kind == protocol.NEWS:
            self._pass_on(int(message["rank"]), message["news"])
        elif kind == protocol.KILL:
            self._workers[int(message["rank"])].kill()

    def _start(self, message: Message) -> None:
        self._run = str(message["run"])
        self._directory = str(message["directory"])
        network = network_variables(str(message["address"]))
        for worker in message["workers"]:
            env = {**network, **_login_environment(), **worker["env"], processes.MARK: self._run}
            if "POSEIDON_WIRE_INTERFACE" in env:
                env.pop("POSEIDON_WIRE_IP", None)
            argv = [sys.executable, *worker["argv"]]
            self._start_one(int(worker["rank"]), argv, env, message["directory"], worker.get("elastic"))
        self._tell(protocol.STARTED, pids={str(rank): worker.pid for rank, worker in self._workers.items()})
        for watcher in self._watchers:
            if watcher.ident is None:
                watcher.start()

    def _start_one(
        self, rank: int, argv: list[str], env: dict[str, str], directory: str, elastic: dict[str, Any] | None
    ) -> None:
        reading, writing = os.pipe()
        given = [writing]
        env[report.VARIABLE] = report.name_pipe(writing)
        if elastic is not None:
            news, outlet = os.pipe()
            os.set_blocking(outlet, False)
            with self._news_lock:
                self._news[rank] = outlet
            given.append(news)
            facts = {**elastic, "pipe": news, "inode": os.fstat(news).st_ino}
            env[settings.ELASTIC.name] = json.dumps(facts)
        try:
            worker = subprocess.Popen(
                argv,
                env=env,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=given,
                start_new_session=True,
                preexec_fn=processes.dies_with_parent(),
            )
        except OSError as error:
            raise ConfigError(f"worker {rank} cannot be started: {argv[0]}: {error.strerror}") from None
        finally:
            for pipe in given:
                os.close(pipe)
        assert worker.stdout is not None
        assert worker.stderr is not None
        self._workers[rank] = worker
        pumps = [
            threading.Thread(target=self._pump_output, args=(rank, worker.stdout, False), daemon=True),
            threading.Thread(target=self._pump_output, args=(rank, worker.stderr, True), daemon=True),
            threading.Thread(target=self._pump_reports, args=(rank, os.fdopen(reading, "rb")), daemon=True),
        ]
        # Started later: children are forked, which is safest while there are few threads.
        self._watchers.append(threading.Thread(target=self._watch, args=(rank, worker, pumps), daemon=True))

    def _watch(self, rank: int, worker: subprocess.Popen[bytes], pumps: list[threading.Thread]) -> None:
        for pump in pumps:
            pump.start()
        status = worker.wait()
        with self._news_lock:
            news = self._news.pop(rank, None)
            if news is not None:
                os.close(news)
        assert worker.stdout is not None
        assert worker.stderr is not None
        deadline = time.monotonic() + _DRAIN_S
        for pump, pipe in zip(pumps, (worker.stdout, worker.stderr), strict=False):
            while pump.is_alive() and not _is_empty(pipe) and time.monotonic() < deadline:
                pump.join(0.02)
            pump.join(0.1)
        self._tell(protocol.EXIT, rank=rank, status=status)

    def _pump_output(self, rank: int, pipe: IO[bytes], is_error: bool) -> None:
        cutter = LineCutter()
        drafted_at = 0.0
        with pipe:
            while data := os.read(pipe.fileno(), 1 << 16):
                for text, is_draft in cutter.feed(data):
                    if is_draft and time.monotonic() - drafted_at < _DRAFT_S:
                        continue
                    drafted_at = time.monotonic() if is_draft else drafted_at
                    self._tell(protocol.OUTPUT, rank=rank, is_error=is_error, text=text, is_draft=is_draft)
            for text, _ in cutter.end():
                self._tell(protocol.OUTPUT, rank=rank, is_error=is_error, text=text, is_draft=False)

    def _pump_reports(self, rank: int, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                facts = report.parse(line)
                if facts:
                    self._tell(protocol.REPORT, rank=rank, facts=facts)

    def _pass_on(self, rank: int, news: Message) -> None:
        # A worker that does not read is stopped, and will be ended.
        with self._news_lock, contextlib.suppress(OSError):
            if rank in self._news:
                os.write(self._news[rank], json.dumps(news).encode() + b"\n")

    def _tell_stopped(self) -> None:
        """Say which workers of an elastic job are stopped."""
        with self._news_lock:
            # One that is being started has a pipe before it is a process.
            workers = {rank: self._workers[rank] for rank in self._news if rank in self._workers}
        running = [rank for rank, worker in workers.items() if worker.poll() is None]
        if running:
            stopped = [rank for rank in running if processes.is_stopped(workers[rank].pid)]
            self._tell(protocol.STOPPED, stopped=stopped, ranks=running)

    def _signal(self, number: signal.Signals) -> None:
        for worker in self._workers.values():
            # To the worker alone: it ends its own children, such as data loaders.
            if worker.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    worker.send_signal(number)

    def _stop(self, grace_s: float, run: str) -> None:
        self._signal(signal.SIGTERM)
        # A stopped process cannot end.
        self._signal(signal.SIGCONT)
        deadline = time.monotonic() + grace_s
        for watcher in self._watchers:
            watcher.join(max(0.0, deadline - time.monotonic()))
        left = processes.end_all(self._run or run)
        self._sweep()
        for watcher in self._watchers:
            watcher.join(_DRAIN_S + 1.0)
        self._run = ""
        self._tell(protocol.ENDED, left=left)

    def _sweep(self) -> None:
        """Remove what killed workers could not."""
        with contextlib.suppress(OSError):
            scratch.sweep(Path(self._directory or "."))

    def _show_life(self) -> None:
        while True:
            time.sleep(protocol.beat_s(self._silence_s))
            self._tell(protocol.ALIVE)
            self._tell_stopped()

    def _tell(self, kind: str, **content: Any) -> None:
        data = memoryview(protocol.pack(kind, **content))
        with self._speaking, contextlib.suppress(OSError):  # the reader notices that the launcher is gone
            while data:
                data = data[os.write(self._outlet, data) :]


def _is_empty(pipe: IO[bytes]) -> bool:
    """Return whether a pipe is empty; it may never end, because a child of the worker may hold it open."""
    try:
        return not any(fcntl.ioctl(pipe.fileno(), termios.FIONREAD, bytes(4)))
    except (OSError, ValueError):
        return True


def look_around(message: Message) -> Message:
    """Return the facts about this machine that the launcher needs; raise :class:`ConfigError` if the job cannot run."""
    directory = Path(str(message["directory"])).expanduser()
    if not directory.is_dir():
        raise ConfigError(f"there is no directory {directory}; create it, or name another with --directory")
    script = message["script"]
    if script is not None:
        check_script(directory / script)
    seen_from, address = "", ""
    if message["via_ssh"]:
        # Client and server address of this login.
        words = os.environ.get("SSH_CONNECTION", "").split()
        seen_from, address = (words[0], words[2]) if len(words) == 4 else ("", "")
    if message["interface"]:
        address = interfaces.address_of(str(message["interface"]))
    return {
        "directory": str(directory),
        "address": address,
        "seen_from": seen_from,
        "version": __version__,
        "python": platform.python_version(),
        "cores": os.cpu_count() or 1,
        "pid": os.getpid(),
    }


def network_variables(address: str) -> dict[str, str]:
    """Return the variables that keep the job's traffic on the interface with this address; the user's override them."""
    if not address:
        return {}
    variables = {"POSEIDON_WIRE_IP": address}
    interface = interfaces.interface_with(address)
    if interface:
        variables |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), interface)
    if interface == "lo":
        del variables["NCCL_SOCKET_IFNAME"]
    return variables


def _login_environment() -> dict[str, str]:
    """Return this login's environment without the variables of the ssh connection."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SSH_")}


def main() -> int:
    """Serve the launcher at stdin and stdout."""
    # The launcher handles Ctrl-C and sends commands. Handled, not ignored: workers would inherit an ignored signal.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    # Prints must not mix with the lines for the launcher.
    outlet = os.dup(1)
    os.dup2(2, 1)
    return Agent(0, outlet).serve()


if __name__ == "__main__":
    status = main()
    # Threads may be stuck in the pipe to a launcher that is gone.
    sys.stderr.flush()
    os._exit(status)
