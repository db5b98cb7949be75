"""The launcher's view of all workers, from which it names the cause of a failure. Pure."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from poseidon.launch import cause as causes
from poseidon.launch.cause import Death, DeathKind
from poseidon.launch.places import Place
from poseidon.launch.progress import Standing, furthest_behind, status_line

SETTLE_S = 1.2
"""After a first death, how long to wait for reports of an earlier one and of the other workers' states."""
SYMPTOM_S = 9.5
"""The same if only symptoms are known: the silence of a vanished machine shows only then."""
STACKS_S = 2.0
"""How long hung workers have to print their stacks."""
_TAIL = 200


class Watching:
    """Takes the agents' reports with their times, on any monotonic clock, and names the worker that failed."""

    def __init__(self, places: Sequence[Place], hang_timeout_s: float, now: float) -> None:
        self._places = list(places)
        self._hang_timeout_s = hang_timeout_s
        self._started_at = now
        self._standings = [Standing(changed_at=now) for _ in places]
        self._errors: list[collections.deque[str]] = [collections.deque(maxlen=_TAIL) for _ in places]
        self._lines: list[collections.deque[str]] = [collections.deque(maxlen=_TAIL) for _ in places]
        self._statuses: dict[int, int] = {}
        self._deaths: list[Death] = []
        self._died_at = 0.0
        self._lost_machines: set[int] = set()
        self._hung_at: float | None = None
        self._stood: dict[int, str] = {}

    def add(self, place: Place) -> None:
        """Watch one more worker."""
        self._places.append(place)
        self._standings.append(Standing(changed_at=self._started_at))
        self._errors.append(collections.deque(maxlen=_TAIL))
        self._lines.append(collections.deque(maxlen=_TAIL))

    # Reports of agents.

    def read_line(self, rank: int, text: str, is_error: bool, now: float) -> None:
        """Note that a worker wrote a line."""
        (self._errors if is_error else self._lines)[rank].append(text)
        if self._hung_at is None:
            self._standings[rank].read_line(text, now)

    def read_report(self, rank: int, facts: Mapping[str, Any], now: float) -> None:
        """Note a worker's report about itself."""
        self._standings[rank].read_report(facts, now)

    def exited(self, rank: int, status: int, now: float) -> None:
        """Note that a worker has ended."""
        place = self._places[rank]
        self._statuses[rank] = status
        if place.machine not in self._lost_machines and self._hung_at is None and status != 0:
            self._die(Death(rank, place.host, DeathKind.EXIT, status, self._tail(rank)), now)

    def machine_lost(self, machine: int, reason: str, now: float) -> None:
        """Note that a machine, with all its workers, is out of reach."""
        ranks = [place.rank for place in self._places if place.machine == machine and place.rank not in self._statuses]
        if machine in self._lost_machines or not ranks:
            return
        self._lost_machines.add(machine)
        self._die(Death(ranks[0], self._places[ranks[0]].host, DeathKind.MACHINE, 0, self._tail(ranks[0]), reason), now)

    def note_hang(self, now: float) -> None:
        """Note the state of all workers, before ending them changes it."""
        self._hung_at = now
        self._stood = {rank: self._standings[rank].describe(now) for rank in self._running()}

    def forgive(self) -> None:
        """Forget who has ended so far: the others go on without them."""
        self._deaths.clear()

    # Conclusions.

    @property
    def is_over(self) -> bool:
        """Whether every worker has ended or is out of reach."""
        return not self._running()

    def is_hung(self, now: float) -> bool:
        """Return whether no worker has made progress for too long; true only once."""
        if not self._hang_timeout_s or self._hung_at is not None or self._deaths or self.is_over:
            return False
        moved_at = max(self._standings[rank].changed_at for rank in self._running())
        return now - moved_at > self._hang_timeout_s

    def verdict(self, now: float) -> Death | None:
        """Return the cause once it is certain, or as certain as it will get."""
        if self._hung_at is not None:
            return self._hang_verdict(now)
        if not self._deaths:
            return None
        blamed = causes.accused(self._deaths)
        is_known_to_hang = blamed is not None and blamed[0] in self._running() and blamed[1].startswith("is alive")
        is_certain = is_known_to_hang or any(not death.is_symptom for death in self._deaths)
        patience_s = SETTLE_S if is_certain else SYMPTOM_S
        if now - self._died_at < patience_s and not self.is_over:
            return None
        running = {rank: self._places[rank].host for rank in self._running()}
        finished = [rank for rank, status in self._statuses.items() if status == 0]
        return causes.resolve(self._deaths, running, finished)

    def where_others_stood(self, culprit: int, now: float) -> dict[int, str]:
        """Return the state of every other worker, in words."""
        return {
            place.rank: f"on {place.host}: {self._where(place, now)}" for place in self._places if place.rank != culprit
        }

    @property
    def loss(self) -> float | None:
        """The loss that the first worker that has any told or printed last."""
        return next((standing.loss for standing in self._standings if standing.loss is not None), None)

    def status_line(self, now: float, width: int, observed: Sequence[str] = (), is_observed: bool = False) -> str:
        """Return the status line with ``observed`` added; ``is_observed``: speed comes from records, not from lines."""
        ended = len(self._places) - len(self._running())
        return status_line(self._standings, ended, now - self._started_at, observed, width, is_observed)

    def _die(self, death: Death, now: float) -> None:
        if not self._deaths:
            self._died_at = now
        self._deaths.append(death)

    def _running(self) -> list[int]:
        return [
            place.rank
            for place in self._places
            if place.rank not in self._statuses and place.machine not in self._lost_machines
        ]

    def _tail(self, rank: int) -> tuple[str, ...]:
        return tuple(self._errors[rank] or list(self._lines[rank])[-5:])

    def _hang_verdict(self, now: float) -> Death | None:
        """Name the worker that does not wait for others; if there are several or none, the one furthest behind."""
        assert self._hung_at is not None
        if not self._statuses.keys() >= self._stood.keys() and now - self._hung_at < STACKS_S:
            return None
        hung = list(self._stood)
        busy = [rank for rank in hung if not causes.waits_for_others(self._errors[rank])]
        place = self._places[furthest_behind(self._standings, busy or hung)]
        note = f"no progress for {self._hang_timeout_s:g} s (--hang-timeout), and the others wait for it"
        if len(hung) == 1:
            note = f"no progress for {self._hang_timeout_s:g} s (--hang-timeout)"
        stood = self._stood[place.rank]
        return Death(
            place.rank, place.host, DeathKind.HANG, 0, self._tail(place.rank), f"{note}; {stood}" if stood else note
        )

    def _where(self, place: Place, now: float) -> str:
        stood = self._stood.get(place.rank) or self._standings[place.rank].describe(now)
        if self._hung_at is not None:
            return stood
        if place.machine in self._lost_machines:
            return f"lost with its machine; {stood}"
        status = self._statuses.get(place.rank)
        if status is None:
            return f"running; {stood}"
        return f"{causes.describe_status(status).removeprefix('it ')}; {stood}"
