"""The launcher's eye on a running job: records in, a verdict, the run's folder and the lines on the terminal out."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from poseidon.launch.countdown import Countdown, clock, find_goal
from poseidon.launch.places import Place
from poseidon.launch.progress import is_finite
from poseidon.launch.startup import describe_start
from poseidon.observe.causes import Cause, JobVerdict
from poseidon.observe.folder import STATE, SUMMARY, TRACE, RunFolder
from poseidon.observe.history import History
from poseidon.observe.links import LinkUse
from poseidon.observe.records import Record
from poseidon.observe.rows import link_rows, plan_rows, route_rows, timeline_rows, worker_row
from poseidon.observe.spans import StepSpan, read_spans, trace_events
from poseidon.observe.steps import MOST_SPANS
from poseidon.observe.trackers import TrackerFeed
from poseidon.observe.verdict import judge
from poseidon.observe.windows import Window, Windows, add_uses
from poseidon.observe.wire_verdict import link_uses

JUDGE_S = 0.25
STATE_S = 1.0
"""Seconds between two states of the folder; more where writing one takes long."""
LINE_S = 30.0
"""Seconds between two lines where there is no terminal."""
LONG_S = 20.0
"""A worker for which the others wait so long is named on the terminal, with its calls."""
SETTLED = 4
"""A verdict is told when it has been the same this many times."""
_MOST_SHOWN = 400
_MOST_ROUTES = 50
_STEPS_KEPT = 4


class JobObserver:
    """Follows one job, over its restarts. Not thread-safe; ``folder`` is None if the job leaves no logs."""

    def __init__(
        self, places: Sequence[Place], command: str, folder: RunFolder | None, feeds: Sequence[TrackerFeed] = ()
    ) -> None:
        self._places = list(places)
        self._command = command
        self._folder = folder
        self._feeds = feeds
        self._began_at = time.time()
        self._began = time.monotonic()
        self._restart = 0
        self._history = History(len(places))
        self._windows = self._new_windows()
        self._totals: dict[tuple[str, str], LinkUse] = {}
        self._ips: dict[str, str] = {}
        self._routes: Counter[str] = Counter()
        self._waited_s = [0.0] * len(places)
        self._steps = [0] * len(places)
        self._samples = 0
        self._loss: float | None = None
        self._is_broken = False
        """Whether that is nan or inf."""
        self._spans: dict[int, dict[int, list[StepSpan]]] = {}
        """The last steps that were recorded in full, by step and worker."""
        self._traced: dict[int, list[StepSpan]] = {}
        self._times_of_day: dict[int, float] = {}
        self._plan: list[dict[str, Any]] = []
        self._plan_facts: dict[str, Any] = {}
        self._took: dict[str, list[float]] = {}
        self._stacks: dict[int, list[str]] = {}
        self._line_rate = 0.0
        self._judged_at = self._stated_at = 0.0
        self._lined_at = self._began
        self._state_s = STATE_S
        self._took_s = 0.0
        """How long the last state took to write."""
        self._trained_from: float | None = None
        self._seen: list[Window] = []
        self._stands_for: dict[int, int | None] = {}
        """Workers that came later, each with the one whose place it has; None: in a new place, which is not shown."""
        self._lost: set[int] = set()
        self._ended: set[int] = set()
        self._told_left, self._printed_left = Countdown(), Countdown()
        self._left_told_by = self._left_printed_by = -1
        self._heard: dict[int, str] = {}
        """Workers that have reported anything, with what they do before the first step."""
        self._has_lines = False
        self._verdict = JobVerdict(Cause.STARTING, "starting")
        self._repeats = 0
        self._told: tuple[Cause, str] | None = None
        self._has_told_standing = False

    # What the launcher reports.

    def begin(self, restart: int) -> None:
        """Note that the job starts, or starts again."""
        self._restart = restart
        self._windows = self._new_windows()
        self._event("restart" if restart else "start", command=self._command, restart=restart, hosts=self._hosts())
        self._stacks.clear()
        self._spans.clear()
        self._heard.clear()
        self._has_lines = False
        self._told_left, self._printed_left = Countdown(), Countdown()
        self._lost.clear()
        self._ended.clear()
        self._stands_for.clear()

    def end_worker(self, worker: int, status: int) -> None:
        """Note that a worker has ended: nobody waits for it any more, and it may be silent."""
        self._event("exit", worker=worker, status=status)
        place = self._stands_for.get(worker, worker)
        if place is not None:
            self._ended.add(place)

    def lose(self, worker: int) -> None:
        """Note that an elastic job goes on without a worker."""
        place = self._stands_for.get(worker, worker)
        if place is not None:
            self._lost.add(place)

    def add(self, newcomer: Place) -> None:
        """Note that a worker of an elastic job was started, maybe in the place of one that is lost."""
        free = [
            place.rank
            for place in self._places
            if (place.host, place.local_rank) == (newcomer.host, newcomer.local_rank)
        ]
        self._stands_for[newcomer.rank] = free[0] if free else None

    def join(self, worker: int) -> None:
        """Note that a worker trains with the others."""
        place = self._stands_for.get(worker, worker)
        if place is not None:
            self._ended.discard(place)
        if place in self._lost:
            self._lost.discard(place)
            self._windows.renew(place)

    def read_report(self, rank: int, facts: Mapping[str, Any], now: float) -> None:
        """Take a worker's report about itself."""
        place = self._stands_for.get(rank, rank)
        if place is None:
            return
        rank = place
        record = Record.unpack(facts.get("record"))
        if record is not None:
            self._read_record(rank, record, now)
        if "spans" in facts:
            self._read_spans(rank, facts)
        if isinstance(facts.get("loss"), int | float):
            self.read_loss(float(facts["loss"]), now)
        self._heard.setdefault(rank, "")
        if "startup" in facts:
            self._heard[rank] = str(facts["startup"])[:60]
        if is_finite(facts.get("steps_left")):
            self._left_told_by = rank
            self._told_left.aim(self._steps[rank] + facts["steps_left"], str(facts.get("left_of", ""))[:40])
        if isinstance(facts.get("stack"), list):
            self._stacks[rank] = [str(line)[:300] for line in facts["stack"][:20]]
            self._event("stuck", worker=rank, host=self._places[rank].host, calls=self._stacks[rank])
        if isinstance(facts.get("plan"), list):
            self._read_plan(facts)
        if "trace_ends" in facts and rank == 0:
            ends, asked = facts["trace_ends"], facts.get("trace_asked")
            self._event("trace", text=f"the trace ends before step {ends}, not {asked}: it has {MOST_SPANS:,} spans")

    def read_line(self, rank: int, line: str, now: float) -> None:
        """Take a line that a worker printed: it may say how many steps there are."""
        self._has_lines = True
        found = find_goal(line)
        if found is not None and self._left_printed_by in (-1, rank):
            self._left_printed_by = rank
            self._printed_left.aim(found[1])
            self._printed_left.note(found[0], now)

    def left(self, now: float) -> tuple[float, str] | None:
        """Return the seconds until the end, and of what; None if nobody knows."""
        for countdown in (self._told_left, self._printed_left):
            left_s = countdown.left_s(now)
            if left_s is not None:
                return left_s, countdown.of
        return None

    def read_loss(self, loss: float, now: float) -> None:
        """Note the loss that a worker told or printed."""
        if loss == self._loss or (loss != loss and self._is_broken):
            return
        is_broken = not math.isfinite(loss)
        if is_broken and not self._is_broken:
            self._event("loss", text=f"the loss is {loss}", step=max(self._steps, default=0))
        self._loss, self._is_broken = loss, is_broken
        if not is_broken:
            self._history.add_loss(loss, now - self._began)

    @property
    def _plain_loss(self) -> float | str | None:
        """The loss for JSON, which has no word for nan and inf."""
        return str(self._loss) if self._is_broken else self._loss

    def note(self, kind: str, **facts: Any) -> None:
        """Note an event of the launcher's own."""
        self._event(kind, **facts)

    def look(self, now: float) -> None:
        """Judge, and bring the folder up to date, if it is time."""
        if now - self._judged_at >= JUDGE_S:
            self._judged_at = now
            windows = self._windows.look(now)
            self._seen = [window for window in windows if window.rank not in self._lost] or windows
            if running := [window for window in self._seen if window.rank not in self._ended]:
                verdict = judge(running, self._line_rate)
                if verdict.cause is Cause.STARTING:
                    verdict = replace(verdict, text=describe_start(self._places, self._heard, running))
                self._settle(verdict)
        if (self._folder is not None or self._feeds) and now - self._stated_at >= self._state_s:
            began = time.monotonic()
            state = self.state(now)
            for feed in self._feeds:
                feed.feed(state, now)
            if self._folder is not None:
                self._folder.write_state(STATE, state)
            self._stated_at = time.monotonic()
            # At most a few percent of the launcher's time. One state that took long is a hiccup of the machine, after
            # which the page must not show an old verdict for seconds; two in a row are a slow disk.
            took_s = self._stated_at - began
            self._state_s = max(STATE_S, 30 * min(took_s, self._took_s))
            self._took_s = took_s

    def news(self) -> str | None:
        """Return, once each time, that a worker has kept the others waiting for long, or that a tracker is lost."""
        for feed in self._feeds:
            if trouble := feed.trouble():
                return trouble
        verdict = self._verdict
        is_standing = verdict.cause in (Cause.HUNG, Cause.SILENT) and verdict.waited_s > LONG_S
        if not is_standing:
            self._has_told_standing = self._has_told_standing and verdict.cause in (Cause.HUNG, Cause.SILENT)
            return None
        if self._has_told_standing:
            return None
        self._has_told_standing = True
        stack = self._stacks.get(-1 if verdict.rank is None else verdict.rank, [])
        return "\n".join([verdict.text, *(f"    {line}" for line in stack)])

    def line(self, now: float) -> str | None:
        """Return a line for where there is no terminal, from time to time; None if it is not time yet."""
        if now - self._lined_at < LINE_S:
            return None
        self._lined_at = now
        if not any(self._steps):
            return None if self._is_foreign else str(self._verdict)
        return f"{self.progress(now)}; {self._verdict}"

    def end(self, status: int, cause: str, is_interrupted: bool, now: float) -> str:
        """Write the summary; return the closing line."""
        state = self.state(now, is_running=False)
        for feed in self._feeds:
            feed.feed(state, now, is_last=True)
            feed.close(status, str(self._verdict))
        if self._folder is not None:
            self._folder.write_state(STATE, state)
            if self._traced:
                self._folder.write(TRACE, trace_events(self._traced, self._names(), self._times_of_day))
        trained_s = 0.0 if self._trained_from is None else now - self._trained_from
        steps, line = max(self._steps), f"{now - self._began:.0f} s"
        summary = {
            "status": status,
            "cause": cause,
            "is_interrupted": is_interrupted,
            "command": self._command,
            "hosts": self._hosts(),
            "workers": len(self._places),
            "restarts": self._restart,
            "began_at": self._began_at,
            "seconds": round(now - self._began, 3),
            "training_seconds": round(trained_s, 3),
            "steps": steps,
            "steps_per_s": round(steps / trained_s, 4) if trained_s else 0.0,
            "samples": self._samples,
            "samples_per_s": round(self._samples / trained_s, 3) if trained_s else 0.0,
            "loss": self._plain_loss,
            "waited_s": [round(one, 3) for one in self._waited_s],
            "links": link_rows(self._totals, self._totals),
            "routes": dict(self._routes),
            "verdict": str(self._verdict),
        }
        self._event("end", is_last=True, status=status, cause=cause)
        if self._folder is not None:
            self._folder.write(SUMMARY, summary)
        if steps:
            line += f", {steps} steps, {steps / trained_s:.3g} steps/s"
            line += f", {self._samples / trained_s:,.0f} samples/s" if self._samples else ""
        behind = self.slowest()
        return line if behind is None else f"{line}; {behind}"

    # What is known.

    @property
    def verdict(self) -> JobVerdict:
        """What limits the job now."""
        return self._verdict

    @property
    def has_records(self) -> bool:
        """Whether the workers' engine reports."""
        return any(window.records for window in self._seen)

    @property
    def _is_foreign(self) -> bool:
        """Whether this is a program that prints, but does not report: then nothing is known of it."""
        return self._has_lines and not self._heard

    def status(self, now: float) -> tuple[list[str], str]:
        """Return what the status says of speed, and of limits; nothing if the workers' engine does not report."""
        if not self.has_records:
            return self._left_words(now), "" if self._is_foreign else str(self._verdict)
        behind = self.slowest()
        return [*self._speed(), *self._left_words(now), *([behind] if behind else [])], str(self._verdict)

    def progress(self, now: float) -> str:
        """Return step and speed, in words."""
        parts = [f"step {max((window.last.step for window in self._seen), default=0)}", *self._speed()]
        parts += [f"loss {self._loss:.4g}"] if self._loss is not None else []
        return ", ".join([*parts, *self._left_words(now)])

    def _speed(self) -> list[str]:
        steps_per_s, samples_per_s = self._rates()
        parts = [f"{steps_per_s:.3g} steps/s"] if steps_per_s else []
        return parts + ([f"{samples_per_s:,.0f} samples/s"] if samples_per_s else [])

    def _left_words(self, now: float) -> list[str]:
        left = self.left(now)
        if left is None:
            return []
        return [f"{clock(left[0])} left" + (f" in {left[1]}" if left[1] else "")]

    def slowest(self) -> str | None:
        """Return who was waited for, and how long, in words; None if nobody stands out.

        By all the waiting since the start: the one that the others wait for waits least.
        """
        found = find_slowest(self._waited_s)
        if found is None or self._trained_from is None:
            return None
        rank, behind_s = found
        if behind_s < max(1.0, 0.03 * (time.monotonic() - self._trained_from)):
            return None
        return f"the others waited {behind_s:.1f} s for {self._places[rank].label}"

    def state(self, now: float, is_running: bool = True) -> dict[str, Any]:
        """Return everything the page shows, as plain data."""
        steps_per_s, samples_per_s = self._rates()
        verdict = self._verdict
        left = self.left(now) if is_running else None
        return {
            "command": self._command,
            "began_at": self._began_at,
            "updated_at": time.time(),
            "elapsed_s": round(now - self._began, 2),
            "is_running": is_running,
            "restart": self._restart,
            "steps_per_s": round(steps_per_s, 4),
            "samples_per_s": round(samples_per_s, 3),
            "loss": self._plain_loss,
            "left_s": None if left is None else round(left[0], 1),
            "left_of": "" if left is None else left[1],
            "verdict": {
                "cause": verdict.cause.value,
                "text": verdict.text,
                "next_step": verdict.next_step,
                "host": verdict.host,
                "rank": verdict.rank,
                "is_sure": verdict.is_sure,
            },
            "slowest": self.slowest() or "",
            "workers": [
                worker_row(window, self._waited_s[window.rank], self._stacks.get(window.rank, ()))
                for window in self._seen
            ],
            "links": link_rows(link_uses(self._seen), self._totals),
            "routes": route_rows(self._seen, self._routes),
            "plan": {**self._plan_facts, "items": plan_rows(self._plan, self._took)},
            "timeline": timeline_rows(self._spans),
            "history": self._history.pack(),
        }

    # Inside.

    def _read_record(self, rank: int, record: Record, now: float) -> None:
        self._windows.add(rank, record, now)
        self._history.add(rank, record, now - self._began)
        self._waited_s[rank] += record.wait_s
        self._steps[rank] += record.steps
        if rank == self._left_told_by:
            self._told_left.note(self._steps[rank], now)
        self._samples += record.samples
        for route, count in record.routes.items():
            if route in self._routes or len(self._routes) < _MOST_ROUTES:
                self._routes[route] += count
        if record.steps and self._trained_from is None:
            self._trained_from = now - record.span_s
        host = self._places[rank].host
        if record.ip:
            self._ips[record.ip] = host
        for peer, use in record.links.items():
            there = self._ips.get(peer)
            if there is not None and there != host:
                key = host, there
                self._totals[key] = add_uses(self._totals.get(key, LinkUse()), use)

    def _read_spans(self, rank: int, facts: Mapping[str, Any]) -> None:
        spans = read_spans(facts["spans"])
        offset_s = self._windows.offset_s(rank)
        moved = [span.moved(offset_s) for span in spans]
        if facts.get("spans_of") == "trace":
            if is_finite(facts.get("wall_s")):
                self._times_of_day[rank] = facts["wall_s"] - offset_s
            kept = self._traced.setdefault(rank, [])
            kept += moved[: 2 * MOST_SPANS - len(kept)]
        step = facts.get("spans_step")
        if facts.get("spans_of") == "step" and isinstance(step, int):
            of_step = self._spans.setdefault(step, {})
            of_step[rank] = [*of_step.get(rank, []), *moved][:_MOST_SHOWN]
            for old in sorted(self._spans)[:-_STEPS_KEPT]:
                del self._spans[old]
        if rank == 0:
            for span in spans:
                if span.kind == "item":
                    self._took.setdefault(span.name, []).append(span.end_s - span.begin_s)
                    del self._took[span.name][:-20]

    def _read_plan(self, facts: Mapping[str, Any]) -> None:
        if facts.get("is_first"):
            self._plan = []
            self._took.clear()
            self._plan_facts = {"name": str(facts.get("plan_name", "")), "step": int(facts.get("plan_step", 0))}
            rate = facts.get("link_rate")
            self._line_rate = float(rate) if isinstance(rate, int | float) else 0.0
            self._event("plan", name=self._plan_facts["name"], step=self._plan_facts["step"])
        for row in facts["plan"]:
            with contextlib.suppress(TypeError, ValueError):
                route, name, size, seconds = row
                self._plan.append(
                    {"route": str(route), "name": str(name), "bytes": float(size), "predicted_s": float(seconds)}
                )

    def _settle(self, verdict: JobVerdict) -> None:
        same = (verdict.cause, verdict.host) == (self._verdict.cause, self._verdict.host)
        self._repeats = self._repeats + 1 if same else 1
        self._verdict = verdict
        if self._repeats >= SETTLED and verdict.cause not in (Cause.STARTING, Cause.UNCLEAR):
            key = (verdict.cause, verdict.host)
            if key != self._told:
                self._told = key
                self._event(
                    "verdict",
                    cause=verdict.cause.value,
                    host=verdict.host,
                    worker=verdict.rank,
                    is_sure=verdict.is_sure,
                    text=str(verdict),
                )

    def _rates(self) -> tuple[float, float]:
        moving = [window for window in self._seen if window.span_s and window.silent_s < 5]
        if not moving:
            return 0.0, 0.0
        steps_per_s = statistics.median(window.steps / window.span_s for window in moving)
        return steps_per_s, sum(window.total("samples") / window.span_s for window in moving)

    def _new_windows(self) -> Windows:
        return Windows([place.host for place in self._places])

    def _names(self) -> list[str]:
        return [place.label for place in self._places]

    def _hosts(self) -> list[str]:
        return [place.host for place in self._places]

    def _event(self, kind: str, is_last: bool = False, **facts: Any) -> None:
        if self._folder is not None:
            self._folder.event(kind, is_last=is_last, **facts)


def find_slowest(waited_s: Sequence[float]) -> tuple[int, float] | None:
    """Return the worker that waited least in all, and what the median of the others waited more. Pure."""
    if len(waited_s) < 2:
        return None
    rank = min(range(len(waited_s)), key=lambda one: waited_s[one])
    others = [seconds for one, seconds in enumerate(waited_s) if one != rank]
    return rank, statistics.median(others) - waited_s[rank]
