"""Who is slow, and why: from the workers' records to one line and a next step. Pure.

In lockstep everybody takes the same time for a step. What differs is how much of it a worker waits. The one that
others wait for waits least itself: a straggler, by its own time in forward, backward or between steps. If all wait and
none is slower, they wait for the wire; the connection that is slow while it is in use shows which. If nobody waits,
computation is the limit, or input.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from poseidon.observe.causes import STARVED, STEADY, Cause, JobVerdict, as_ms
from poseidon.observe.records import Record
from poseidon.observe.steps import BETWEEN
from poseidon.observe.windows import PHASE_WORDS, Window, is_training
from poseidon.observe.wire_verdict import CLEAR_WAIT, LOSSY_SHARE, blame_loss, blame_wire, find_lossy, machine_ends

HANGS_S = 1.5
"""A worker that moves so little and does not wait, while others wait for it, is named."""
SLOW_STEPS = 8
"""And it must have taken this many usual steps."""
CLEAR_EXCESS = 0.10
WEAK_EXCESS = 0.06
"""Of a step: what a straggler takes longer than the others."""
WEAK_WAIT = 0.05
"""Of a step: waiting that is worth a word where a link loses packets, which costs much in one second and little in the
next."""
INPUT_SHARE = 0.25
"""Of a step: time between steps, without the optimizer, that makes input the limit."""
BUSY_PART = 0.5
"""Of what a straggler takes longer: waiting for a processor."""


def judge(windows: Sequence[Window], line_rate: float = 0.0) -> JobVerdict:
    """Return what limits the job; ``line_rate`` is what a link can carry, in bits per second, if known."""
    if not windows or not any(is_training(window) for window in windows):
        return JobVerdict(Cause.STARTING, "starting: no step yet")
    silent = _find_silent(windows)
    unheard = [window for window in silent if not _is_heard(window, [one for one in windows if one not in silent])]
    if unheard:
        return _blame_silent(max(unheard, key=lambda window: window.silent_s))
    verdict = _judge_heard(windows, line_rate)
    # What a worker did while nothing of it arrived is not known.
    return replace(verdict, is_sure=False) if silent else verdict


def _judge_heard(windows: Sequence[Window], line_rate: float) -> JobVerdict:
    """Return what limits a job of which all workers are heard, by the launcher or by each other."""
    hung = _find_hung(windows)
    if hung is not None:
        return hung
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
        return blame_wire(moving, step_s, line_rate, starved)
    if found is not None:
        return found[0]
    return _judge_even(moving, step_s)


# One worker stands.


def _limit_s(windows: Sequence[Window]) -> float:
    return max(HANGS_S, SLOW_STEPS * statistics.median(window.usual_s for window in windows))


def _find_silent(windows: Sequence[Window]) -> list[Window]:
    """Return the workers that say nothing while others do."""
    if not all(window.records for window in windows):
        return []
    limit_s = _limit_s(windows)
    silent = [window for window in windows if window.silent_s > limit_s]
    return silent if len(silent) < len(windows) else []


def _is_heard(one: Window, others: Sequence[Window]) -> bool:
    """Whether others receive something from a worker of which nothing arrives here.

    Then it lives, and what it says is late: the launcher's link, or its own, may be too slow for it.
    """
    ip = one.last.ip
    return any(ip in other.last.links and other.last.links[ip].received_bytes > 0 for other in others)


def _blame_silent(one: Window) -> JobVerdict:
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


def _find_hung(windows: Sequence[Window]) -> JobVerdict | None:
    """Name the worker that has stopped while the others wait."""
    if not all(window.records for window in windows):
        return None
    limit_s = _limit_s(windows)
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
            f"limited by {slow.host}, whose optimizer takes {as_ms(excess_s)} a step longer than the others'",
            f"look what else runs on {slow.host}",
            slow.host,
            slow.rank,
            is_sure,
            waited_s,
        )
    where = f", mostly in {place}" if place not in ("", "input", "a library") else ""
    return JobVerdict(
        Cause.INPUT,
        f"limited by input on {slow.host}: worker {slow.rank} takes {as_ms(excess_s)} a step longer than the others "
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
    ratio = f"{times:.1f}x slower in {what}" if 1.0 < times < 100 else f"{as_ms(parts[part])} a step slower in {what}"
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


# Nobody waits, or little.


def _judge_even(windows: Sequence[Window], step_s: float) -> JobVerdict:
    loop_s = statistics.median(window.per_step("between_s") * (1 - window.optimizer_share) for window in windows)
    wait_s = statistics.median(window.per_step("wait_s") for window in windows)
    ends = machine_ends(windows)
    lossy = find_lossy(ends) if len(ends) > 1 and wait_s / step_s >= WEAK_WAIT else None
    if lossy is not None and lossy.resent > 2 * LOSSY_SHARE:
        waited_s = wait_s * max(window.steps for window in windows)
        return blame_loss(windows, lossy, f"workers wait {as_ms(wait_s)} a step", waited_s, is_sure=False)
    is_async = any(window.last.is_async for window in windows)
    places = [_main_place(window) for window in windows]
    if loop_s / step_s >= INPUT_SHARE and not (is_async and "input" not in places):
        place = statistics.mode(places)
        where = f", mostly in {place}" if place not in ("", "input", "optimizer", "a library") else ""
        return JobVerdict(
            Cause.INPUT,
            f"limited by input on all machines: {as_ms(loop_s)} of a step's {as_ms(step_s)} go by between optimizer "
            f"and forward{where}",
            "use more loader workers",
            is_sure=loop_s / step_s > 1.5 * INPUT_SHARE,
        )
    share = wait_s / step_s
    gain = (
        "nothing to gain from a faster network" if share < 0.05 else f"a faster network would gain at most {share:.0%}"
    )
    return JobVerdict(
        Cause.COMPUTATION,
        f"limited by computation: {1 - share:.0%} of a step's {as_ms(step_s)} compute",
        gain,
        is_sure=share < 0.8 * CLEAR_WAIT and lossy is None,
    )


def _main_place(window: Window) -> str:
    places = {place: count for place, count in window.places.items() if place != "optimizer"}
    if not places or (window.optimizer_share > 0.7):
        return "optimizer" if window.optimizer_share > 0 else ""
    return max(places, key=lambda place: places[place])
