"""Who belongs to an elastic job, epoch by epoch. Pure: reports and times in, decisions out.

An epoch ends when one of its workers is lost, asks for the next one, or others are ready to join. Then all of its
workers are told, and once each of them is ready or lost, the ready ones get seats in the next. A worker keeps its
number for life; its rank is dealt anew in each epoch, survivors first and in their old order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from poseidon.job.elastic import NEVER, Seat

STOPPED_S = 2.4
"""A worker whose process is stopped and was not heard of for so long is lost: 3 s after it was stopped, at most."""
SILENT_S = 30.0
"""The same for one that is silent for another reason."""
SLOW_S = 15.0
"""After this long, say for whom the others wait."""


@dataclass(frozen=True)
class Bounds:
    """How many workers, or machines, an elastic job may have."""

    least: int
    most: int
    counts_machines: bool = False

    def __str__(self) -> str:
        """Return the bounds as the user writes them."""
        return f"{self.least}:{self.most}"


@dataclass(frozen=True)
class EpochOver:
    """Tell these workers that an epoch is over."""

    epoch: int
    workers: tuple[int, ...]
    is_soft: bool = False
    """They may complete the step under way: nobody is lost."""


@dataclass(frozen=True)
class Seated:
    """Give these workers their seats in the next epoch."""

    seats: Mapping[int, Seat]
    lost: tuple[int, ...]
    joined: tuple[int, ...]


@dataclass(frozen=True)
class Doors:
    """Tell a worker that is about to join where it gets the others' state while they train."""

    worker: int
    doors: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Remove:
    """End a worker that does not answer any more: it must not come back when others have its place."""

    worker: int
    why: str


@dataclass(frozen=True)
class Remark:
    """Say something to the user."""

    text: str


Decision = EpochOver | Seated | Doors | Remove | Remark


@dataclass
class _Worker:
    machine: int
    local_rank: int
    address: str
    is_late: bool = False
    """It came when the job was under way, and takes a seat in ``poseidon.Checkpoint.run`` only."""
    epoch: int = NEVER
    """The last one in which it had a seat, as it says."""
    port: int = 0
    """Where it would meet the others; 0: it is not ready for another epoch."""
    door: int = 0
    """Where it hands out its state; 0: nowhere."""
    asks: bool = False
    """It wants to know the others' doors."""
    heard_at: float | None = None
    stopped: int = 0
    """How often in a row its process was found stopped: once it may be a debugger's doing."""
    was_seated: bool = False
    is_apart: bool = False
    """It has left its epoch, and has not taken a seat in a later one yet."""
    has_ended: bool = False
    has_finished: bool = False
    is_removed: bool = False


@dataclass
class Roster:
    """The workers of one elastic job."""

    bounds: Bounds
    epoch: int = NEVER
    _workers: dict[int, _Worker] = field(default_factory=dict)
    _members: tuple[int, ...] = ()
    """The workers of the present epoch, by rank."""
    _changes_since: float | None = 0.0
    """Since when the next epoch is being prepared; None: it is not."""
    _is_told: bool = False
    _is_soft: bool = False
    """The present epoch ends only because others join."""

    # What is reported.

    def add(self, number: int, machine: int, local_rank: int, address: str, is_late: bool = False) -> None:
        """Note that a worker was started."""
        self._workers[number] = _Worker(machine, local_rank, address, is_late)

    def hear(self, number: int, facts: Mapping[str, Any], now: float) -> None:
        """Note a worker's heartbeat."""
        worker = self._workers[number]
        worker.epoch, worker.port, worker.heard_at = int(facts["epoch"]), int(facts["port"]), now
        if facts.get("leaves", 0):
            self.end(number, has_finished=False)
        # What it said of an earlier epoch is over: it may end before it is heard again.
        worker.is_apart = bool(facts.get("apart", 0)) and worker.epoch == self.epoch
        worker.door, worker.asks = int(facts.get("door", 0)), bool(facts.get("asks", 0))

    def note_stopped(self, numbers: Sequence[int], among: Sequence[int]) -> None:
        """Note which of some workers' processes are stopped."""
        for number in among:
            worker = self._workers[number]
            worker.stopped = worker.stopped + 1 if number in numbers else 0

    def end(self, number: int, has_finished: bool) -> None:
        """Note that a worker has ended, or is lost with its machine."""
        worker = self._workers[number]
        if not worker.has_ended:
            # One that never joined the others, or not again, has done something else than they.
            took_part = (worker.was_seated and not worker.is_apart) or self.epoch == NEVER
            worker.has_ended, worker.has_finished = True, has_finished and took_part

    # What follows.

    @property
    def alive(self) -> list[int]:
        """The workers that have not ended."""
        return [number for number, worker in self._workers.items() if not worker.has_ended]

    @property
    def has_finished(self) -> bool:
        """Whether a worker of this job has come to the end of its training."""
        return any(worker.has_finished for worker in self._workers.values())

    def has_stayed_apart(self, number: int) -> bool:
        """Whether a worker has ended without joining the others, or without joining them again."""
        worker = self._workers[number]
        return self.epoch != NEVER and worker.has_ended and (worker.is_apart or not worker.was_seated)

    @property
    def is_short(self) -> bool:
        """Whether there are too few workers to go on."""
        return not self.has_finished and self._count(self.alive) < self.bounds.least

    @property
    def is_done(self) -> bool:
        """Whether the training is complete: whoever still runs came too late to take part in it."""
        return self.has_finished and all(self._workers[number].has_ended for number in self._members)

    def decide(self, now: float, is_quiet: bool = True) -> list[Decision]:
        """Return what to do now; ``is_quiet``: every report that has come was taken."""
        decisions: list[Decision] = list(self._find_silent(now)) if is_quiet else []
        decisions += self._answer()
        is_broken = any(self._is_lost(number) or self._is_ready(number) for number in self._members)
        may_join = not self.has_finished and bool(self._joiners())
        is_new = self._changes_since is None and (is_broken or may_join)
        if is_new or (is_broken and self._is_soft):
            self._changes_since, self._is_told, self._is_soft = now, False, not is_broken
            present = tuple(number for number in self._members if not self._workers[number].has_ended)
            decisions.append(EpochOver(self.epoch, present, self._is_soft))
        if self._changes_since is not None:
            if not self._changes_since:
                self._changes_since = now
            decisions += self._form(now)
        return decisions

    def _form(self, now: float) -> list[Decision]:
        """Deal seats if everybody is ready who can be."""
        is_first = self.epoch == NEVER
        present = [number for number in self._members if number in self.alive]
        # The first epoch begins in poseidon.init(), where workers that came later never are.
        early = [number for number in self.alive if not self._workers[number].is_late] if is_first else []
        waited = early or (self.alive if is_first else present)
        late = [number for number in waited if not self._is_ready(number)]
        if late:
            assert self._changes_since is not None
            # A program that has not called poseidon.init() anywhere may not mean to.
            is_common = is_first and len(late) == len(waited)
            if is_common or self._is_told or now - self._changes_since < SLOW_S:
                return []
            self._is_told = True
            names = ", ".join(map(str, late))
            what = "call poseidon.init()" if is_first else "leave the interrupted step"
            return [Remark(f"waiting for worker{'s' * (len(late) > 1)} {names} to {what}")]
        # Where one has finished there is nothing left to join.
        may_join = not self.has_finished and not early
        seated = [*waited, *(number for number in self._joiners() if may_join and number not in waited)]
        is_enough = self.has_finished or self._count(seated) >= self.bounds.least
        if not seated or self.is_short or not (is_enough or early):
            return []
        lost = tuple(number for number in self._members if self._is_lost(number))
        joined = tuple(number for number in seated if number not in self._members)
        self.epoch += 1
        seats = self._deal(seated)
        self._members, self._changes_since, self._is_soft = tuple(seated), None, False
        for number in seated:
            worker = self._workers[number]
            worker.port, worker.was_seated, worker.is_apart = 0, True, False
        if is_enough:
            return [Seated(seats, lost, joined)]
        # They are enough only with those who came later, and meet them in the next epoch.
        self._changes_since, self._is_told = now, False
        return [Seated(seats, lost, joined), EpochOver(self.epoch, self._members)]

    def _deal(self, seated: Sequence[int]) -> dict[int, Seat]:
        first = self._workers[seated[0]]
        machines = [self._workers[number].machine for number in seated]
        return {
            number: Seat(
                self.epoch,
                rank,
                len(seated),
                # It stays the number of its device.
                self._workers[number].local_rank,
                machines.count(self._workers[number].machine),
                first.address,
                first.port,
            )
            for rank, number in enumerate(seated)
        }

    def _is_ready(self, number: int) -> bool:
        """Whether a worker waits for a seat; a word of an epoch before the present one is out of date."""
        worker = self._workers[number]
        is_present = worker.epoch == self.epoch or number not in self._members
        return not worker.has_ended and worker.port > 0 and is_present

    def _is_lost(self, number: int) -> bool:
        worker = self._workers[number]
        return worker.has_ended and not worker.has_finished

    def _joiners(self) -> list[int]:
        return [number for number in self.alive if number not in self._members and self._is_ready(number)]

    def _count(self, numbers: Sequence[int]) -> int:
        if self.bounds.counts_machines:
            return len({self._workers[number].machine for number in numbers})
        return len(numbers)

    def _answer(self) -> list[Doors]:
        """Answer those who ask for doors; they ask again if it does not reach them."""
        asking = [number for number in self.alive if self._workers[number].asks]
        members = [self._workers[number] for number in self._members]
        doors = tuple((each.address, each.door) for each in members if each.door and not each.has_ended)
        for number in asking:
            self._workers[number].asks = False
        return [Doors(number, doors) for number in asking]

    def _find_silent(self, now: float) -> list[Remove]:
        found = []
        for number in self.alive:
            worker = self._workers[number]
            if worker.heard_at is None or worker.is_removed:
                continue
            silent_s = now - worker.heard_at
            is_stopped = worker.stopped > 1
            if silent_s > SILENT_S or (is_stopped and silent_s > STOPPED_S):
                worker.is_removed = True
                why = "its process is stopped" if is_stopped else "it does not answer"
                found.append(Remove(number, f"{why} for {silent_s:.0f} s"))
        return found
