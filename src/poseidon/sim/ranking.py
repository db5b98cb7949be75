"""Predicts a step of each of several whole plans of the model being trained, from times of one of its backwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from poseidon.planning.candidates import Candidate
from poseidon.planning.profile import Profile, UnitProfile
from poseidon.planning.route import Routes
from poseidon.planning.schedule import Schedule
from poseidon.planning.transfers import SentBits
from poseidon.sim.media import transports_of
from poseidon.sim.setting import Setting
from poseidon.sim.steps import simulate
from poseidon.sim.systems import SYSTEMS
from poseidon.sim.workload import plan_workload
from poseidon.units import Load

FORWARD_SHARE = 0.5
"""A forward takes about half as long as a backward, which computes two products where the forward computes one."""
_STEPS = 4
"""Simulated steps; the wire is in its steady state after two."""


@dataclass(frozen=True)
class Equipment:
    """What carries a team's gradients, as the predictions depend on it."""

    routes: Routes
    is_nccl: bool
    compacts: bool
    """Devices compact what goes through the parameter server."""
    cores: float
    """Cores of one worker."""
    uses_cores: bool
    """Workers compute on them; false where GPUs compute."""
    sharing: float = 1.0
    """Workers that share one device."""


def observed_profile(
    schedule: Schedule, ready_s: Mapping[int, float], loads: Mapping[str, Load], order: Sequence[int]
) -> Profile:
    """Return a profile from the times at which the items of one backward became ready.

    ``order`` holds the units in the order in which their gradients become final. Units that became ready together share
    the time since the ones before them.
    """
    model = schedule.model
    moments = [max(ready_s[schedule.item_of[p]] for p in model.parameters_of[unit]) for unit in order]
    backward_s = dict.fromkeys(order, 0.0)
    start, before_s = 0, 0.0
    for place in range(len(order)):
        is_last = place + 1 == len(order)
        if is_last or moments[place + 1] > max(moments[start : place + 1]):
            now_s = max(before_s, *moments[start : place + 1])
            together = order[start : place + 1]
            backward_s.update(dict.fromkeys(together, (now_s - before_s) / len(together)))
            start, before_s = place + 1, now_s
    units = tuple(
        UnitProfile(unit, loads.get(unit.name), FORWARD_SHARE * backward_s[number], backward_s[number])
        for number, unit in enumerate(model.units)
    )
    return Profile("observed", "", 1, units, tuple(reversed(order)), tuple(order), 0.0, source="observed")


def predict_s(candidate: Candidate, profile: Profile, equipment: Equipment, sent_bits: SentBits | None = None) -> float:
    """Return the time of one step with a plan; ``sent_bits``: what values took in the steps so far."""
    cluster = candidate.plan.cluster
    transports = transports_of(equipment.is_nccl, equipment.cores, equipment.uses_cores)
    setting = Setting(
        profile=profile,
        cluster=cluster,
        system=SYSTEMS["distribute" if candidate.packing.defers else "poseidon"],
        collectives=transports.collectives,
        messages=transports.messages,
        contention=transports.contention,
        issue_s=transports.issue_s,
        sharing=equipment.sharing,
        payload=1.0,  # programs measured the rate
        compacts=equipment.compacts,
        precision=_precision_of(profile),
        sent_bits=sent_bits or SentBits(),
        steps=_STEPS,
    )
    route_of = list(candidate.plan.routes.values())
    workload = plan_workload(setting, candidate.plan, route_of, equipment.routes, candidate.packing)
    return simulate(setting, workload=workload).step_s


def _precision_of(profile: Profile) -> str:
    """Return what gradients are computed in; fp16, which is rarer, counts as bf16."""
    is_half = any(unit.load is not None and unit.load.value_bytes == 2 for unit in profile.units)
    return "bf16" if is_half else "float32"
