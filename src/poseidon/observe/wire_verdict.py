"""What is said of the wire: which machine's link is slow or loses packets, if workers wait and none is slower. Pure.

The connection that is slow while it is in use shows which one to mend.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from poseidon.observe.causes import STARVED, STEADY, Cause, JobVerdict, as_ms
from poseidon.observe.links import LinkUse
from poseidon.observe.windows import Window, add_uses

CLEAR_WAIT = 0.15
"""Of a step: waiting that makes the wire the limit."""
SLOW_LINK = 0.6
"""Of the other machines' rate: below it, a link is slow."""
LOSSY_SHARE = 0.01
"""Of what is sent: sent again."""
TO_ONE = 0.8
"""Of what a machine sends again, to a single one of several: that one's link may lose it as well."""
MOST_LOSS = 0.2
"""Of what is sent: no cable loses more for long; a queue that is too small for a slow link does."""


@dataclass(frozen=True)
class MachineEnds:
    """A machine's links, in both directions, while in use."""

    host: str
    rate: float
    """Bits per second."""
    busy: float
    """Share of the time."""
    resent: float
    """Of what it sends."""
    to_one: float
    """Of what it sends again: to the machine that gets most of it. If that is nearly all, its own link may be sound."""
    rtt_s: float


def link_uses(windows: Sequence[Window]) -> dict[tuple[str, str], LinkUse]:
    """Return the traffic between machines, by the names of sender and receiver."""
    hosts = {window.last.ip: window.host for window in windows if window.last.ip}
    found: dict[tuple[str, str], LinkUse] = {}
    for window in windows:
        for peer, use in window.links.items():
            there = hosts.get(peer)
            if there is not None and there != window.host:
                key = window.host, there
                found[key] = add_uses(found.get(key, LinkUse()), use)
    return found


def machine_ends(windows: Sequence[Window]) -> list[MachineEnds]:
    """Return the links of every machine that were in use."""
    uses = link_uses(windows)
    span_s = statistics.median(window.span_s for window in windows)
    found = []
    for host in dict.fromkeys(window.host for window in windows):
        mine = [use for pair, use in uses.items() if host in pair and use.sent_bytes > 1000]
        rates = [8 * use.sent_bytes / use.busy_s for use in mine if use.busy_s > 0.005 * span_s]
        if not rates:
            continue
        sent = [use for pair, use in uses.items() if pair[0] == host]
        again = [use.resent_bytes for use in sent]
        found.append(
            MachineEnds(
                host,
                # The best of its links, in either direction: one slow link shows on both of its ends, and only the
                # machine all of whose links are slow is to blame.
                max(rates),
                max(use.busy_s for use in mine) / max(span_s, 1e-9),
                sum(again) / max(1, sum(use.sent_bytes for use in sent)),
                max(again) / max(1, sum(again)) if len(again) > 1 else 0.0,
                max(use.rtt_s for use in mine),
            )
        )
    return found


def blame_wire(windows: Sequence[Window], step_s: float, line_rate: float, starved: float) -> JobVerdict:
    """Return which link workers wait for, or that all are alike."""
    wait_s = statistics.median(window.per_step("wait_s") for window in windows)
    unit, unit_s = _longest_wait(windows)
    waits = f"{unit} waits {as_ms(unit_s)} a step" if unit else f"workers wait {as_ms(wait_s)} a step"
    ends = machine_ends(windows)
    waited_s = wait_s * max(window.steps for window in windows)
    if len({window.host for window in windows}) == 1:
        return JobVerdict(
            Cause.WIRE,
            f"limited by the exchange inside {windows[0].host}: {waits}, {wait_s / step_s:.0%} of it",
            "a larger batch would help",
            windows[0].host,
            is_sure=wait_s / step_s > 2 * CLEAR_WAIT and starved < STARVED / 2,
            waited_s=waited_s,
        )
    if len(ends) < 2:
        return JobVerdict(
            Cause.WIRE,
            f"limited by the wire: {waits}, {wait_s / step_s:.0%} of it",
            "a larger batch, or a faster network, would help",
            is_sure=wait_s / step_s > 2 * CLEAR_WAIT and starved < STARVED,
            waited_s=waited_s,
        )
    slow = min(ends, key=lambda one: one.rate)
    others = [one for one in ends if one is not slow]
    usual = statistics.median(one.rate for one in others)
    lossy = find_lossy(ends)
    is_slow = slow.rate < SLOW_LINK * usual and len(others) > 1
    is_clear = is_slow and slow.rate < 0.8 * SLOW_LINK * usual
    # What is lost also slows the connections on which it is: of two weak signs, the loss says more.
    if is_slow and (is_clear or lossy is None or lossy.resent < 2 * LOSSY_SHARE):
        # A link that is merely slow drops what its queue cannot hold, but then packets that do pass have waited in it.
        usual_rtt_s = statistics.median(one.rtt_s for one in others)
        is_lossy = LOSSY_SHARE < slow.resent < MOST_LOSS and slow.rtt_s < max(3e-3, 2 * usual_rtt_s)
        again = f", and sends {slow.resent:.1%} of its bytes again" if is_lossy else ""
        return JobVerdict(
            Cause.LOSS if is_lossy else Cause.LINK,
            f"limited by the wire: {waits} on {slow.host}'s link "
            f"({_mbit(slow.rate)} of the {_mbit(usual)} Mbit/s of the others){again}",
            f"check the cable, the switch port and the card of {slow.host}",
            slow.host,
            _rank_on(windows, slow.host),
            # Short bursts go into buffers at any rate: only a link that is in use for long has one. And whoever loses
            # acknowledgements makes its peers send again: the one that sends most again is the likelier one.
            is_sure=is_clear
            and _is_steady(windows, slow.host)
            and not (is_lossy and any(one.resent > slow.resent for one in others))
            and wait_s / step_s > 2 * CLEAR_WAIT
            and slow.busy > CLEAR_WAIT,
            waited_s=waited_s,
        )
    if lossy is not None:
        is_sure = lossy.resent > 2 * LOSSY_SHARE and lossy.to_one < TO_ONE and (not is_slow or slow is lossy)
        return blame_loss(windows, lossy, waits, waited_s, is_sure)
    reached = f"{_mbit(max(one.rate for one in ends))} Mbit/s"
    if line_rate:
        reached += f" of {_mbit(line_rate)}"
    return JobVerdict(
        Cause.WIRE,
        f"limited by the wire: {waits}; all links are alike and carry {reached} while in use",
        "a larger batch, or a faster network, would help",
        is_sure=wait_s / step_s > 2 * CLEAR_WAIT and slow.rate > 0.75 * usual and starved < STARVED,
        waited_s=waited_s,
    )


def _is_steady(windows: Sequence[Window], host: str) -> bool:
    """Whether a machine's links were the slowest nearly all the time.

    One that has just been mended was for a part of it, and while connections recover from losses any may be slow.
    """
    counted = slowest = 0
    for back in range(1, min(len(window.records) for window in windows) + 1):
        ends = machine_ends([replace(window, records=[window.records[-back]]) for window in windows])
        if len(ends) > 2:
            counted += 1
            slowest += min(ends, key=lambda one: one.rate).host == host
    return slowest >= STEADY * max(counted, 1)


def find_lossy(ends: Sequence[MachineEnds]) -> MachineEnds | None:
    """Return the machine that sends far more again than the others."""
    lossy = max(ends, key=lambda one: one.resent)
    usual = statistics.median(one.resent for one in ends if one is not lossy)
    return lossy if lossy.resent > max(LOSSY_SHARE, 3 * usual) else None


def blame_loss(windows: Sequence[Window], lossy: MachineEnds, waits: str, waited_s: float, is_sure: bool) -> JobVerdict:
    """Return that a machine loses packets."""
    return JobVerdict(
        Cause.LOSS,
        f"limited by the wire: {waits}, and {lossy.host} sends {min(1.0, lossy.resent):.1%} of its bytes again",
        f"check the cable and the switch port of {lossy.host}",
        lossy.host,
        _rank_on(windows, lossy.host),
        is_sure,
        waited_s,
    )


def _longest_wait(windows: Sequence[Window]) -> tuple[str, float]:
    """Return what is waited for longest in the median worker, other than for the others to come at all."""
    names = {name for window in windows for name in window.waits_s if not name.startswith("the others")}
    times = {
        name: statistics.median(window.waits_s.get(name, 0.0) / max(1, window.steps) for window in windows)
        for name in names
    }
    name = max(times, key=lambda one: times[one], default="")
    return (name, times[name]) if name and times[name] > 0 else ("", 0.0)


def _rank_on(windows: Sequence[Window], host: str) -> int:
    return next(window.rank for window in windows if window.host == host)


def _mbit(rate: float) -> str:
    return f"{rate / 1e6:.0f}" if rate >= 1e7 else f"{rate / 1e6:.1f}"
