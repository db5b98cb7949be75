"""Keeps an elastic job going: carries out what the roster decides, starts lost workers again, looks for machines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from poseidon.errors import ConfigError
from poseidon.launch import protocol
from poseidon.launch.fleet import Fleet
from poseidon.launch.hosts import Host
from poseidon.launch.link import AgentLink
from poseidon.launch.observing import JobObserver
from poseidon.launch.output import JobOutput
from poseidon.launch.places import Place
from poseidon.launch.protocol import Message
from poseidon.launch.roster import Bounds, Doors, EpochOver, Remove, Roster, Seated
from poseidon.launch.vacancies import Opening, Vacancies
from poseidon.launch.watching import Watching

READ_S = 2.0
"""Seconds between two looks at the list of hosts."""


class JobKeeper:
    """The launcher's part for elastic jobs. ``start`` starts workers on a machine whose agent is ready."""

    def __init__(
        self,
        bounds: Bounds,
        places: list[Place],
        fleet: Fleet,
        output: JobOutput,
        watching: Watching,
        observer: JobObserver,
        start: Callable[[AgentLink, Sequence[Place]], None],
        replacements: int,
        wait_s: float,
        list_hosts: Callable[[], Sequence[Host]] | None = None,
    ) -> None:
        self.roster = Roster(bounds)
        self._bounds = bounds
        self._places = places
        self._fleet = fleet
        self._output = output
        self._watching = watching
        self._observer = observer
        self._start = start
        self._wait_s = wait_s
        self._list_hosts = list_hosts
        self._vacancies = Vacancies(replacements)
        self._coming: set[int] = set()
        """Machines whose agents were asked to look around."""
        self._gone: set[int] = set()
        """Machines that are lost."""
        self._short_since: float | None = None
        self._read_at = 0.0
        self._list_problem = ""
        """Why the list of hosts could not be read the last time."""
        self._is_started = False

    def enrol(self, place: Place, address: str, most: int) -> dict[str, Any]:
        """Note a worker that is being started; return what it must know."""
        self.roster.add(place.rank, place.machine, place.local_rank, address, self._is_started)
        return {"address": address, "most": most, "is_late": self._is_started}

    def keep_going(self, now: float, is_idle: bool) -> bool:
        """Do what is due; return whether the job goes on, whoever has ended."""
        self._is_started = True
        for decision in self.roster.decide(now, is_idle):
            if isinstance(decision, EpochOver):
                for worker in decision.workers:
                    self._tell(worker, {"over": decision.epoch, "is_soft": decision.is_soft})
            elif isinstance(decision, Seated):
                self._watching.forgive()
                self._say_seated(decision)
                self._observer.note("epoch", epoch=self.roster.epoch, workers=list(decision.seats))
                for worker in decision.lost:
                    self._observer.lose(worker)
                for worker in decision.joined:
                    self._observer.join(worker)
                for worker, seat in decision.seats.items():
                    self._tell(worker, {"seat": asdict(seat)})
            elif isinstance(decision, Doors):
                self._tell(decision.worker, {"doors": decision.doors})
            elif isinstance(decision, Remove):
                self._output.say(f"{self._places[decision.worker].label} is ended: {decision.why}")
                self._link_of(decision.worker).send(protocol.KILL, rank=decision.worker)
            else:
                self._output.say(decision.text)
        if self.roster.has_finished:
            # Whoever ends after one has come to the end of the training takes nothing away.
            self._watching.forgive()
            return not self.roster.is_done
        self._read_hosts(now)
        for opening in self._vacancies.take_due(now):
            self._fill(opening)
        return self._has_hope(now)

    def exited(self, rank: int, status: int, now: float) -> None:
        """Note that a worker has ended; one that was killed is started again."""
        self.roster.end(rank, has_finished=status == 0)
        place = self._places[rank]
        if status == 0 and self.roster.has_stayed_apart(rank):
            self._output.say(
                f"{place.label} has ended without joining the others: in an elastic job the program trains inside "
                "poseidon.Checkpoint.run"
            )
        if status < 0 and place.machine not in self._gone:
            self._vacancies.lose(Opening(place.machine, place.local_rank), now)

    def machine_lost(self, number: int, now: float) -> bool:
        """Note that a machine is lost; return whether it had workers."""
        if number in self._gone:
            return False
        self._gone.add(number)
        if number in self._coming:
            self._coming.discard(number)
            self._fleet.drop(number)
            self._vacancies.retry(Opening(self._first_number(number)), now)
            return False
        for place in self._places:
            if place.machine == number:
                self.roster.end(place.rank, has_finished=False)
        # Its agent, if it lives, ends its workers.
        threading.Thread(target=self._fleet.links[number].close, daemon=True).start()
        self._vacancies.lose(Opening(self._first_number(number)), now)
        return True

    def machine_ready(self, number: int) -> None:
        """Start the workers of a machine that has come or come back."""
        if number not in self._coming:
            return
        self._coming.discard(number)
        link = self._fleet.links[number]
        for earlier in self._numbers_of(link.host):
            if earlier != number:
                self._fleet.drop(earlier)  # the new agent has ended what was left there
        self._output.say(f"{link.host.name} is here; its workers join as soon as they are ready")
        self._add(link, range(link.host.slots))

    def heard(self, rank: int, facts: Mapping[str, Any], now: float) -> None:
        """Note a worker's heartbeat."""
        self.roster.hear(rank, facts, now)

    def stopped(self, message: Message) -> None:
        """Note which workers of a machine are stopped processes."""
        self.roster.note_stopped(message["stopped"], message["ranks"])

    def _has_hope(self, now: float) -> bool:
        """Return whether there are enough workers, or may soon be."""
        if not self.roster.is_short:
            self._short_since = None
            return bool(self.roster.alive)
        may_come = self._vacancies.is_open or bool(self._coming) or self._list_hosts is not None
        if self._short_since is None:
            self._short_since = now
            if may_come and self._wait_s:
                what = "machines" if self._bounds.counts_machines else "workers"
                self._output.say(
                    f"fewer than {self._bounds.least} {what} are left; waiting for others, up to {self._wait_s:g} s "
                    "(--wait-for-hosts)"
                )
        return may_come and now - self._short_since < self._wait_s

    def _fill(self, opening: Opening) -> None:
        if opening.local_rank is not None:
            if opening.machine not in self._gone:
                self._add(self._fleet.links[opening.machine], [opening.local_rank])
            return
        self._try_host(self._fleet.links[opening.machine].host)

    def _try_host(self, host: Host) -> None:
        earlier = [self._fleet.mark(number) for number in self._numbers_of(host)]
        try:
            self._coming.add(self._fleet.add(host, earlier))
        except ConfigError as error:
            self._output.say(f"{host.name} cannot be tried: {error}")

    def _add(self, link: AgentLink, local_ranks: Sequence[int]) -> None:
        first = len(self._places)
        added = [
            Place(first + count, link.number, local_rank, link.host.slots, link.host.name)
            for count, local_rank in enumerate(local_ranks)
        ]
        for place in added:
            self._places.append(place)
            self._watching.add(place)
            self._output.add(place)
            self._observer.add(place)
        self._start(link, added)

    def _read_hosts(self, now: float) -> None:
        """Try the hosts that the list has now and had not before, as long as there may be more."""
        if self._list_hosts is None or now - self._read_at < READ_S:
            return
        self._read_at = now
        try:
            listed = self._list_hosts()
        except ConfigError as error:
            # It may be half written; only a new problem is worth a line.
            if str(error) != self._list_problem:
                self._output.say(f"the list of hosts cannot be read, so the present ones stay: {error}")
            self._list_problem = str(error)
            return
        self._list_problem = ""
        known = {link.host.address for link in self._fleet.links}
        for host in listed:
            present = sum(number not in self._gone for number in range(len(self._fleet.links)))
            if host.address not in known and present < self._bounds.most:
                self._output.say(f"{host.name} is new in the list of hosts")
                self._try_host(host)

    def _numbers_of(self, host: Host) -> list[int]:
        """Return the numbers under which a host was tried, in order."""
        return [link.number for link in self._fleet.links if link.host.address == host.address]

    def _first_number(self, number: int) -> int:
        """Return the number by which trials of a host are counted."""
        return self._numbers_of(self._fleet.links[number].host)[0]

    def _say_seated(self, decision: Seated) -> None:
        lost = ", ".join(self._places[worker].label for worker in decision.lost)
        joined = ", ".join(self._places[worker].label for worker in decision.joined)
        count, parts = len(decision.seats), []
        if self.roster.epoch > 0 and len(decision.joined) == count:
            self._output.say(
                "no worker is left that knows the training; it begins again from its last checkpoint, if there is one"
            )
            return
        if lost:
            parts.append(f"{lost} lost")
        if joined and self.roster.epoch > 0:
            parts.append(f"{joined} joined")
        if parts:
            workers = "1 worker goes" if count == 1 else f"{count} workers go"
            self._output.say(f"{'; '.join(parts)}; {workers} on from the last complete step")

    def _link_of(self, worker: int) -> AgentLink:
        return self._fleet.links[self._places[worker].machine]

    def _tell(self, worker: int, news: Message) -> None:
        self._link_of(worker).send(protocol.NEWS, rank=worker, news=news)
