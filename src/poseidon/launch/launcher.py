"""Runs a job once: starts agents and workers, watches and ends them, and checks every machine for leftovers.

:mod:`poseidon.launch.run` reads the settings and restarts a job that failed.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType

from poseidon.errors import ConfigError
from poseidon.job.settings import BALANCE, SECRET
from poseidon.launch import cause as causes
from poseidon.launch import protocol, ssh
from poseidon.launch.balance import BalanceNews
from poseidon.launch.cause import Death
from poseidon.launch.fleet import Fleet
from poseidon.launch.hosts import Host
from poseidon.launch.join import MachineShare
from poseidon.launch.keeper import JobKeeper
from poseidon.launch.link import CLOSED, AgentLink
from poseidon.launch.observing import JobObserver
from poseidon.launch.output import JobOutput
from poseidon.launch.places import Meeting, Place, passed_on, place_workers, worker_environment
from poseidon.launch.protocol import Message
from poseidon.launch.roster import Bounds
from poseidon.launch.watching import Watching
from poseidon.version import __version__

STOP_GRACE_S = 3.0
"""Seconds between asking the other workers of a failed job to end and killing them."""


@dataclass(frozen=True)
class JobSettings:
    """What to run, and how."""

    hosts: tuple[Host, ...]
    argv: tuple[str, ...]
    """Arguments of Python on every worker: script or ``-m`` module, and its arguments."""
    script: str | None
    """Path of the script, if every machine must have it."""
    directory: str
    each: tuple[tuple[str, ...], ...] = ()
    """Arguments of Python by rank, if they differ; then ``argv`` is the first worker's."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """This process's environment."""
    env: Mapping[str, str] = field(default_factory=dict)
    """The user's variables for all workers."""
    ssh: ssh.SshSettings = field(default_factory=ssh.SshSettings)
    port: int | None = None
    """Port where workers meet; None: a free one."""
    hang_timeout_s: float = 0.0
    """A job without any progress for this long is ended; 0: never."""
    share: MachineShare | None = None
    """This machine's part of a job that another launcher started; None: the whole job is ours."""
    bounds: Bounds | None = None
    """How many workers an elastic job may have; None: the job ends when one is lost."""
    replacements: int = 0
    """How many lost workers and machines of an elastic job may be started again."""
    wait_s: float = 0.0
    """How long to wait for hosts when there are too few."""
    list_hosts: Callable[[], Sequence[Host]] | None = None
    """Returns the hosts that an elastic job may use by now."""
    grace_s: float = 30.0
    """How long workers may take to end after Ctrl-C."""

    @property
    def most_workers(self) -> int:
        """How many workers the job may have."""
        if self.bounds is None:
            return sum(host.slots for host in self.hosts)
        return self.bounds.most * (max(host.slots for host in self.hosts) if self.bounds.counts_machines else 1)


@dataclass(frozen=True)
class Ending:
    """How a run of a job ended."""

    status: int
    cause: Death | None = None
    is_interrupted: bool = False


class Launcher:
    """One run of a job; :meth:`run` blocks until nothing of it is left. Main thread only."""

    def __init__(
        self, settings: JobSettings, output: JobOutput, restart: int = 0, observer: JobObserver | None = None
    ) -> None:
        self._settings = settings
        self._output = output
        self._restart = restart
        self._run = secrets.token_hex(8)
        self._silence_s = protocol.SILENCE_S if settings.bounds is None else protocol.ELASTIC_SILENCE_S
        self._fleet = Fleet(settings.hosts, settings.directory, settings.ssh, self._run, self._take, self._silence_s)
        self._places = place_workers(settings.hosts)
        self._observer = observer or JobObserver(self._places, " ".join(settings.argv), None)
        self._ready: dict[int, Message] = {}
        self._interrupts = 0
        self._signal = 0
        """The first one that asked the job to end."""
        self._watching = Watching(self._places, settings.hang_timeout_s, time.monotonic())
        self._balance = BalanceNews(BALANCE.read(settings.env))
        self._meeting: Meeting | None = None
        self._keeper: JobKeeper | None = None
        if settings.bounds is not None:
            self._keeper = JobKeeper(
                settings.bounds,
                self._places,
                self._fleet,
                output,
                self._watching,
                self._observer,
                self._start_on,
                settings.replacements,
                settings.wait_s,
                settings.list_hosts,
            )

    def run(self) -> Ending:
        """Start the workers, follow them to the end, clean up; raise :class:`ConfigError` if nothing can start."""
        handlers = {
            number: signal.signal(number, self._interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        # Agents would consider a stopped launcher gone and end its workers.
        handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._refuse_to_pause)
        try:
            self._prepare()
            meeting = self._agree_on_meeting()
            self._output.open_logs(self._restart)
            self._observer.begin(self._restart)
            self._start_workers(meeting)
            ending = self._follow()
            self._report(ending)
            self._fleet.end(0.0 if self._interrupts > 1 else STOP_GRACE_S, lambda: self._interrupts > 1)
            self._say_what_is_left()
            return ending
        finally:
            self._fleet.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    # Starting.

    def _prepare(self) -> None:
        self._fleet.start(self._settings.script)
        self._ready = self._fleet.answers(protocol.READY, check=self._show_waiting)
        for number, answer in self._ready.items():
            if answer["version"] != __version__:
                raise ConfigError(
                    f"{self._settings.hosts[number].name} has Poseidon {answer['version']}, but this machine has "
                    f"{__version__}; install the same version on all machines"
                )

    def _agree_on_meeting(self) -> Meeting:
        first = self._settings.hosts[0]
        share = self._settings.share
        if share is not None:
            # The secret must be the same on all machines, so only whoever started them can provide it.
            secret = SECRET.read(self._settings.environ)
            return Meeting(share.address, share.port, secret, self._run, self._restart)
        wanted = self._settings.port or first.service_port
        self._fleet.links[0].send(protocol.PORT, address=self._address(0), wanted=wanted)
        port = self._fleet.answers(protocol.PORT, [0], self._show_waiting)[0]["port"]
        return Meeting(self._address(0), int(port), secrets.token_hex(32), self._run, self._restart)

    def _address(self, number: int) -> str:
        """Return the address of a machine for the others: its own answer or, for this one, what they see."""
        said = str(self._ready[number]["address"])
        if said or self._settings.share is not None:
            return said
        if self._fleet.links[number].is_local:
            seen = (str(answer["seen_from"]) for answer in self._ready.values() if answer["seen_from"])
            return next(seen, "127.0.0.1")
        raise ConfigError(
            f"{self._fleet.links[number].host.name}: its ssh server does not report the address of this login; "
            "name the network interface with --interface or interface="
        )

    def _start_workers(self, meeting: Meeting) -> None:
        self._meeting = meeting
        for link in self._fleet.links:
            self._start_on(link, [place for place in self._places if place.machine == link.number])
        self._fleet.answers(protocol.STARTED, check=self._show_waiting)

    def _start_on(self, link: AgentLink, places: Sequence[Place]) -> None:
        """Let one machine's agent start workers."""
        assert self._meeting is not None
        settings, share = self._settings, self._settings.share
        machines = len(self._fleet.links) if share is None else share.machines
        size = len(self._places) if share is None else share.machines * share.workers
        base = dict(settings.env) if link.is_local else passed_on(settings.environ, settings.env)
        base |= dict(link.host.env)
        if link.is_local:
            # The agent shares this process's environment; the user's variables override defaults.
            base = {**settings.environ, **base}
        answer, address = self._ready[link.number], self._address(link.number)
        workers = [
            {
                "rank": place.rank,
                "argv": list(settings.each[place.rank] if settings.each else settings.argv),
                "env": worker_environment(
                    self._in_whole_job(place), size, machines, self._meeting, base, int(answer["cores"])
                ),
                "elastic": self._keeper and self._keeper.enrol(place, address, settings.most_workers),
            }
            for place in places
        ]
        link.send(
            protocol.START,
            run=self._fleet.mark(link.number),
            directory=answer["directory"],
            address=address,
            workers=workers,
        )

    def _in_whole_job(self, place: Place) -> Place:
        share = self._settings.share
        if share is None:
            return place
        return replace(place, rank=share.machine * share.workers + place.rank, machine=share.machine)

    # Following.

    def _follow(self) -> Ending:
        """Return when the job is over: all workers have ended, or one has failed and the cause is clear."""
        asked_at = 0.0
        while True:
            is_idle = not self._fleet.take_next(0.1)
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
                    return Ending(128 + self._signal, None, is_interrupted=True)
                continue
            if self._watching.is_hung(now):
                self._show_stacks()
            if self._keeper is not None and self._keeper.keep_going(now, is_idle):
                continue
            if self._keeper is not None and self._keeper.roster.is_done:
                return Ending(0)
            death = self._watching.verdict(now)
            if death is not None:
                return Ending(death.exit_status, death)
            if self._watching.is_over:
                return Ending(0)

    def _welcome(self, number: int, answer: Message) -> None:
        """Take in a machine that has come while the job is under way."""
        assert self._keeper is not None
        if answer["version"] != __version__:
            link = self._fleet.links[number]
            self._output.say(f"{link.host.name} has Poseidon {answer['version']}, not {__version__}; it stays out")
            link.close()
            return
        self._ready[number] = answer
        self._keeper.machine_ready(number)

    def _lose_machine(self, number: int, reason: str) -> None:
        now = time.monotonic()
        if self._keeper is None or self._keeper.machine_lost(number, now):
            self._watching.machine_lost(number, reason, now)

    def _take(self, number: int, message: Message) -> None:
        kind = message["kind"]
        now = time.monotonic()
        if kind == protocol.OUTPUT:
            rank = int(message["rank"])
            self._watching.read_line(rank, str(message["text"]), bool(message["is_error"]), now)
            self._observer.read_line(rank, str(message["text"]), now)
            if self._watching.loss is not None:
                self._observer.read_loss(self._watching.loss, now)
            if not message["is_draft"]:
                self._output.line(rank, str(message["text"]), bool(message["is_error"]))
        elif kind == protocol.REPORT:
            facts = dict(message["facts"])
            elastic = facts.pop("elastic", None)
            if elastic is not None and self._keeper is not None:
                self._keeper.heard(int(message["rank"]), elastic, now)
            if facts:
                self._watching.read_report(int(message["rank"]), facts, now)
                self._observer.read_report(int(message["rank"]), facts, now)
                if line := self._balance.hear(int(message["rank"]), facts):
                    self._output.say(line)
        elif kind == protocol.STOPPED and self._keeper is not None:
            self._keeper.stopped(message)
        elif kind == protocol.READY and self._keeper is not None:
            self._welcome(number, message)
        elif kind == protocol.EXIT:
            self._watching.exited(int(message["rank"]), int(message["status"]), now)
            self._output.flush(int(message["rank"]))
            self._observer.end_worker(int(message["rank"]), int(message["status"]))
            if self._keeper is not None:
                self._keeper.exited(int(message["rank"]), int(message["status"]), now)
        elif kind == protocol.REFUSED:
            self._lose_machine(number, str(message["reason"]))
        elif kind == CLOSED and number not in self._fleet.left:
            self._lose_machine(number, self._fleet.links[number].why_lost())

    def _notice_silence(self) -> None:
        # Only when there is nothing to read: a blocked terminal must not look like lost machines.
        for link in self._fleet.links:
            if not link.is_closed and link.is_silent():
                self._lose_machine(link.number, f"{link.host.name} has sent no heartbeat for {link.silence_s:g} s")

    def _show_status(self, now: float) -> None:
        self._observer.look(now)
        if news := self._observer.news():
            self._output.say(news)
        if self._output.is_live:
            figures, limit = self._observer.status(now)
            width = self._output.width
            shown = self._watching.status_line(now, width, figures, self._observer.has_records)
            self._output.status(f"{shown}\n{limit[: max(0, width - 1)]}" if limit else shown)
        elif line := self._observer.line(now):
            self._output.say(line)

    def _ask_to_end(self) -> None:
        self._output.say(
            f"stopping: workers have {self._settings.grace_s:g} s to shut down (Ctrl-C again kills them at once)"
        )
        self._fleet.send_all(protocol.SIGNAL, number=int(signal.SIGINT))

    def _show_stacks(self) -> None:
        """Make every worker print its stacks, which ends it."""
        self._watching.note_hang(time.monotonic())
        self._fleet.send_all(protocol.SIGNAL, number=int(signal.SIGABRT))
        # A stopped worker must continue to print them.
        self._fleet.send_all(protocol.SIGNAL, number=int(signal.SIGCONT))

    # Ending.

    def _report(self, ending: Ending) -> None:
        if ending.cause is not None:
            others = self._watching.where_others_stood(ending.cause.rank, time.monotonic())
            self._output.say(causes.explain(ending.cause, others))
        elif line := self._balance.end():
            self._output.say(line)

    def _say_what_is_left(self) -> None:
        for link in self._fleet.links:
            if link.number in self._fleet.dropped:
                continue
            left = self._fleet.left.get(link.number)
            if left is None:
                self._output.say(
                    f"{link.host.name} could not be checked for leftovers; "
                    f"its agent ends all workers {link.silence_s:g} s after it has lost the launcher"
                )
            elif left:
                self._output.say(f"{link.host.name}: processes {left} did not end even when killed; end them there")

    # Signals.

    def _interrupt(self, number: int, _frame: FrameType | None) -> None:
        self._interrupts += 1
        self._signal = self._signal or number

    def _show_waiting(self, waited: Collection[int]) -> None:
        """Say whom the launcher waits for before the job starts; stop if it was interrupted."""
        if self._interrupts:
            raise KeyboardInterrupt
        count, first = len(self._fleet.links), self._settings.hosts[min(waited)].name
        others = f" and {len(waited) - 1} more" if len(waited) > 1 else ""
        text = f"connecting: {count - len(waited)} of {count} machines are there, {first}{others} not yet"
        self._output.status(text[: max(0, self._output.width - 1)])

    def _refuse_to_pause(self, _number: int, _frame: FrameType | None) -> None:
        self._output.say("a job of several processes cannot be paused; Ctrl-C ends it")
