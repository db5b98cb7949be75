"""All agents of a job: asked, kept alive and ended together, and cleaned up after when lost."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from poseidon.errors import ConfigError
from poseidon.launch import protocol, ssh
from poseidon.launch.hosts import Host
from poseidon.launch.link import CLOSED, AgentLink, Events
from poseidon.launch.protocol import Message

ANSWER_S = 40.0
"""Deadline for the logins and answers of all machines."""
SWEEP_CONNECT_S = 2
SWEEP_S = 4.0
"""Deadlines for the clean-up of a machine whose agent was lost: for the login, and in total."""
_END_S = 12.0

Handler = Callable[[int, Message], None]


class Fleet:
    """One agent per host. ``take`` gets every message that does not answer a question, on the caller's thread."""

    def __init__(
        self,
        hosts: Sequence[Host],
        directory: str,
        settings: ssh.SshSettings,
        run: str,
        take: Handler,
        silence_s: float = protocol.SILENCE_S,
    ) -> None:
        self.links: list[AgentLink] = []
        self.left: dict[int, list[int]] = {}
        """Machines that were checked, with the processes that could not be ended there."""
        self.dropped: set[int] = set()
        """Machines that were never reached, or that another agent has looked after since."""
        self._silence_s = silence_s
        self._hosts = hosts
        self._directory = directory
        self._settings = settings
        self._run = run
        self._take = take
        self._events: Events = queue.Queue(maxsize=4096)
        self._closing = threading.Event()
        self._script: str | None = None

    def start(self, script: str | None) -> None:
        """Start the agents and ask them to look around; their answers come later."""
        self._script = script
        for host in self._hosts:
            self.add(host)
        threading.Thread(target=self._show_life, daemon=True).start()

    def add(self, host: Host, ends: Sequence[str] = ()) -> int:
        """Start an agent on one more host, or once more, and ask it to look around; return its machine's number.

        It first ends the processes with the marks ``ends``.
        """
        is_here, home = ssh.is_here(host), self._home(host)
        silence_s = protocol.patience_s(self._silence_s, is_here)
        link = AgentLink(len(self.links), host, is_here, home, self._settings, silence_s)
        self.links.append(link)
        link.listen(self._events)
        link.send(
            protocol.PREPARE,
            directory=self._home(host),
            script=self._script,
            interface=host.interface,
            via_ssh=not link.is_local,
            silence_s=silence_s,
            ends=list(ends),
        )
        return link.number

    def drop(self, number: int) -> None:
        """Care no more for a machine."""
        self.dropped.add(number)

    def mark(self, machine: int) -> str:
        """Return the mark of the job's processes on one machine."""
        # Machines may share a process table (containers, emulated ones): each cares for its own workers only.
        return f"{self._run}.{machine}"

    def send_all(self, kind: str, **content: Any) -> None:
        """Send the same message to every connected agent."""
        for link in self.links:
            if not link.is_closed:
                link.send(kind, **content)

    def take_next(self, wait_s: float) -> bool:
        """Pass on the next message; return whether one arrived in time."""
        try:
            number, message = self._events.get(timeout=wait_s)
        except queue.Empty:
            return False
        if message["kind"] == protocol.ENDED:
            self.left[number] = list(message["left"])
        else:
            self._take(number, message)
        return True

    def answers(
        self,
        kind: str,
        machines: Sequence[int] | None = None,
        check: Callable[[Collection[int]], None] = lambda _: None,
    ) -> dict[int, Message]:
        """Return each agent's answer; raise one error that names every machine without one.

        ``check`` is called now and then with the machines that are missing, and may raise to stop waiting.
        """
        waited = set(range(len(self.links)) if machines is None else machines)
        found: dict[int, Message] = {}
        failures: dict[str, list[str]] = {}
        deadline = time.monotonic() + ANSWER_S
        while waited:
            check(waited)
            try:
                number, message = self._events.get(timeout=0.2)
            except queue.Empty:
                if time.monotonic() < deadline:
                    continue
                failures[f"no answer within {ANSWER_S:g} s"] = [self._hosts[number].name for number in waited]
                break
            if message["kind"] == kind:
                found[number] = message
            elif message["kind"] == protocol.REFUSED:
                failures.setdefault(str(message["reason"]), []).append(self._hosts[number].name)
            elif message["kind"] == CLOSED and number in waited:
                failures[self.links[number].why()] = []
            else:
                self._take(number, message)
                continue
            waited.discard(number)
        if failures:
            lines = [f"{', '.join(sorted(names))}: {why}" if names else why for why, names in failures.items()]
            raise ConfigError(lines[0] if len(lines) == 1 else "\n  ".join(["cannot start:", *lines]))
        return found

    def end(self, grace_s: float, is_hurried: Callable[[], bool]) -> None:
        """End all workers and check that nothing is left; :attr:`left` holds the machines that were checked.

        Machines whose agents were lost are asked through new ones. ``is_hurried`` ends the grace period early.
        """
        alive = [link for link in self.links if not link.is_closed and not link.is_silent()]
        for link in alive:
            link.send(protocol.STOP, grace_s=grace_s)
        sweeps = self._start_sweeps([link for link in self.links if link not in alive])
        deadline = time.monotonic() + grace_s + _END_S
        is_patient = True
        while any(link.number not in self.left and not link.is_closed for link in alive):
            if is_patient and is_hurried():
                is_patient = False
                for link in alive:
                    # An agent whose launcher is gone kills its workers.
                    link.close()
            if not self.take_next(0.1) and time.monotonic() > deadline:
                break
        sweeps += self._start_sweeps([link for link in alive if link.is_closed])
        for sweep in sweeps:
            sweep.join(2 * SWEEP_S)

    def close(self) -> None:
        """Disconnect from all agents; those that still run end their workers and exit."""
        self._closing.set()
        for link in self.links:
            link.close()

    def _home(self, host: Host) -> str:
        return host.directory or self._directory

    def _start_sweeps(self, lost: Sequence[AgentLink]) -> list[threading.Thread]:
        links = [link for link in lost if link.number not in self.left and link.number not in self.dropped]
        sweeps = [threading.Thread(target=self._sweep, args=(link,), daemon=True) for link in links]
        for sweep in sweeps:
            sweep.start()
        return sweeps

    def _sweep(self, lost: AgentLink) -> None:
        """End, through a new agent, what a lost agent left on its machine."""
        settings = replace(self._settings, connect_timeout_s=SWEEP_CONNECT_S)
        events: Events = queue.Queue()
        link = AgentLink(lost.number, lost.host, lost.is_local, self._home(lost.host), settings)
        link.listen(events)
        link.send(protocol.STOP, grace_s=0.0, run=self.mark(lost.number))
        deadline = time.monotonic() + SWEEP_S
        while time.monotonic() < deadline:
            try:
                _, message = events.get(timeout=0.1)
            except queue.Empty:
                continue
            if message["kind"] == protocol.ENDED:
                self.left[lost.number] = list(message["left"])
            if message["kind"] in (protocol.ENDED, CLOSED):
                break
        link.close()

    def _show_life(self) -> None:
        while not self._closing.wait(protocol.beat_s(self._silence_s)):
            self.send_all(protocol.ALIVE)
