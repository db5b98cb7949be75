"""What the workers' heartbeats say: who is gone, who works, who is stuck. Pure: beats and times in, verdicts out.

A wait goes on for as long as somebody who beats is outside of exchanges: that worker evaluates, writes a checkpoint or
loads data, and will come. It ends when a worker is gone that cannot have done its part, or when for the whole limit
everybody has been waiting, each in one exchange: then they wait for different things.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from poseidon.job.limits import IDLE_TIMES

BEAT_S = 1.0
"""Seconds between two heartbeats."""
SILENT_BEATS = 2.5
"""A worker silent for so many of them when a wait fails is considered dead."""

PHASES = ("starting", "in forward", "in backward", "at the end of backward", "finished backward")
"""What a worker may be doing in a step, in this order."""

FLIGHT_S = 5.0
"""How long a message of a worker that has ended may still be on its way."""


@dataclass(frozen=True)
class Beat:
    """A heartbeat: what a worker says of itself."""

    step: int = 0
    doing: str = PHASES[0]
    waits_for: str = ""
    """What its main thread waits for from others; empty: it is outside of exchanges."""
    wait: int = 0
    """Tells one wait from the next."""
    work: int = 0
    """Changes while the process computes, reads or writes."""
    left: str = ""
    """How it has left: finished, failed, closed its model; empty while it takes part."""
    why: str = ""
    """Its error, if it failed."""

    def pack(self) -> bytes:
        """Return the beat as bytes."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Beat:
        """Return the beat in bytes of another worker; an empty one if they are not one of this version."""
        try:
            beat = cls(**json.loads(data))
        except (ValueError, TypeError):
            return cls()
        return beat if beat.doing in PHASES else cls()

    @property
    def progress(self) -> tuple[int, int]:
        """Sort key: how far the worker is."""
        return self.step, PHASES.index(self.doing)

    @property
    def is_symptom(self) -> bool:
        """Whether it left because another one was lost."""
        return self.why.startswith("WorkerLostError")

    @property
    def where(self) -> str:
        """Where it is, in words."""
        return f"at step {self.step}, {self.doing}"


@dataclass
class _Standing:
    """What is known of another worker."""

    heard_at: float
    waits_since: float
    worked_at: float
    beat: Beat = field(default_factory=Beat)
    gone_at: float | None = None
    """When it left, or its connection ended."""

    def is_busy(self, now: float, limit_s: float) -> bool:
        """Whether it will come, as far as one can know."""
        if self.gone_at is not None or self.is_silent(now, limit_s):
            return False
        if self.beat.waits_for:
            return now - self.waits_since <= limit_s
        return now - self.worked_at <= IDLE_TIMES * limit_s

    @property
    def has_finished(self) -> bool:
        """Whether it left in peace."""
        return bool(self.beat.left) and not self.beat.why

    def has_given_up(self, limit_s: float) -> bool:
        """Whether it seems to have left because it had waited for another one in vain."""
        if self.beat.is_symptom:
            return True
        # One that ends itself without a word. Beats are some time apart, so its wait was heard of late.
        if self.gone_at is None or self.beat.left or not self.beat.waits_for:
            return False
        return self.gone_at - self.waits_since >= limit_s - 2 * BEAT_S

    def is_silent(self, now: float, limit_s: float) -> bool:
        """Whether its heart has stopped."""
        return now - self.heard_at > max(limit_s, SILENT_BEATS * BEAT_S)


class Life:
    """What one worker knows of the others in its team, by rank."""

    def __init__(self, rank: int, size: int, limit_s: float, now: float) -> None:
        self._rank = rank
        self._limit_s = limit_s
        self._others = {other: _Standing(now, now, now) for other in range(size) if other != rank}

    def hear(self, rank: int, beat: Beat, heard_at: float, is_ended: bool, now: float) -> None:
        """Note a worker's last beat, when anything last came from it, and whether its connection has ended."""
        one = self._others[rank]
        before = one.beat
        if beat.waits_for and (beat.waits_for, beat.wait) != (before.waits_for, before.wait):
            one.waits_since = now
        if (beat.work, beat.progress, beat.wait) != (before.work, before.progress, before.wait):
            one.worked_at = now
        one.beat, one.heard_at = beat, heard_at
        if one.gone_at is None and (beat.left or is_ended):
            one.gone_at = now

    def is_hopeless(self, mine: Beat, peer: int | None, since: float, now: float) -> bool:
        """Return whether a wait for ``peer``, or for anybody, that began at ``since`` should end."""
        for rank, one in self._others.items():
            is_early = one.beat.progress < mine.progress
            if not is_early and rank != peer:
                # It may have done its part, and its end need not concern this wait.
                continue
            if one.gone_at is None:
                is_over = one.is_silent(now, self._limit_s)
            elif one.has_finished and is_early:
                # It left before the step in which this worker waits, so nothing of it is on its way.
                is_over = True
            else:
                is_over = now - one.gone_at > FLIGHT_S
            if is_over:
                return True
        return now - since > self._limit_s and not self.busy(now)

    def busy(self, now: float) -> list[int]:
        """Return who will come, as far as one can know: those outside of exchanges if there are any."""
        found = [rank for rank, one in self._others.items() if one.is_busy(now, self._limit_s)]
        return [rank for rank in found if not self._others[rank].beat.waits_for] or found

    def is_busy(self, rank: int, now: float) -> bool:
        """Return whether a worker will come, as far as one can know."""
        return self._others[rank].is_busy(now, self._limit_s)

    def has_finished(self, rank: int) -> bool:
        """Return whether a worker has left in peace. One that failed should be seen to end before others do so."""
        return self._others[rank].has_finished

    def describe(self, rank: int, hosts: Sequence[str]) -> str:
        """Return what is known of a worker that is alive, in words."""
        beat = self._others[rank].beat
        waits = f", waiting for {beat.waits_for}" if beat.waits_for else ""
        return f"rank {rank} ({hosts[rank]}) is alive, {beat.where}{waits}"

    def verdict(self, mine: Beat, peer: int | None, is_broken: bool, hosts: Sequence[str], now: float) -> str:
        """Return who is to blame for a wait for ``peer``, or for anybody, that has failed."""
        name = {rank: f"rank {rank} ({hosts[rank]})" for rank in self._others}
        alive = [rank for rank, one in self._others.items() if self._is_alive(one, now)]
        if peer in alive and is_broken:
            # Whoever is dead may only have been the first to end because of it.
            return f"{self.describe(peer, hosts)}, but its connection with rank {self._rank} broke"
        gone = {rank: one.beat for rank, one in self._others.items() if rank not in alive}
        limit = f"(waited {self._limit_s:g} s; POSEIDON_TIMEOUT or timeout_s= changes that)"
        tired = [rank for rank in gone if self._others[rank].has_given_up(self._limit_s)]
        last = min((self._others[rank].beat.progress for rank in alive), default=mine.progress)
        behind = [rank for rank in alive if self._others[rank].beat.progress == last]
        # Of several that are equally far behind, the one whose message is missing.
        behind = [peer] if peer in behind else behind
        late = "; ".join(self.describe(rank, hosts) for rank in behind)
        # Whoever has ended since and was further than that one may have given up for the same reason.
        if peer in behind and last < min([mine.progress, *(beat.progress for beat in gone.values())]):
            return f"{'' if gone else 'nobody is dead, but '}{late} {limit}"
        for is_blamed in (_is_dead, _has_left):
            blamed = [rank for rank, beat in gone.items() if is_blamed(beat) and rank not in tired]
            # Who was further than this worker has done its part.
            blamed = [rank for rank in blamed if gone[rank].progress <= mine.progress] or blamed
            if blamed:
                return "; ".join(_explain_end(name[rank], gone[rank]) for rank in blamed)
        # Last of all those who only report another one's end; before them the one that they all waited for.
        if tired and not last < min([mine.progress, *(gone[rank].progress for rank in tired)]):
            return "; ".join(_explain_end(name[rank], gone[rank]) for rank in tired)
        return f"{'' if gone else 'nobody is dead, but '}{late} {limit}"

    def _is_alive(self, one: _Standing, now: float) -> bool:
        return one.gone_at is None and not one.is_silent(now, 0.0)


def _is_dead(beat: Beat) -> bool:
    return not beat.left


def _has_left(beat: Beat) -> bool:
    return bool(beat.left)


def _explain_end(who: str, beat: Beat) -> str:
    if not beat.left:
        return f"{who} is dead or cut off; last seen {beat.where}"
    return f"{who} {beat.left} {beat.where}" + (f": {beat.why}" if beat.why else "")
