"""What a job would gain by losing something: exact, lossy and local training beside each other, with their prices."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from poseidon.planning.cluster import format_rate
from poseidon.planning.local import LocalSchedule, make_local_plan
from poseidon.planning.lossy import DEFAULT_RANK, EXACT, read_lossy
from poseidon.planning.table import format_bytes
from poseidon.sim.setting import Setting
from poseidon.sim.steps import simulate
from poseidon.sim.systems import SYSTEMS

GOOD_ENOUGH = 1.10
"""Within this factor of linear there is nothing to gain."""
SHORTER = 0.9
"""A unit whose exact form has at most this share of the lossy one's bytes stays exact."""
INTERVALS = (10, 25, 50, 100, 200, 500)
"""Steps between exchanges to choose from: the fewest that are good enough."""
OUTER_FROM = 100
"""From this interval on an outer optimizer pays; with short ones, and in short runs, averages learn faster."""


@dataclass(frozen=True)
class Price:
    """What a way of losing something does to the loss, and who says so."""

    cost: str
    source: str


PRICES = {
    "exact": Price("none", "the mean of all gradients"),
    "bf16": Price("none seen", "guide: slow links"),
    "int8": Price("none seen", "guide: slow links"),
    "lowrank": Price("some more steps", "guide; Vogels et al. 2019"),
    "topk": Price("more steps", "guide; Lin et al. 2018"),
    "local": Price("more steps, growing with sync_every", "guide; Douillard et al. 2023"),
}
"""In the order of what they lose, the least first."""


@dataclass(frozen=True)
class Proposal:
    """One way to train, and what is predicted of it."""

    name: str
    call: str
    """The arguments of ``poseidon.distribute`` that ask for it."""
    step_s: float
    compute_s: float
    sent_bytes: float
    """Bytes a machine sends per step."""
    price: Price

    @property
    def times_linear(self) -> float:
        """Time of a step over that of one without exchange."""
        return self.step_s / self.compute_s if self.compute_s else 1.0

    @property
    def times_text(self) -> str:
        """The same in words."""
        return f"{self.times_linear:.2f}x" if self.times_linear < 100 else f"{self.times_linear:.0f}x"

    @property
    def is_good_enough(self) -> bool:
        """Whether a faster exchange would gain next to nothing."""
        return self.times_linear <= GOOD_ENOUGH


@dataclass(frozen=True)
class Proposals:
    """All ways, the exact one first, then by what they lose."""

    every: tuple[Proposal, ...]
    setting: Setting

    @property
    def exact(self) -> Proposal:
        """The way that loses nothing."""
        return self.every[0]

    @property
    def advised(self) -> Proposal:
        """The way that loses least among those that are good enough; if none is, the fastest."""
        good = [one for one in self.every if one.is_good_enough]
        return good[0] if good else min(self.every, key=lambda one: one.step_s)

    @property
    def verdict(self) -> str:
        """One sentence: whether exact is good enough, and what to ask for if not."""
        exact, advised = self.exact, self.advised
        if exact.is_good_enough:
            return f"exact is within 10 % of linear ({exact.times_text}): nothing to gain from losing anything"
        link = format_rate(self.setting.cluster.crossing.bits_per_s)
        if advised is exact:
            return f"exact takes {exact.times_text} linear at {link}, and nothing here would be faster"
        return (
            f"exact takes {exact.times_text} linear at {link}; {advised.name} would take "
            f"{advised.times_text}: poseidon.distribute(model, optimizer, {advised.call})"
        )


def propose(setting: Setting, rank: int = DEFAULT_RANK) -> Proposals:
    """Predict a step of every way to train on a cluster."""
    distributed = replace(setting, system=SYSTEMS["distribute"], lossy=None)
    return Proposals((*_gradients(distributed, rank), _local(distributed)), setting)


def _gradients(setting: Setting, rank: int) -> Iterator[Proposal]:
    exact = simulate(setting)
    yield Proposal("exact", "", exact.step_s, exact.compute_s, exact.sent_bytes, PRICES["exact"])
    specs = setting.profile.specs
    names = [unit.name for unit in specs]
    for way in ("bf16", "int8", "lowrank", "topk"):
        option = f", rank={rank}" if way == "lowrank" else ""
        choice = read_lossy(way, rank=rank if way == "lowrank" else None)
        everywhere = simulate(replace(setting, lossy=choice))
        # An exact route may be shorter, as rows of an embedding are: such units lose nothing.
        entries = everywhere.plan.entries
        kept = [one.unit for one in entries if one.is_lossy and one.exact_bytes < SHORTER * one.cost.wire_bytes]
        call, outcome = f'lossy="{way}"', everywhere
        if kept and choice is not None:
            patterns = {**dict.fromkeys(cover(kept, names), EXACT), "*": way}
            some = simulate(replace(setting, lossy=replace(choice, patterns=tuple(patterns.items()))))
            # Fewer bytes between machines may take longer inside them.
            if some.step_s <= everywhere.step_s:
                call, outcome = f"lossy={json.dumps(patterns)}", some
        yield Proposal(way, call + option, outcome.step_s, outcome.compute_s, outcome.sent_bytes, PRICES[way])


def cover(chosen: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return patterns that match the chosen names and no other: a whole parent's where all its children are chosen."""
    patterns = []
    for name in chosen:
        parent = name.rpartition(".")[0]
        siblings = [other for other in names if parent and other.startswith(f"{parent}.")]
        is_whole = bool(siblings) and set(siblings) <= set(chosen)
        patterns.append(f"{parent}.*" if is_whole else name)
    return list(dict.fromkeys(patterns))


def _local(setting: Setting) -> Proposal:
    """Return local steps with the shortest interval that is good enough, or the longest there is."""
    cluster, compute_s = setting.cluster, setting.profile.step_s
    link = replace(cluster.between, bits_per_s=cluster.between.bits_per_s * setting.payload)
    plans = [
        # Between devices, which compact, every worker sends its own.
        make_local_plan(
            setting.profile.specs,
            replace(cluster, between=link),
            LocalSchedule(every),
            combines_first=not setting.compacts,
        )
        for every in INTERVALS
    ]
    plan = next((plan for plan in plans if plan.step_s(compute_s) <= GOOD_ENOUGH * compute_s), plans[-1])
    every = plan.schedule.every
    call = f'consistency="local", sync_every={every}' + (', outer="nesterov"' if every >= OUTER_FROM else "")
    # Of one machine, what its workers send each other: no machine sends that.
    sent_bytes = plan.wire_bytes if cluster.machines > 1 else 0.0
    return Proposal("local", call, plan.step_s(compute_s), compute_s, sent_bytes, PRICES["local"])


def format_proposals(proposals: Proposals) -> str:
    """Return the lines that ``poseidon plan --allow lossy`` ends with."""
    lines = [
        "exact, lossy and local training, predicted:",
        f"  {'way':<9}{'ms/step':>10}{'x linear':>10}{'sent/step':>11}  {'what it costs':<40} source",
        *(_format(one) for one in proposals.every),
        proposals.verdict,
    ]
    return "\n".join(lines)


def _format(one: Proposal) -> str:
    sent = format_bytes(one.sent_bytes)
    return (
        f"  {one.name:<9}{one.step_s * 1e3:>10.4g}{one.times_text:>10}{sent:>11}  {one.price.cost:<40} "
        f"{one.price.source}"
    )


def proposals_to_dict(proposals: Proposals) -> dict[str, object]:
    """Return plain data for ``--json``."""
    return {
        "ways": [_to_dict(one) for one in proposals.every],
        "advised": proposals.advised.name,
        "exact_is_good_enough": proposals.exact.is_good_enough,
        "verdict": proposals.verdict,
    }


def _to_dict(one: Proposal) -> dict[str, object]:
    return {
        "name": one.name,
        "call": one.call,
        "step_ms": one.step_s * 1e3,
        "times_linear": one.times_linear,
        "sent_bytes": one.sent_bytes,
        "is_lossy": one.name != "exact",
        "loss_cost": one.price.cost,
        "source": one.price.source,
    }
