"""Local steps, as far as they can be decided beforehand: when which part of a model is exchanged, and what that costs.

Workers take ``every`` steps by themselves between two exchanges of the same parameters. A model may be cut into
fragments that are exchanged one after the other, each at its own step of the round. Pure.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from poseidon.errors import ConfigError
from poseidon.planning.cluster import Cluster
from poseidon.planning.costs import Cost, parts_cost, sharded_cost
from poseidon.planning.numbers import whole_number
from poseidon.planning.planner import Plan, PlanEntry
from poseidon.planning.table import format_bytes
from poseidon.units import Unit

LOCAL = "local"
"""Name that stands for a route where gradients do not travel."""


@dataclass(frozen=True)
class LocalSchedule:
    """When fragments leave and when they take effect, counted in steps of a worker since local steps began."""

    every: int
    """Steps between two exchanges of the same parameters; 0: seconds decide."""
    every_s: float = 0.0
    """Seconds between two exchanges, where no number of steps is given."""
    fragments: int = 1
    overlap: int = 0
    """Steps that a worker goes on taking while a fragment is under way."""

    def __post_init__(self) -> None:
        for name in ("fragments", "overlap"):
            number = whole_number(getattr(self, name))
            if number is None:
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected a whole number")
            object.__setattr__(self, name, number)
        if self.every < 0 or self.every_s < 0 or not (self.every or self.every_s):
            raise ConfigError(f"sync_every is {self.every or self.every_s}; expected at least 1 step, or more than 0 s")
        if self.every_s and (self.fragments != 1 or self.overlap):
            raise ConfigError(
                f'fragments={self.fragments} and overlap={self.overlap} are counted in steps; sync_every="'
                f'{self.every_s:g}s" takes neither: give sync_every as a number of steps'
            )
        if self.every and not 1 <= self.fragments <= self.every:
            raise ConfigError(
                f"fragments={self.fragments}: expected 1 to sync_every={self.every}, since at most one leaves per step"
            )
        if self.every and not 0 <= self.overlap <= self.every:
            raise ConfigError(
                f"overlap={self.overlap}: expected 0 to sync_every={self.every} steps; a fragment must have arrived "
                "before it leaves again"
            )

    def offset(self, fragment: int) -> int:
        """Return at which step of every round a fragment leaves, from 1 to ``every``."""
        return (fragment + 1) * self.every // self.fragments

    def leaving(self, step: int) -> int | None:
        """Return the fragment that leaves after ``step`` steps, if one does."""
        place = (step - 1) % self.every + 1
        return next((each for each in range(self.fragments) if self.offset(each) == place), None)

    def landing(self, step: int) -> int | None:
        """Return the fragment that takes effect after ``step`` steps, if one does."""
        return self.leaving(step - self.overlap) if step > self.overlap else None

    def span(self, step: int) -> int:
        """Return how many steps a fragment that leaves after ``step`` steps has seen since it left before."""
        return min(step, self.every)

    def next_leaving(self, step: int) -> int:
        """Return after how many steps, more than ``step``, the next fragment leaves."""
        return next(each for each in itertools.count(step + 1) if self.leaving(each) is not None)


def read_interval(value: int | str) -> tuple[int, float]:
    """Return the steps and seconds that ``sync_every`` says, one of which is 0: 100, "30s", "2min"."""
    steps = whole_number(value)
    if steps is not None:
        if steps < 1:
            raise ConfigError(
                f'sync_every is {steps}; expected a number of steps of at least 1, or a time such as "30s"'
            )
        return steps, 0.0
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min)", value) if isinstance(value, str) else None
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f'sync_every is {value!r}; expected a number of steps, such as 100, or a time such as "30s"')
    return 0, float(match[1]) * (60.0 if match[2] == "min" else 1.0)


def cut_evenly(sizes: Sequence[int], parts: int) -> list[range]:
    """Cut a row of sizes into ``parts`` stretches, none empty, of about equal total: each ends nearest to its share."""
    if not 1 <= parts <= len(sizes):
        raise ConfigError(f"fragments={parts}: the model has {len(sizes)} layers with parameters; expected 1 to that")
    ends = list(itertools.accumulate(sizes))
    cuts = [0]
    for part in range(1, parts):
        share = ends[-1] * part / parts
        # Each part, and each that follows, keeps at least one.
        possible = range(cuts[-1] + 1, len(sizes) - (parts - part) + 1)
        cuts.append(min(possible, key=lambda cut: abs(ends[cut - 1] - share)))
    cuts.append(len(sizes))
    return [range(start, stop) for start, stop in itertools.pairwise(cuts)]


def cut_fragments(units: Sequence[Unit], schedule: LocalSchedule) -> list[range]:
    """Return which units are exchanged at once."""
    return cut_evenly([unit.size_bytes for unit in units], schedule.fragments) if units else []


@dataclass(frozen=True)
class LocalPlan(Plan):
    """The plan of a model whose workers take local steps; costs are those of one exchange, and of all its layers."""

    schedule: LocalSchedule = field(default=LocalSchedule(1))
    exchanged_bytes: int = 0
    """What one worker contributes to the exchanges of a round."""
    lossy: str = ""
    """How changes are compressed; empty: they are exact."""
    fragments_s: tuple[float, ...] = ()
    """Seconds that the exchange of each fragment takes; one with a large layer takes longer than its share."""

    @property
    def wire_bytes(self) -> float:
        """Bytes one machine sends per step, on average."""
        return self.round_bytes / self.schedule.every if self.schedule.every else 0.0

    @property
    def round_bytes(self) -> float:
        """Bytes one machine sends for all exchanges of a round."""
        return sum(entry.cost.wire_bytes for entry in self.entries)

    @property
    def round_s(self) -> float:
        """Seconds that all exchanges of a round take on the busiest link."""
        return sum(entry.cost.wire_s for entry in self.entries)

    def step_s(self, compute_s: float) -> float:
        """Predict the mean time of a step whose computation takes ``compute_s``: what is not hidden is waited for."""
        schedule = self.schedule
        if not schedule.every:
            return compute_s * (1 + self.round_s / schedule.every_s)
        hidden_s = schedule.overlap * compute_s
        return compute_s + sum(max(0.0, one - hidden_s) for one in self.fragments_s) / schedule.every

    def __str__(self) -> str:
        schedule = self.schedule
        every = f"{schedule.every} steps" if schedule.every else f"{schedule.every_s:g} s"
        parts = [f"local steps, exchange every {every}, {format_bytes(self.exchanged_bytes)} each time"]
        if self.lossy:
            parts.append(f"lossy ({self.lossy})")
        if schedule.fragments > 1:
            parts.append(f"in {schedule.fragments} fragments, one after the other")
        if schedule.overlap:
            parts.append(f"taking effect {schedule.overlap} steps later")
        lines = [", ".join(parts)]
        if self.cluster.workers > 1:
            lines.append(
                f"one machine sends {format_bytes(self.round_bytes)} per exchange, about {self.round_s:.3g} s on the "
                f"wire; with the gradients of every step it would be {format_bytes(self.allreduce_bytes)} per step"
            )
            if schedule.every > 1 and schedule.fragments == 1 and not schedule.overlap:
                lines.append("all workers wait for it; with fragments, parts of the model travel while they train")
        else:
            lines.append("one worker: nothing is exchanged")
        return "\n".join([*lines, f"cluster: {self.cluster}"])


def make_local_plan(
    units: Sequence[Unit],
    cluster: Cluster,
    schedule: LocalSchedule,
    extra_bytes: int = 0,
    share: float = 1.0,
    lossy: str = "",
    combines_first: bool = True,
) -> LocalPlan:
    """Plan local steps: every unit travels in full, once per round.

    ``extra_bytes`` are those of buffers; ``share`` is what the compression ``lossy`` leaves of a unit's bytes.
    ``combines_first``: the workers of a machine combine what travels to other machines, unless it is compressed.
    """
    entries = []
    is_combined = combines_first and not lossy and cluster.machines > 1
    # Half precision is exchanged in float32: what differs between two exchanges may be less than it can express.
    wide = [
        replace(unit, parameters=tuple(replace(p, itemsize=max(4, p.itemsize)) for p in unit.parameters))
        for unit in units
    ]
    for unit in wide:
        full = sharded_cost(unit, None, cluster)
        sent = full if is_combined else parts_cost(unit, None, cluster, share)
        cost = Cost(sent.wire_bytes, sent.wire_s, 0.0)
        shape = tuple(parameter.shape for parameter in unit.parameters)
        why = f"exchanged every {schedule.every or f'{schedule.every_s:g} s'}"
        entries.append(PlanEntry(unit.name, unit.kind, shape, None, LOCAL, why, {LOCAL: cost, "allreduce": full}))
    exchanged = math.ceil(sum(unit.size_bytes for unit in wide) * share) + extra_bytes
    cuts = cut_fragments(units, schedule)
    return LocalPlan(
        cluster,
        tuple(entries),
        LOCAL,
        schedule=schedule,
        exchanged_bytes=exchanged,
        lossy=lossy,
        fragments_s=tuple(sum(entry.cost.wire_s for entry in entries[cut.start : cut.stop]) for cut in cuts),
    )
