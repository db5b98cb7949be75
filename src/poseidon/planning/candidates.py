"""Whole plans to choose from. Pure.

The planner compares routes unit by unit and cannot see what hides behind computation, or what a message costs the host.
So it also offers a short list of other whole plans: all full gradients by one route, short forms everywhere, only where
they save most, or nowhere, and, where the next forward may begin before all gradients have landed, the same without
that. The simulator ranks them (``sim/ranking.py``), and the engine tries the best (``engine/choosing.py``). All are
exact, and routes that the user forces are the same in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from poseidon.planning.planner import Plan, PlanEntry, find_forced
from poseidon.planning.route import Routes
from poseidon.planning.schedule import Model, Packing, make_schedule
from poseidon.units import Load, Unit

AS_TORCH = "like torch's DDP"
"""Name of the plan that behaves like torch's class: full gradients by collectives, in buckets of equal size."""
AT_ONCE = ", landing at the end of backward"
"""Ends the names of plans that do not let the next forward begin before all gradients have landed."""
LARGE_GAIN = 4.0
"""A short form that is this many times as fast as the full gradient saves most of the unit's time."""
CLOSE = 1.25
"""Plans whose predicted time is within this factor of the best may be faster in fact."""
GUARD_CLOSE = 1.6
"""The same for guards, which are tried even where the simulator would have to be far off..."""
CLOSE_S = 3e-3
"""... and in either case, plans within this time are close: the simulator does not know what Python costs."""
MOST_TRIED = 2
"""How many plans are tried, besides the guards."""


@dataclass(frozen=True)
class Candidate:
    """A plan, and how its gradients are grouped and land."""

    plan: Plan
    packing: Packing
    is_guard: bool = False
    """Tried even if it is predicted to be slower, so that nothing slower than it is kept: the planner's own choice,
    torch's and, under deferred landing, the wrapper's."""
    full: str = ""
    """The route of all full gradients; empty where units differ."""

    @property
    def name(self) -> str:
        """The plan's name."""
        return self.plan.name


@dataclass(frozen=True)
class _Style:
    name: str
    full: str
    """The route of full gradients."""
    least_gain: float
    """Least gain in time for which a unit takes a short form."""
    is_even: bool = False
    is_guard: bool = False


def make_candidates(
    model: Model,
    order: Sequence[int],
    loads: Mapping[str, Load],
    routes: Routes,
    overrides: Mapping[str, str] | None,
    best: Plan,
    packing: Packing,
    fulls: Sequence[str],
    keeps_forms: bool = False,
) -> tuple[Candidate, ...]:
    """Return the plans to choose from; the first is ``best``, the planner's choice unit by unit, packed by ``packing``.

    ``order`` is that of the schedule: two plans that send the same items are one. ``fulls`` names the routes that may
    carry all full gradients, the collective first. With ``keeps_forms`` the same units take short forms in all plans.
    """
    styles = [_Style(AS_TORCH, fulls[0], math.inf, is_even=True, is_guard=True)]
    for full in fulls:
        styles += [
            _Style(f"{full} alone", full, math.inf),
            # By collectives, it is what the planner offers without deferred landing between GPUs.
            _Style(f"{full} and short forms", full, 1.0, is_guard=packing.defers and full == fulls[0]),
            _Style(f"{full} and the best short forms", full, LARGE_GAIN),
        ]
    forced = [find_forced(unit, overrides or {}, routes.for_unit(unit)) is not None for unit in model.units]
    found = [Candidate(best, packing, is_guard=True)]
    for style in styles:
        entries = tuple(
            entry if is_forced else _restyled(entry, unit, style, routes, loads, best)
            for unit, entry, is_forced in zip(model.units, best.entries, forced, strict=True)
        )
        plan = replace(best, entries=entries, name=style.name)
        found.append(Candidate(plan, replace(packing, is_even=style.is_even), style.is_guard, style.full))
    if packing.defers:
        at_once = [
            replace(one, plan=replace(one.plan, name=one.name + AT_ONCE), packing=replace(one.packing, defers=False))
            for one in found
        ]
        # Torch's class has no other way to land, and what lands late is no guard but for the planner's choice.
        late = [replace(one, is_guard=one.plan is best) for one in found if one.name != AS_TORCH]
        found = late + at_once
    distinct: dict[object, Candidate] = {}
    for one in found:
        if keeps_forms and _forms(one.plan, routes) != _forms(best, routes):
            continue
        made = make_schedule(model, list(one.plan.routes.values()), order, routes, one.packing, loads)
        sent = tuple((item.route, item.parameters) for item in made.items)
        first = distinct.setdefault((sent, one.packing.defers), one)
        if one.is_guard:
            distinct[sent, one.packing.defers] = replace(first, is_guard=True)
    return tuple(distinct.values())


def _forms(plan: Plan, routes: Routes) -> list[str]:
    return [routes[entry.route].delivers for entry in plan.entries]


def _restyled(
    entry: PlanEntry, unit: Unit, style: _Style, routes: Routes, loads: Mapping[str, Load], best: Plan
) -> PlanEntry:
    """Return the decision for a unit in a plan of this style."""
    full = routes[style.full]
    cost = full.cost(unit, loads.get(unit.name), best.cluster) if full.accepts(unit) else None
    if cost is None:
        return entry  # a sparse gradient has one route only
    is_short = routes[entry.route].delivers != "gradients"
    if is_short and cost.seconds >= style.least_gain * entry.cost.seconds:
        return entry
    if entry.route == full.name:
        return entry
    why = "the plan as a whole decided"
    return replace(entry, route=full.name, why=why, costs={**entry.costs, full.name: cost})


def shortlist(candidates: Sequence[Candidate], predicted_s: Sequence[float]) -> list[int]:
    """Return which candidates to try, the best prediction first; a single one if it is clearly the best.

    Each route of full gradients has a guard, the best of its plans: times that were taken with one of them hold less
    for another, which leaves other work to device and processors.
    """
    ranked = sorted(range(len(candidates)), key=lambda number: predicted_s[number])
    best_s = predicted_s[ranked[0]]

    def is_close(number: int, factor: float) -> bool:
        return predicted_s[number] <= max(factor * best_s, best_s + CLOSE_S)

    tried = [number for number in ranked[:MOST_TRIED] if is_close(number, CLOSE)]
    firsts = {candidates[number].full: number for number in reversed(ranked) if candidates[number].full}
    guards = [
        number
        for number in ranked
        if (candidates[number].is_guard or number in firsts.values()) and is_close(number, GUARD_CLOSE)
    ]
    return list(dict.fromkeys(tried + guards))
