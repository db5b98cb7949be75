"""Explains a prediction: what limits a step, and which changes would help most, each with its predicted effect."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from poseidon.planning.cluster import format_rate
from poseidon.sim.media import MEDIA
from poseidon.sim.outcome import Outcome
from poseidon.sim.setting import Setting
from poseidon.sim.steps import simulate
from poseidon.sim.systems import SYSTEMS

STANDARD_RATES = (1e9, 2.5e9, 5e9, 10e9, 25e9, 40e9, 100e9)
WORTH = 0.03
"""Changes that gain less than this are not listed."""


@dataclass(frozen=True)
class Change:
    """A possible change and its predicted effect."""

    what: str
    samples_per_s: float
    gain: float
    """Samples per second, relative to today's."""


@dataclass(frozen=True)
class Explanation:
    """A prediction with its reasons."""

    outcome: Outcome
    limit: str
    """compute, wire, latency, slow machine or link inside (a machine)."""
    reason: str
    changes: tuple[Change, ...]
    """The most helpful first."""


def explain(setting: Setting) -> Explanation:
    """Simulate as is, without each possible limit, and with each possible change."""
    outcome = simulate(setting)
    limit, reason = _find_limit(setting, outcome)
    changes = [
        Change(what, other.samples_per_s, other.samples_per_s / outcome.samples_per_s)
        for what, other in ((what, simulate(changed)) for what, changed in _options(setting))
    ]
    helpful = [change for change in changes if change.gain > 1 + WORTH]
    helpful.sort(key=lambda change: -change.gain)
    return Explanation(outcome, limit, reason, tuple(helpful))


def _find_limit(setting: Setting, outcome: Outcome) -> tuple[str, str]:
    ideal = MEDIA["ideal"]
    between = setting.cluster.between
    free = replace(between, bits_per_s=between.bits_per_s * 1e6)
    without = {
        "wire": replace(
            setting, cluster=replace(setting.cluster, between=free), collectives=ideal, messages=ideal,
            switch_bits_per_s=math.inf, staging_bytes_per_s=math.inf,
        ),
        "latency": replace(setting, cluster=replace(setting.cluster, between=replace(between, latency_s=0.0))),
        "slow machine": replace(setting, slowdowns=(), link_shares=(), straggle=0.0),
    }  # fmt: skip
    if setting.cluster.workers_per_machine > 1:
        inside = replace(setting.cluster.inside, bits_per_s=setting.cluster.inside.bits_per_s * 1e6)
        without["link inside"] = replace(setting, cluster=replace(setting.cluster, inside=inside, shared=inside))
    gains = {name: outcome.step_s - simulate(changed).step_s for name, changed in without.items()}
    name = max(gains, key=lambda each: gains[each])
    share = gains[name] / outcome.step_s
    if share < WORTH:
        return "compute", "the exchange is hidden behind computation almost completely"
    text = {
        "wire": f"it costs {share:.0%} of a step, and is busy {outcome.busy_s / outcome.step_s:.0%} of it",
        "latency": f"{share:.0%} of a step waits for small messages to arrive",
        "slow machine": f"{share:.0%} of a step waits for the slowest machine",
        "link inside": f"{share:.0%} of a step waits for what the workers of a machine send each other",
    }
    return name, text[name]


def _options(setting: Setting) -> Iterator[tuple[str, Setting]]:
    cluster, profile = setting.cluster, setting.profile
    faster = [rate for rate in STANDARD_RATES if rate > cluster.between.bits_per_s * 1.1]
    if cluster.machines > 1:
        if faster:
            yield f"{format_rate(faster[0])} links", setting.with_rate(faster[0])
        if not setting.system.overlaps_forward:
            overlapped = replace(setting, system=SYSTEMS["distribute"])
            yield "poseidon.distribute, which lets the exchange run into the next forward", overlapped
        yield (
            "gradients in bf16 on the wire (lossy, so opt-in)",
            replace(setting, wire_share=setting.wire_share / 2),
        )
    yield f"batch {2 * profile.batch} per worker", replace(setting, profile=profile.with_batch(2 * profile.batch))
    twice = replace(cluster, workers_per_machine=2 * cluster.workers_per_machine)
    yield f"{twice.workers_per_machine} workers per machine (as many devices)", replace(setting, cluster=twice)


def format_explanation(explanation: Explanation) -> str:
    """Return the lines that ``poseidon plan`` ends with."""
    outcome = explanation.outcome
    workers = f"{outcome.workers} worker{'s' * (outcome.workers > 1)}"
    lines = [
        f"predicted: {outcome.step_s * 1e3:.4g} ms per step on {workers}, {outcome.samples_per_s:.4g} samples/s, "
        f"speedup {outcome.speedup:.2f} (one worker alone: {outcome.compute_s * 1e3:.4g} ms)"
    ]
    if outcome.workers == 1:
        return lines[0]
    lines.append(f"limit: {explanation.limit}; {explanation.reason}")
    if not explanation.changes:
        lines.append("no simulated change would help by more than 3 %")
        return "\n".join(lines)
    lines.append("what would help most:")
    for change in explanation.changes:
        lines.append(f"  {change.what}: {change.samples_per_s:.4g} samples/s, {change.gain:.2f} times today's")
    return "\n".join(lines)
