"""Runs one start of a job: agents up, workers started, watched, ended, and every machine checked for leftovers.

Next to it: :mod:`poseidon.launch.run`, which reads the settings and restarts a job that failed.
"""

from __future__ import annotations

import queue
import secrets
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from poseidon import __version__
from poseidon.errors import ConfigError
from poseidon.launch import ssh
from poseidon.launch.hosts import Host
from poseidon.launch.job import cause as causes
from poseidon.launch.job import protocol
from poseidon.launch.job.cause import Death
from poseidon.launch.job.link import CLOSED, Events, Link
from poseidon.launch.job.output import Output
from poseidon.launch.job.places import SECRET, Meeting, Place, passed_on, place_workers, worker_environment
from poseidon.launch.job.protocol import Message
from poseidon.launch.job.watching import Watching
from poseidon.launch.join import Share

PREPARE_S = 40.0
"""Longest time for logins and a look around on all machines."""
STOP_GRACE_S = 3.0
"""Between asking the other workers of a failed job to end and killing them."""
SWEEP_CONNECT_S = 2
SWEEP_S = 4.0
"""For a second look at a machine whose agent was lost: to log in there, and in all."""
INTERRUPTED = 130


@dataclass(frozen=True)
class JobSettings:
    """What to run, and how."""

    hosts: tuple[Host, ...]
    argv: tuple[str, ...]
    """What Python runs on every worker: script or ``-m`` module, and its arguments."""
    script: str | None
    """The script's path, if it is one that every machine must have."""
    directory: str
    environ: Mapping[str, str] = field(default_factory=dict)
    """This process's environment."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables asked for by the user, for all workers."""
    ssh: ssh.SshSettings = field(default_factory=ssh.SshSettings)
    port: int | None = None
    """Where workers meet; None: a free one."""
    hang_timeout_s: float = 0.0
    """A job in which nothing moves for so long is ended; 0: never."""
    share: Share | None = None
    """This machine's part of a job that others started; None: the whole job is ours."""
    grace_s: float = 30.0
    """How long workers may take to end after Ctrl-C."""


@dataclass(frozen=True)
class Ending:
    """How a start of a job ended."""

    status: int
    cause: Death | None = None
    is_interrupted: bool = False


class Launcher:
    """One start of a job; :meth:`run` blocks until nothing of it is left. Must be made on the main thread."""

    def __init__(self, settings: JobSettings, output: Output, restart: int = 0) -> None:
        self._settings = settings
        self._output = output
        self._restart = restart
        self._run = secrets.token_hex(8)
        self._events: Events = queue.Queue(maxsize=4096)
        self._links: list[Link] = []
        self._places = place_workers(settings.hosts)
        self._ready: dict[int, Message] = {}
        self._ended: dict[int, list[int]] = {}
        """Machines whose agents have finished: what they could not end."""
        self._interrupts = 0
        self._watching = Watching(self._places, settings.hang_timeout_s, time.monotonic())
        self._closing = threading.Event()

    def run(self) -> Ending:
        """Start the workers, follow them to the end, clean up; raise :class:`ConfigError` if nothing could start."""
        handlers = {
            number: signal.signal(number, self._interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        # A launcher that stands still would be taken for gone, and its workers would be ended.
        handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._refuse_to_pause)
        try:
            self._connect()
            meeting = self._agree_on_meeting()
            self._output.open_logs()
            self._start_workers(meeting)
            ending = self._follow()
            self._report(ending)
            self._end(0.0 if self._interrupts > 1 else STOP_GRACE_S)
            return ending
        finally:
            self._closing.set()
            for link in self._links:
                link.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    # Starting.

    def _connect(self) -> None:
        settings = self._settings
        for number, host in enumerate(settings.hosts):
            link = Link(number, host, ssh.is_here(host), host.directory or settings.directory, settings.ssh)
            self._links.append(link)
            link.listen(self._events)
            link.send(
                protocol.PREPARE,
                directory=host.directory or settings.directory,
                script=settings.script,
                interface=host.interface,
                via_ssh=not link.is_local,
            )
        threading.Thread(target=self._show_life, daemon=True).start()
        self._ready = self._await(protocol.READY, PREPARE_S)
        for number, answer in self._ready.items():
            if answer["version"] != __version__:
                raise ConfigError(
                    f"{settings.hosts[number].name} has Poseidon {answer['version']}, this machine {__version__}; "
                    "install the same version on all"
                )

    def _await(self, kind: str, limit_s: float, machines: list[int] | None = None) -> dict[int, Message]:
        """Return what each agent answered; raise one error that names every machine that did not."""
        waited = set(range(len(self._links)) if machines is None else machines)
        answers: dict[int, Message] = {}
        failures: dict[str, list[str]] = {}
        deadline = time.monotonic() + limit_s
        while waited:
            if self._interrupts:
                raise KeyboardInterrupt
            try:
                number, message = self._events.get(timeout=min(0.2, max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                if time.monotonic() < deadline:
                    continue
                failures[f"no answer within {limit_s:g} s"] = [self._settings.hosts[number].name for number in waited]
                break
            if message["kind"] == kind:
                answers[number] = message
            elif message["kind"] == protocol.REFUSED:
                failures.setdefault(str(message["reason"]), []).append(self._settings.hosts[number].name)
            elif message["kind"] == CLOSED and number in waited:
                failures[self._links[number].why()] = []
            else:
                self._take(number, message)
                continue
            waited.discard(number)
        if failures:
            lines = [f"{', '.join(sorted(names))}: {why}" if names else why for why, names in failures.items()]
            raise ConfigError(lines[0] if len(lines) == 1 else "\n  ".join(["cannot start:", *lines]))
        return answers

    def _agree_on_meeting(self) -> Meeting:
        first = self._settings.hosts[0]
        share = self._settings.share
        if share is not None:
            # The secret must be the same on all machines, so it is for whoever started them to give.
            secret = self._settings.environ.get(SECRET, "")
            return Meeting(share.address, share.port, secret, self._run, self._restart)
        wanted = self._settings.port or first.service_port
        self._links[0].send(protocol.PORT, address=self._address(0), wanted=wanted)
        port = self._await(protocol.PORT, PREPARE_S, [0])[0]["port"]
        return Meeting(self._address(0), int(port), secrets.token_hex(32), self._run, self._restart)

    def _address(self, number: int) -> str:
        """Return where the others reach a machine: as it says, or, for this one, as they see it."""
        said = str(self._ready[number]["address"])
        if said or self._settings.share is not None:
            return said
        if self._links[number].is_local:
            seen = (str(answer["seen_from"]) for answer in self._ready.values() if answer["seen_from"])
            return next(seen, "127.0.0.1")
        raise ConfigError(
            f"{self._settings.hosts[number].name}: its ssh server does not say at which address we reached it; "
            "name the network interface with --interface or interface="
        )

    def _start_workers(self, meeting: Meeting) -> None:
        settings, share = self._settings, self._settings.share
        machines = len(self._links) if share is None else share.machines
        size = len(self._places) if share is None else share.machines * share.workers
        for link in self._links:
            base = dict(settings.env) if link.is_local else passed_on(settings.environ, settings.env)
            base |= dict(link.host.env)
            if link.is_local:
                # The agent's own environment is this process's; what the user set there counts more than defaults.
                base = {**settings.environ, **base}
            answer = self._ready[link.number]
            workers = [
                {
                    "rank": place.rank,
                    "argv": list(settings.argv),
                    "env": worker_environment(
                        self._in_whole_job(place), size, machines, meeting, base, int(answer["cores"])
                    ),
                }
                for place in self._places
                if place.machine == link.number
            ]
            link.send(
                protocol.START,
                run=self._mark(link.number),
                directory=answer["directory"],
                address=self._address(link.number),
                workers=workers,
            )
        self._await(protocol.STARTED, PREPARE_S)

    def _mark(self, machine: int) -> str:
        # Machines may share their process table (containers, emulated ones): each sees to its own workers only.
        return f"{self._run}.{machine}"

    def _in_whole_job(self, place: Place) -> Place:
        share = self._settings.share
        if share is None:
            return place
        return replace(place, rank=share.machine * share.workers + place.rank, machine=share.machine)

    # Following.

    def _follow(self) -> Ending:
        """Return when the job is over: all workers have ended, or one has failed and its cause is clear."""
        asked_at = 0.0
        while True:
            try:
                self._take(*self._events.get(timeout=0.1))
                is_idle = False
            except queue.Empty:
                is_idle = True
            now = time.monotonic()
            if is_idle:
                self._notice_silence()
            self._show_status(now)
            if self._interrupts:
                if not asked_at:
                    asked_at = now
                    self._ask_to_end()
                is_late = now - asked_at > self._settings.grace_s
                if self._interrupts > 1 or is_late or self._watching.is_over:
                    return Ending(INTERRUPTED, None, is_interrupted=True)
                continue
            if self._watching.is_hung(now):
                self._show_stacks()
            death = self._watching.verdict(now)
            if death is not None:
                return Ending(death.exit_status, death)
            if self._watching.is_over:
                return Ending(0)

    def _take(self, number: int, message: Message) -> None:
        kind = message["kind"]
        now = time.monotonic()
        if kind == protocol.OUTPUT:
            rank = int(message["rank"])
            self._watching.read_line(rank, str(message["text"]), bool(message["is_error"]), now)
            if not message["is_draft"]:
                self._output.line(rank, str(message["text"]), bool(message["is_error"]))
        elif kind == protocol.REPORT:
            self._watching.read_report(int(message["rank"]), message["facts"], now)
        elif kind == protocol.EXIT:
            self._watching.exited(int(message["rank"]), int(message["status"]), now)
        elif kind == protocol.ENDED:
            self._ended[number] = list(message["left"])
        elif kind == protocol.REFUSED:
            self._watching.machine_lost(number, str(message["reason"]), now)
        elif kind == CLOSED and number not in self._ended:
            self._watching.machine_lost(number, self._links[number].why_lost(), now)

    def _notice_silence(self) -> None:
        # Asked only when nothing is waiting to be read: a terminal that stood still must not look like lost machines.
        for link in self._links:
            if not link.is_closed and link.is_silent():
                reason = f"{link.host.name} has given no sign of life for {protocol.SILENCE_S:g} s"
                self._watching.machine_lost(link.number, reason, time.monotonic())

    def _show_status(self, now: float) -> None:
        if self._output.is_live:
            self._output.status(self._watching.status_line(now, self._output.width))

    def _ask_to_end(self) -> None:
        self._output.say(
            f"stopping: workers have {self._settings.grace_s:g} s to end in order (Ctrl-C again ends them at once)"
        )
        self._send_all(protocol.SIGNAL, number=int(signal.SIGINT))

    def _show_stacks(self) -> None:
        """Make every worker say where it stands, which ends it."""
        self._watching.note_hang(time.monotonic())
        self._send_all(protocol.SIGNAL, number=int(signal.SIGABRT))
        # One that was stopped must go on to show it.
        self._send_all(protocol.SIGNAL, number=int(signal.SIGCONT))

    # Ending.

    def _report(self, ending: Ending) -> None:
        if ending.cause is not None:
            others = self._watching.where_others_stood(ending.cause.rank, time.monotonic())
            self._output.say(causes.explain(ending.cause, others))

    def _end(self, grace_s: float) -> None:
        """End what is left everywhere, and say so of each machine where that could not be done or seen."""
        alive = [link for link in self._links if not link.is_closed and not link.is_silent()]
        for link in alive:
            link.send(protocol.STOP, grace_s=grace_s)
        checks = self._start_sweeps([link for link in self._links if link not in alive])
        deadline = time.monotonic() + grace_s + 12.0
        while any(link.number not in self._ended and not link.is_closed for link in alive):
            if self._interrupts > 1 and grace_s > 0:
                grace_s = 0.0
                for link in alive:
                    link.close()
            try:
                self._take(*self._events.get(timeout=0.1))
            except queue.Empty:
                if time.monotonic() > deadline:
                    break
        checks += self._start_sweeps([link for link in alive if link.is_closed])
        for check in checks:
            check.join(2 * SWEEP_S)
        self._say_what_is_left()

    def _start_sweeps(self, lost: list[Link]) -> list[threading.Thread]:
        links = [link for link in lost if link.number not in self._ended]
        checks = [threading.Thread(target=self._sweep, args=(link,), daemon=True) for link in links]
        for check in checks:
            check.start()
        return checks

    def _sweep(self, lost: Link) -> None:
        """Ask a machine whose agent was lost, through a new agent, to end what the old one left."""
        settings = replace(self._settings.ssh, connect_timeout_s=SWEEP_CONNECT_S)
        events: Events = queue.Queue()
        link = Link(lost.number, lost.host, lost.is_local, lost.host.directory or self._settings.directory, settings)
        link.listen(events)
        link.send(protocol.STOP, grace_s=0.0, run=self._mark(lost.number))
        deadline = time.monotonic() + SWEEP_S
        while time.monotonic() < deadline:
            try:
                _, message = events.get(timeout=0.1)
            except queue.Empty:
                continue
            if message["kind"] == protocol.ENDED:
                self._ended[lost.number] = list(message["left"])
            if message["kind"] in (protocol.ENDED, CLOSED):
                break
        link.close()

    def _say_what_is_left(self) -> None:
        for link in self._links:
            left = self._ended.get(link.number)
            if left is None:
                self._output.say(
                    f"{link.host.name} could not be asked whether anything is left there; "
                    f"without a launcher its agent ends all workers after {protocol.SILENCE_S:g} s"
                )
            elif left:
                self._output.say(f"{link.host.name}: processes {left} did not end even when killed; see to them there")

    # Signals and signs of life.

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        self._interrupts += 1

    def _refuse_to_pause(self, _number: int, _frame: FrameType | None) -> None:
        self._output.say("a job over several processes cannot be paused; Ctrl-C ends it")

    def _show_life(self) -> None:
        while not self._closing.wait(protocol.ALIVE_S):
            self._send_all(protocol.ALIVE)

    def _send_all(self, kind: str, **content: Any) -> None:
        for link in self._links:
            if not link.is_closed:
                link.send(kind, **content)
