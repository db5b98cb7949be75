"""Who is slow, and why: from the workers' records to one line and a next step. Pure.

In lockstep everybody takes the same time for a step. What differs is how much of it a worker waits. The one that
others wait for waits least itself: a straggler, by its own time in forward, backward or between steps. If all wait and
none is slower, they wait for the wire; the connection that is slow while it is in use shows which. If nobody waits,
computation is the limit, or input.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from poseidon.observe.links import LinkUse
from poseidon.observe.records import Record
from poseidon.observe.steps import BETWEEN
from poseidon.observe.windows import PHASE_WORDS, Window, add_uses, is_training

HANGS_S = 1.5
"""A worker that moves so little and does not wait, while others wait for it, is named."""
SLOW_STEPS = 8
"""And it must have taken this many usual steps."""
CLEAR_EXCESS = 0.10
WEAK_EXCESS = 0.06
"""Of a step: what a straggler takes longer than the others."""
CLEAR_WAIT = 0.15
"""Of a step: waiting that makes the wire the limit."""
WEAK_WAIT = 0.05
"""Of a step: waiting that is worth a word where a link loses packets, which costs much in one second and little in the
next."""
INPUT_SHARE = 0.25
"""Of a step: time between steps, without the optimizer, that makes input the limit."""
SLOW_LINK = 0.6
"""Of the other machines' rate: below it, a link is slow."""
LOSSY_SHARE = 0.01
"""Of what is sent: sent again."""
MOST_LOSS = 0.2
"""Of what is sent: no cable loses more for long; a queue that is too small for a slow link does."""
BUSY_PART = 0.5
"""Of what a straggler takes longer: waiting for a processor."""
STARVED = 0.15
"""Of the time: if training threads wait this much for a processor everywhere, other figures say little."""
STEADY = 0.7
"""Share of the records in which a straggler must be the slowest."""


class Cause(Enum):
    """What limits a job."""

    STARTING = "starting"
    HUNG = "hung"
    SILENT = "silent"
    STALLS = "stalls"
    BUSY = "busy"
    SLOW = "slow"
    INPUT = "input"
    LINK = "link"
    LOSS = "loss"
    WIRE = "wire"
    COMPUTATION = "computation"
    UNCLEAR = "unclear"


@dataclass(frozen=True)
class JobVerdict:
    """What limits a job now."""

    cause: Cause
    text: str
    next_step: str = ""
    host: str = ""
    """The machine to look at; empty: all alike."""
    rank: int | None = None
    is_sure: bool = False
    waited_s: float = 0.0
    """What the others have waited for it in the window, each."""

    def __str__(self) -> str:
        doubt = "" if self.is_sure or self.cause in (Cause.STARTING, Cause.UNCLEAR) else "probably "
        return f"{doubt}{self.text}" + (f": {self.next_step}" if self.next_step else "")


def judge(windows: Sequence[Window], line_rate: float = 0.0) -> JobVerdict:
    """Return what limits the job; ``line_rate`` is what a link can carry, in bits per second, if known."""
    if not windows or not any(is_training(window) for window in windows):
        return JobVerdict(Cause.STARTING, "starting: no step yet")
    stuck = _find_stuck(windows)
    if stuck is not None:
        return stuck
    moving = [window for window in windows if is_training(window) and window.steps]
    if len(moving) < len(windows) or min(window.steps for window in moving) < 2:
        return JobVerdict(Cause.UNCLEAR, "not clear yet: too few steps were seen")
    stalled = _find_stalls(moving)
    if stalled is not None:
        return stalled
    step_s = statistics.median(window.step_s for window in moving)
    base_wait = min(window.per_step("wait_s") for window in moving) / step_s
    starved = statistics.median(window.total("delay_s") / window.span_s for window in moving)
    found = _find_straggler(moving, step_s, starved)
    if found is not None and (found[1] >= base_wait or (starved > STARVED and found[0].is_sure)):
        return found[0]
    if starved > STARVED and (base_wait < CLEAR_WAIT or len({window.host for window in moving}) == 1):
        return _blame_processors(moving, starved)
    if base_wait >= CLEAR_WAIT and len(moving) > 1:
        return _blame_wire(moving, step_s, line_rate, starved)
    if found is not None:
        return found[0]
    return _judge_even(moving, step_s)


# One worker stands.


def _find_stuck(windows: Sequence[Window]) -> JobVerdict | None:
    """Name the worker that has stopped while the others wait, or that says nothing at all."""
    if not all(window.records for window in windows):
        return None
    usual_s = statistics.median(window.usual_s for window in windows)
    limit_s = max(HANGS_S, SLOW_STEPS * usual_s)
    silent = [window for window in windows if window.silent_s > limit_s]
    if silent and len(silent) < len(windows):
        one = max(silent, key=lambda window: window.silent_s)
        return JobVerdict(
            Cause.SILENT,
            f"worker {one.rank} on {one.host} has said nothing for {one.silent_s:.0f} s: it is stopped, or its "
            "machine is out of reach",
            f"look at {one.host}",
            one.host,
            one.rank,
            is_sure=True,
            waited_s=one.silent_s,
        )
    if any(not is_training(window) for window in windows):
        return None
    standing = [window for window in windows if window.last.doing_s > limit_s and not window.last.waits_for]
    waiting = [window for window in windows if window.last.waits_for]
    if not standing or (len(windows) > 1 and not waiting):
        return None
    one = max(standing, key=lambda window: window.last.doing_s)
    last = one.last
    where = f", {last.where}" if last.where else ""
    whom = f"; {len(waiting)} wait for it" if waiting else ""
    # Alone it may be any long work: nobody waits for it.
    return JobVerdict(
        Cause.HUNG,
        f"worker {one.rank} on {one.host} has not moved for {last.doing_s:.0f} s: it is {_moment(last)}{where}{whom}",
        "its calls are in the run's events" if last.doing_s > 6 else "",
        one.host,
        one.rank,
        is_sure=bool(waiting) and len(standing) == 1,
        waited_s=last.doing_s,
    )


def _moment(record: Record) -> str:
    """Return where in its steps a worker is, in words."""
    if record.doing == BETWEEN:
        return f"between steps {record.step} and {record.step + 1}"
    return f"{PHASE_WORDS[record.doing]} of step {record.step}"


def _find_stalls(windows: Sequence[Window]) -> JobVerdict | None:
    stalled = {window.rank: window.total("stalled_s") / max(window.span_s, 1e-9) for window in windows}
    first, *others = sorted(windows, key=lambda window: -stalled[window.rank])
    share = stalled[first.rank]
    if share < 0.1 or (others and stalled[others[0].rank] > 0.5 * share):
        return None
    faults = int(first.total("faults"))
    why = f"; it read {faults} pages from disk: it swaps" if faults > 50 else ""
    return JobVerdict(
        Cause.STALLS,
        f"{first.host} stands still for {first.total('stalled_s'):.1f} of {first.span_s:.0f} s{why}",
        "look for swapping, a paused virtual machine, or a stopped process there",
        first.host,
        first.rank,
        is_sure=True,
        waited_s=first.total("stalled_s"),
    )


# One worker is slower than the others.


def _find_straggler(windows: Sequence[Window], step_s: float, starved: float) -> tuple[JobVerdict, float] | None:
    """Return the worker that takes longer by itself than the others, and by which share of a step."""
    if len(windows) < 2:
        return None
    slow = max(windows, key=lambda window: window.own_s)
    others = [window for window in windows if window is not slow]
    excess_s = slow.own_s - statistics.median(window.own_s for window in others)
    share = excess_s / step_s
    if share < WEAK_EXCESS:
        return None
    waited_s = statistics.median(window.total("wait_s") for window in others) - slow.total("wait_s")
    steadiness = _steadiness(slow, others)
    # Several workers of its machine may be slow with it; a second machine as slow makes it unclear which one to mend.
    rivals = [one for one in others if one.host != slow.host and slow.own_s - one.own_s < 0.3 * excess_s]
    is_sure = share >= CLEAR_EXCESS + min(starved, 0.3) / 2 and steadiness >= STEADY and not rivals and waited_s > 0
    parts = {
        "forward": _excess(slow, others, "forward_s"),
        "backward": _excess(slow, others, "backward_s"),
        "between": _excess(slow, others, "between_s"),
    }
    part = max(parts, key=lambda name: parts[name])
    if part == "between" and not (slow.last.is_async and _main_place(slow) not in ("input", "optimizer")):
        verdict = _blame_input(slow, parts[part], is_sure, waited_s)
    else:
        verdict = _blame_machine(slow, others, part, parts, is_sure, waited_s)
    return verdict, share


def _steadiness(slow: Window, others: Sequence[Window]) -> float:
    """Return in which share of the last records a worker was the slowest by its own time."""
    counted = slowest = 0
    for back in range(1, len(slow.records) + 1):
        rows = [window.records[-back] for window in (slow, *others) if len(window.records) >= back]
        if len(rows) <= len(others):
            break
        own = [(row.span_s - row.wait_s) / row.span_s if row.span_s else 0.0 for row in rows]
        counted += 1
        slowest += own[0] >= max(own[1:]) - 1e-9
    return slowest / counted if counted else 0.0


def _excess(slow: Window, others: Sequence[Window], name: str) -> float:
    return slow.per_step(name) - statistics.median(window.per_step(name) for window in others)


def _blame_input(slow: Window, excess_s: float, is_sure: bool, waited_s: float) -> JobVerdict:
    place = _main_place(slow)
    if place == "optimizer":
        return JobVerdict(
            Cause.SLOW,
            f"limited by {slow.host}, whose optimizer takes {_ms(excess_s)} a step longer than the others'",
            f"look what else runs on {slow.host}",
            slow.host,
            slow.rank,
            is_sure,
            waited_s,
        )
    where = f", mostly in {place}" if place not in ("", "input", "a library") else ""
    return JobVerdict(
        Cause.INPUT,
        f"limited by input on {slow.host}: worker {slow.rank} takes {_ms(excess_s)} a step longer than the others "
        f"between optimizer and forward{where}",
        "use more loader workers, or a faster disk there",
        slow.host,
        slow.rank,
        is_sure,
        waited_s,
    )


def _blame_machine(
    slow: Window,
    others: Sequence[Window],
    part: str,
    parts: Mapping[str, float],
    is_sure: bool,
    waited_s: float,
) -> JobVerdict:
    usual_s = statistics.median(window.per_step(f"{part}_s") for window in others)
    times = (usual_s + parts[part]) / usual_s if usual_s > 1e-6 else 0.0
    both = all(parts[name] > 0.25 * parts[part] for name in ("forward", "backward"))
    what = "forward and backward" if both else part if part != "between" else "the time between steps"
    ratio = f"{times:.1f}x slower in {what}" if 1.0 < times < 100 else f"{_ms(parts[part])} a step slower in {what}"
    shares = any(window.host == slow.host for window in others)
    who = f"worker {slow.rank} on {slow.host}" if shares else slow.host
    # Held against what it takes longer, not against a step: a worker may need a processor only now and then.
    longer_s = slow.own_s - statistics.median(window.own_s for window in others)
    if _excess(slow, others, "delay_s") > BUSY_PART * longer_s:
        delay = slow.total("delay_s") / max(1e-9, slow.own_s * slow.steps)
        return JobVerdict(
            Cause.BUSY,
            f"limited by {who}, {ratio}: its training thread waits for a processor {delay:.0%} of the time",
            f"see what else runs on {slow.host} (top)",
            slow.host,
            slow.rank,
            is_sure,
            waited_s,
        )
    return JobVerdict(
        Cause.SLOW,
        f"limited by {who}, {ratio}",
        "check its clock rate, cooling and power, or give it a smaller share of the batch (--balance)",
        slow.host,
        slow.rank,
        is_sure,
        waited_s,
    )


# All wait.


def _blame_processors(windows: Sequence[Window], starved: float) -> JobVerdict:
    hosts = {window.host for window in windows}
    where = next(iter(hosts)) if len(hosts) == 1 else "all machines"
    return JobVerdict(
        Cause.BUSY,
        f"limited by the processors of {where}: training threads wait for one {starved:.0%} of the time",
        "run fewer workers or threads there, or see what else runs (top)",
        where if len(hosts) == 1 else "",
        is_sure=starved > 2 * STARVED,
        waited_s=starved * windows[0].span_s,
    )


@dataclass(frozen=True)
class _Ends:
    """A machine's links, in both directions, while in use."""

    host: str
    rate: float
    """Bits per second."""
    busy: float
    """Share of the time."""
    resent: float
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


def _machine_ends(windows: Sequence[Window]) -> list[_Ends]:
    uses = link_uses(windows)
    span_s = statistics.median(window.span_s for window in windows)
    found = []
    for host in dict.fromkeys(window.host for window in windows):
        mine = [use for pair, use in uses.items() if host in pair and use.sent_bytes > 1000]
        rates = [8 * use.sent_bytes / use.busy_s for use in mine if use.busy_s > 0.005 * span_s]
        if not rates:
            continue
        found.append(
            _Ends(
                host,
                # The best of its links, in either direction: one slow link shows on both of its ends, and only the
                # machine all of whose links are slow is to blame.
                max(rates),
                max(use.busy_s for use in mine) / max(span_s, 1e-9),
                sum(use.resent_bytes for pair, use in uses.items() if pair[0] == host)
                / max(1, sum(use.sent_bytes for pair, use in uses.items() if pair[0] == host)),
                max(use.rtt_s for use in mine),
            )
        )
    return found


def _blame_wire(windows: Sequence[Window], step_s: float, line_rate: float, starved: float) -> JobVerdict:
    wait_s = statistics.median(window.per_step("wait_s") for window in windows)
    unit, unit_s = _longest_wait(windows)
    waits = f"{unit} waits {_ms(unit_s)} a step" if unit else f"workers wait {_ms(wait_s)} a step"
    ends = _machine_ends(windows)
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
    lossy = _find_lossy(ends)
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
            and not (is_lossy and any(one.resent > slow.resent for one in others))
            and wait_s / step_s > 2 * CLEAR_WAIT
            and slow.busy > CLEAR_WAIT,
            waited_s=waited_s,
        )
    if lossy is not None:
        is_sure = lossy.resent > 2 * LOSSY_SHARE and (not is_slow or slow is lossy)
        return _blame_loss(windows, lossy, waits, waited_s, is_sure)
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


def _find_lossy(ends: Sequence[_Ends]) -> _Ends | None:
    """Return the machine that sends far more again than the others."""
    lossy = max(ends, key=lambda one: one.resent)
    usual = statistics.median(one.resent for one in ends if one is not lossy)
    return lossy if lossy.resent > max(LOSSY_SHARE, 3 * usual) else None


def _blame_loss(windows: Sequence[Window], lossy: _Ends, waits: str, waited_s: float, is_sure: bool) -> JobVerdict:
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


# Nobody waits, or little.


def _judge_even(windows: Sequence[Window], step_s: float) -> JobVerdict:
    loop_s = statistics.median(window.per_step("between_s") * (1 - window.optimizer_share) for window in windows)
    wait_s = statistics.median(window.per_step("wait_s") for window in windows)
    ends = _machine_ends(windows)
    lossy = _find_lossy(ends) if len(ends) > 1 and wait_s / step_s >= WEAK_WAIT else None
    if lossy is not None and lossy.resent > 2 * LOSSY_SHARE:
        waited_s = wait_s * max(window.steps for window in windows)
        return _blame_loss(windows, lossy, f"workers wait {_ms(wait_s)} a step", waited_s, is_sure=False)
    is_async = any(window.last.is_async for window in windows)
    places = [_main_place(window) for window in windows]
    if loop_s / step_s >= INPUT_SHARE and not (is_async and "input" not in places):
        place = statistics.mode(places)
        where = f", mostly in {place}" if place not in ("", "input", "optimizer", "a library") else ""
        return JobVerdict(
            Cause.INPUT,
            f"limited by input on all machines: {_ms(loop_s)} of a step's {_ms(step_s)} go by between optimizer and "
            f"forward{where}",
            "use more loader workers",
            is_sure=loop_s / step_s > 1.5 * INPUT_SHARE,
        )
    share = wait_s / step_s
    gain = (
        "nothing to gain from a faster network" if share < 0.05 else f"a faster network would gain at most {share:.0%}"
    )
    return JobVerdict(
        Cause.COMPUTATION,
        f"limited by computation: {1 - share:.0%} of a step's {_ms(step_s)} compute",
        gain,
        is_sure=share < 0.8 * CLEAR_WAIT and lossy is None,
    )


def _main_place(window: Window) -> str:
    places = {place: count for place, count in window.places.items() if place != "optimizer"}
    if not places or (window.optimizer_share > 0.7):
        return "optimizer" if window.optimizer_share > 0 else ""
    return max(places, key=lambda place: places[place])


def _rank_on(windows: Sequence[Window], host: str) -> int:
    return next(window.rank for window in windows if window.host == host)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _mbit(rate: float) -> str:
    return f"{rate / 1e6:.0f}" if rate >= 1e7 else f"{rate / 1e6:.1f}"
