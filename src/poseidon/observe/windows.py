"""The records of all workers of a job, as the launcher sees them: the last few seconds of each, summed up. Pure."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from poseidon.observe.links import LinkUse
from poseidon.observe.records import Record
from poseidon.observe.steps import BETWEEN, STARTING

WINDOW_S = 2.0
"""What a verdict looks back on; longer where steps are longer."""
LEAST_STEPS = 3
LONGEST_S = 60.0


@dataclass(frozen=True)
class Window:
    """One worker's last seconds."""

    rank: int
    host: str
    records: Sequence[Record] = ()
    silent_s: float = 0.0
    """Time since its last record arrived."""
    usual_s: float = 0.0
    """Time of a step over a longer past; 0: none yet."""

    @property
    def last(self) -> Record:
        """The newest record."""
        return self.records[-1] if self.records else Record()

    @property
    def span_s(self) -> float:
        """The time it covers."""
        return sum(record.span_s for record in self.records)

    @property
    def steps(self) -> int:
        """Steps completed in it."""
        return sum(record.steps for record in self.records)

    def total(self, name: str) -> float:
        """Return the sum of one number of all records."""
        return float(sum(getattr(record, name) for record in self.records))

    def per_step(self, name: str) -> float:
        """Return the mean of one number over the steps."""
        return self.total(name) / max(1, self.steps)

    @property
    def step_s(self) -> float:
        """Time of a step."""
        return self.span_s / max(1, self.steps)

    @property
    def own_s(self) -> float:
        """Time of a step that it did not wait for others."""
        return max(0.0, self.step_s - self.per_step("wait_s"))

    @property
    def optimizer_share(self) -> float:
        """Which part of the time between steps the optimizer took."""
        places = self.places
        seen = sum(places.values())
        return places.get("optimizer", 0) / seen if seen else 0.0

    @property
    def places(self) -> dict[str, int]:
        """Where it was found between steps, and how often."""
        return dict(_sum(record.places for record in self.records))

    @property
    def waits_s(self) -> dict[str, float]:
        """Seconds waited, by what for."""
        return dict(_sum(record.waits_s for record in self.records))

    @property
    def links(self) -> dict[str, LinkUse]:
        """Traffic by the peer's address."""
        found: dict[str, LinkUse] = {}
        for record in self.records:
            for peer, use in record.links.items():
                found[peer] = add_uses(found.get(peer, LinkUse()), use)
        return found


def add_uses(one: LinkUse, other: LinkUse) -> LinkUse:
    """Return the traffic of two spans of time, or of two workers at once."""
    return LinkUse(
        one.sent_bytes + other.sent_bytes,
        one.received_bytes + other.received_bytes,
        one.busy_s + other.busy_s,
        one.resent_bytes + other.resent_bytes,
        max(one.rtt_s, other.rtt_s),
        other.waiting_bytes,
    )


def _sum(parts: Iterable[Mapping[str, float]]) -> collections.Counter[str]:
    total: collections.Counter[str] = collections.Counter()
    for part in parts:
        total.update(part)
    return total


@dataclass
class _Kept:
    host: str
    records: collections.deque[Record] = field(default_factory=lambda: collections.deque(maxlen=256))
    heard_at: float = 0.0
    offset_s: float = float("inf")
    """Smallest difference seen between the launcher's clock at arrival and the worker's at sending."""


class Windows:
    """Takes records as they arrive and returns the last seconds of every worker."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._kept = [_Kept(host) for host in hosts]

    def add(self, rank: int, record: Record, now: float) -> None:
        """Take a record that has just arrived."""
        kept = self._kept[rank]
        kept.records.append(record)
        kept.heard_at = now
        kept.offset_s = min(kept.offset_s, now - record.at_s)

    def renew(self, rank: int) -> None:
        """Forget what a lost worker has said: another one has its place."""
        self._kept[rank] = _Kept(self._kept[rank].host)

    def offset_s(self, rank: int) -> float:
        """Return what to add to a worker's times to get the launcher's; as exact as the fastest message was fast."""
        offset_s = self._kept[rank].offset_s
        return 0.0 if offset_s == float("inf") else offset_s

    def last(self, rank: int) -> Record | None:
        """Return a worker's newest record."""
        kept = self._kept[rank]
        return kept.records[-1] if kept.records else None

    def look(self, now: float) -> list[Window]:
        """Return the last seconds of every worker, long enough for some steps."""
        span_s = WINDOW_S
        for kept in self._kept:
            # Slow steps need a longer look, alike for all workers.
            steps, seen_s = 0, 0.0
            for record in reversed(kept.records):
                steps, seen_s = steps + record.steps, seen_s + record.span_s
                if steps >= LEAST_STEPS or seen_s >= LONGEST_S:
                    break
            span_s = max(span_s, min(seen_s, LONGEST_S))
        return [self._window(rank, kept, span_s, now) for rank, kept in enumerate(self._kept)]

    def _window(self, rank: int, kept: _Kept, span_s: float, now: float) -> Window:
        chosen: list[Record] = []
        seen_s = 0.0
        for record in reversed(kept.records):
            is_training = record.steps or record.doing != STARTING
            if seen_s >= span_s - 0.12 or (chosen and not is_training):
                break
            chosen.append(record)
            seen_s += record.span_s
        moving = [record for record in kept.records if record.steps]
        steps = sum(record.steps for record in moving)
        usual_s = sum(record.span_s for record in moving) / steps if steps else 0.0
        silent_s = now - kept.heard_at if kept.heard_at else 0.0
        return Window(rank, kept.host, chosen[::-1], silent_s, usual_s)


def is_training(window: Window) -> bool:
    """Return whether a worker has begun to train."""
    return bool(window.records) and (window.last.doing != STARTING or window.steps > 0)


PHASE_WORDS = ("starting", "in forward", "in backward", "at the end of backward", "between steps")
assert len(PHASE_WORDS) == BETWEEN + 1
