"""Makes a worker's records and hands them on, on a thread of its own, without stopping the training thread."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from poseidon.observe.links import LinkMeter, LinkUse, thread_delay_s
from poseidon.observe.looking import Vitals, device_use, place_of, stack_of
from poseidon.observe.records import Record, shorten
from poseidon.observe.steps import BACKWARD, BETWEEN, ENDING, FORWARD, STARTING, ClockSums, StepClock, between
from poseidon.observe.traffic import TrafficMeter

LOOK_S = 0.1
"""Seconds between two looks at where the training thread is."""
RECORD_S = 0.25
"""Seconds between two records."""
LINKS_S = 1.0
"""Seconds between two looks at the connections, of which there may be hundreds."""
SPANS_S = 2.0
"""Seconds between two steps that are recorded in full, for the page's timeline."""
STALL_S = 0.25
"""A thread that wakes up so much too late, in a process that has not computed meanwhile, has stood still."""
LONG_S = 1.5
"""A phase of which the program's line is told."""

_LAST_S = 2.0
"""How long a worker that ends tries to get rid of the rest of its trace."""
_LONGEST_NAME = 60
_SPANS_PER_LINE = 24
_ROWS_PER_LINE = 24
_LEAST_STEPS = 4


class Recorder:
    """Watches one process. ``tell`` gets the facts, never blocks, and returns whether they are on their way."""

    def __init__(self, tell: Callable[..., bool], training: threading.Thread | None = None) -> None:
        self.clock = StepClock(time.monotonic())
        self.ip = ""
        self.is_async = False
        self.traffic = TrafficMeter()
        self._tell = tell
        self._training = training or threading.current_thread()
        self._links = LinkMeter()
        self._links_at = 0.0
        self._vitals = Vitals()
        self._places: Counter[str] = Counter()
        self._stalled_s = 0.0
        self._delay_s = self._delayed_s()
        self._before = self.clock.look(time.monotonic())
        self._first: tuple[int, float] | None = None
        """How many steps were done at the first look that saw any, and when."""
        self._sent = 0
        """Of a trace: how many of its spans are on their way."""
        self._asked = range(0)
        self._plan: deque[dict[str, Any]] = deque()
        """Lines of plans that are not on their way yet."""
        self._has_told_stack = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="poseidon-recorder", daemon=True)
        self._thread.start()

    def trace(self, first: int, last: int) -> None:
        """Record every step from ``first`` up to, but not including, ``last`` in full."""
        self.clock.traced = self._asked = range(first, last)

    def tell_plan(self, name: str, step: int, rows: Sequence[tuple[str, str, float, float]], link_rate: float) -> None:
        """Tell the plan in force: for each item its route, name, bytes and predicted seconds on the wire.

        It is sent later, by the recorder's thread: a large one takes more room than the pipe has at once.
        """
        for start in range(0, len(rows), _ROWS_PER_LINE):
            part = rows[start : start + _ROWS_PER_LINE]
            self._plan.append({"plan": part, "plan_name": name, "plan_step": step, "link_rate": link_rate})
            self._plan[-1]["is_first"] = start == 0

    def _send_plan(self) -> bool:
        """Send what is left of plans; return whether some still is."""
        while self._plan:
            facts = self._plan[0]
            rows = [
                [route, shorten(item, _LONGEST_NAME), round(size), round(s, 7)]
                for route, item, size, s in facts["plan"]
            ]
            if not self._tell(**{**facts, "plan": rows}):
                return True
            self._plan.popleft()
        return False

    def close(self) -> None:
        """Send the last record and stop."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join(timeout=2.0 + _LAST_S)

    def _run(self) -> None:
        recorded_at = looked_at = time.monotonic()
        cpu_s = time.process_time()
        while not self._stop.wait(LOOK_S):
            now, used_s = time.monotonic(), time.process_time()
            late_s = now - looked_at - LOOK_S
            if late_s > STALL_S and used_s - cpu_s < 0.1 * late_s:
                self._stalled_s += late_s
            looked_at, cpu_s = now, used_s
            clock = self.clock
            if clock.phase in (BETWEEN, STARTING) and clock.waiting is None:
                self._places[place_of(self._training.ident or 0)] += 1
            self._follow_spans()
            self._send_plan()
            if now - recorded_at >= RECORD_S:
                recorded_at = now
                self._record(now)
        self._record(time.monotonic())
        deadline = time.monotonic() + _LAST_S
        while (self._follow_spans() | self._send_plan()) and time.monotonic() < deadline:
            time.sleep(0.01)  # the launcher reads

    def _record(self, now: float) -> None:
        sums = self.clock.look(now)
        spent = between(self._before, sums)
        self._before = sums
        memory, cpu_s, faults = self._vitals.look()
        device_bytes, device_busy = device_use()
        delay_s = self._delayed_s()
        doing_s = now - sums.since_s
        traffic = self.traffic.look()
        record = Record(
            at_s=now,
            span_s=spent.span_s,
            step=sums.step,
            steps=spent.steps,
            samples=spent.samples,
            forward_s=spent.phases_s[FORWARD],
            backward_s=spent.phases_s[BACKWARD] + spent.phases_s[ENDING],
            between_s=spent.phases_s[BETWEEN],
            wait_s=spent.wait_s,
            waits_s=spent.waits_s,
            places=dict(self._places),
            doing=sums.phase,
            doing_s=doing_s,
            waits_for=sums.waits_for,
            where=place_of(self._training.ident or 0) if doing_s > LONG_S and not sums.waits_for else "",
            links=self._look_at_links(now),
            ip=self.ip,
            memory_bytes=memory,
            device_bytes=device_bytes,
            device_busy=device_busy,
            cpu_s=cpu_s,
            delay_s=max(0.0, delay_s - self._delay_s),
            stalled_s=self._stalled_s,
            faults=faults,
            routes=traffic.sent_bytes,
            queued=traffic.queued,
            queued_bytes=traffic.queued_bytes,
            is_async=self.is_async,
        )
        self._places.clear()
        self._stalled_s, self._delay_s = 0.0, delay_s
        self._tell(record=record.pack())
        self._tell_stack(sums, doing_s)

    def _tell_stack(self, sums: ClockSums, doing_s: float) -> None:
        """Tell the calls of a training thread that has not moved for long, once."""
        is_stuck = doing_s > 4 * LONG_S and not sums.waits_for and sums.phase != STARTING
        if is_stuck and not self._has_told_stack:
            self._tell(stack=stack_of(self._training.ident or 0))
        self._has_told_stack = is_stuck

    def _look_at_links(self, now: float) -> dict[str, LinkUse]:
        if now - self._links_at < LINKS_S:
            return {}
        self._links_at = now
        return self._links.look()

    def _delayed_s(self) -> float:
        return thread_delay_s(self._training.native_id or 0)

    # Steps in full.

    def _follow_spans(self) -> bool:
        """Send what was recorded in full: a trace as it grows, one step for the page when it is complete.

        Return whether some of a trace could not be sent yet.
        """
        clock = self.clock
        is_behind = False
        if clock.traced:
            spans = clock.spans if clock.recorded is None else clock.recorded[1]
            if spans is not None:
                last = len(spans)
                # Nothing of a trace may be missing: what the pipe has no room for now is sent later.
                self._sent += self._send(spans[self._sent : last], "trace", clock.traced.start)
                is_behind = self._sent < last
            if clock.recorded is not None and clock.step > clock.traced.stop and not is_behind:
                if clock.traced != self._asked:
                    self._tell(trace_ends=clock.traced.stop, trace_asked=self._asked.stop)
                clock.recorded, clock.traced = None, range(0)
        elif clock.recorded is not None and clock.step > clock.recorded[0] + 1:
            (step, spans), clock.recorded = clock.recorded, None
            self._send(spans, "step", step)
        if not clock.every and clock.steps:
            now = time.monotonic()
            self._first = self._first or (clock.steps, now)
            steps, since = clock.steps - self._first[0], now - self._first[1]
            if steps >= _LEAST_STEPS:
                # A power of two, so that workers that count a little differently still record common steps. A step that
                # is recorded is sent when the one after the next has begun.
                clock.every = max(4, 1 << max(0, math.ceil(math.log2(SPANS_S * steps / max(since, 1e-3)))))
        return is_behind

    def _send(self, spans: Sequence[tuple[str, str, float, float]], kind: str, step: int) -> int:
        """Send spans until one line finds no room; return how many are on their way."""
        for start in range(0, len(spans), _SPANS_PER_LINE):
            rows: list[list[Any]] = [
                [what, shorten(name, _LONGEST_NAME), round(begin, 6), round(end, 6)]
                for what, name, begin, end in spans[start : start + _SPANS_PER_LINE]
            ]
            # The time of day of this machine, by which torch.profiler goes.
            if not self._tell(spans=rows, spans_of=kind, spans_step=step, wall_s=time.time() - time.monotonic()):
                return start
        return len(spans)
