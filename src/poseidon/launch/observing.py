"""The launcher's eye on a running job: records in, a verdict, the run's folder and the lines on the terminal out."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from poseidon.launch.places import Place
from poseidon.observe.folder import STATE, SUMMARY, TRACE, RunFolder
from poseidon.observe.history import History
from poseidon.observe.links import LinkUse
from poseidon.observe.records import Record
from poseidon.observe.spans import StepSpan, read_spans, trace_events
from poseidon.observe.verdict import Cause, JobVerdict, judge, link_uses
from poseidon.observe.windows import PHASE_WORDS, Window, Windows, add_uses

JUDGE_S = 0.25
STATE_S = 1.0
"""Seconds between two states of the folder; more where writing one takes long."""
LINE_S = 30.0
"""Seconds between two lines where there is no terminal."""
LONG_S = 20.0
"""A worker for which the others wait so long is named on the terminal, with its calls."""
SETTLED = 4
"""A verdict is told when it has been the same this many times."""
_MOST_SPANS = 20_000
_MOST_SHOWN = 400
_STEPS_KEPT = 4


class JobObserver:
    """Follows one job, over its restarts. Not thread-safe; ``folder`` is None if the job leaves no logs."""

    def __init__(self, places: Sequence[Place], command: str, folder: RunFolder | None) -> None:
        self._places = list(places)
        self._command = command
        self._folder = folder
        self._began_at = time.time()
        self._began = time.monotonic()
        self._restart = 0
        self._history = History(len(places))
        self._windows = self._new_windows()
        self._totals: dict[tuple[str, str], LinkUse] = {}
        self._ips: dict[str, str] = {}
        self._waited_s = [0.0] * len(places)
        self._steps = [0] * len(places)
        self._samples = 0
        self._loss: float | None = None
        self._spans: dict[int, dict[int, list[StepSpan]]] = {}
        """The last steps that were recorded in full, by step and worker."""
        self._traced: dict[int, list[StepSpan]] = {}
        self._plan: list[dict[str, Any]] = []
        self._plan_facts: dict[str, Any] = {}
        self._took: dict[str, list[float]] = {}
        self._stacks: dict[int, list[str]] = {}
        self._line_rate = 0.0
        self._judged_at = self._stated_at = 0.0
        self._lined_at = self._began
        self._state_s = STATE_S
        self._trained_from: float | None = None
        self._seen: list[Window] = []
        self._stands_for: dict[int, int | None] = {}
        """Workers that came later, each with the one whose place it has; None: in a new place, which is not shown."""
        self._lost: set[int] = set()
        self._verdict = JobVerdict(Cause.STARTING, "starting: no step yet")
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
        if isinstance(facts.get("stack"), list):
            self._stacks[rank] = [str(line)[:300] for line in facts["stack"][:20]]
            self._event("stuck", worker=rank, host=self._places[rank].host, calls=self._stacks[rank])
        if isinstance(facts.get("plan"), list):
            self._read_plan(facts)

    def read_loss(self, loss: float, now: float) -> None:
        """Note the loss that a worker told or printed."""
        if loss != self._loss and loss == loss:
            self._loss = loss
            self._history.add_loss(loss, now - self._began)

    def note(self, kind: str, **facts: Any) -> None:
        """Note an event of the launcher's own."""
        self._event(kind, **facts)

    def look(self, now: float) -> None:
        """Judge, and bring the folder up to date, if it is time."""
        if now - self._judged_at >= JUDGE_S:
            self._judged_at = now
            windows = self._windows.look(now)
            self._seen = [window for window in windows if window.rank not in self._lost] or windows
            self._settle(judge(self._seen, self._line_rate))
        if self._folder is not None and now - self._stated_at >= self._state_s:
            began = time.monotonic()
            self._folder.write_state(STATE, self.state(now))
            self._stated_at = time.monotonic()
            # At most a few percent of the launcher's time.
            self._state_s = max(STATE_S, 30 * (self._stated_at - began))

    def news(self) -> str | None:
        """Return, once each time, that a worker has kept the others waiting for long."""
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
        if now - self._lined_at < LINE_S or not any(self._steps):
            return None
        self._lined_at = now
        return f"{self.progress()}; {self._verdict}"

    def end(self, status: int, cause: str, is_interrupted: bool, now: float) -> str:
        """Write the summary; return the closing line."""
        if self._folder is not None:
            self._folder.write_state(STATE, self.state(now, is_running=False))
            if self._traced:
                self._folder.write(TRACE, trace_events(self._traced, self._names()))
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
            "loss": self._loss,
            "waited_s": [round(one, 3) for one in self._waited_s],
            "links": self._link_rows(self._totals),
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

    def status(self) -> list[str]:
        """Return what the status line says of speed and limits; nothing if the workers' engine does not report."""
        if not self.has_records:
            return []
        steps_per_s, samples_per_s = self._rates()
        parts = [f"{steps_per_s:.3g} steps/s"] if steps_per_s else []
        parts += [f"{samples_per_s:,.0f} samples/s"] if samples_per_s else []
        behind = self.slowest()
        return [*parts, *([behind] if behind else []), str(self._verdict)]

    def progress(self) -> str:
        """Return step and speed, in words."""
        steps_per_s, samples_per_s = self._rates()
        parts = [f"step {max((window.last.step for window in self._seen), default=0)}"]
        parts += [f"{steps_per_s:.3g} steps/s"] if steps_per_s else []
        parts += [f"{samples_per_s:,.0f} samples/s"] if samples_per_s else []
        parts += [f"loss {self._loss:.4g}"] if self._loss is not None else []
        return ", ".join(parts)

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
        return {
            "command": self._command,
            "began_at": self._began_at,
            "updated_at": time.time(),
            "elapsed_s": round(now - self._began, 2),
            "is_running": is_running,
            "restart": self._restart,
            "steps_per_s": round(steps_per_s, 4),
            "samples_per_s": round(samples_per_s, 3),
            "loss": self._loss,
            "verdict": {
                "cause": verdict.cause.value,
                "text": verdict.text,
                "next_step": verdict.next_step,
                "host": verdict.host,
                "rank": verdict.rank,
                "is_sure": verdict.is_sure,
            },
            "slowest": self.slowest() or "",
            "workers": [self._worker_row(window) for window in self._seen],
            "links": self._link_rows(link_uses(self._seen), self._totals),
            "plan": {**self._plan_facts, "items": self._plan_rows()},
            "timeline": self._timeline(),
            "history": self._history.pack(),
        }

    # Inside.

    def _read_record(self, rank: int, record: Record, now: float) -> None:
        self._windows.add(rank, record, now)
        self._history.add(rank, record, now - self._began)
        self._waited_s[rank] += record.wait_s
        self._steps[rank] += record.steps
        self._samples += record.samples
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
            kept = self._traced.setdefault(rank, [])
            kept += moved[: _MOST_SPANS - len(kept)]
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
            if isinstance(row, list) and len(row) == 4:
                self._plan.append(
                    {"route": str(row[0]), "name": str(row[1]), "bytes": float(row[2]), "predicted_s": float(row[3])}
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

    def _worker_row(self, window: Window) -> dict[str, Any]:
        last = window.last
        return {
            "rank": window.rank,
            "host": window.host,
            "step": last.step,
            "doing": PHASE_WORDS[last.doing] if 0 <= last.doing < len(PHASE_WORDS) else "",
            "doing_s": round(last.doing_s, 2),
            "waits_for": last.waits_for,
            "where": last.where,
            "silent_s": round(window.silent_s, 1),
            "forward_s": round(window.per_step("forward_s"), 5),
            "backward_s": round(window.per_step("backward_s"), 5),
            "between_s": round(window.per_step("between_s"), 5),
            "wait_s": round(window.per_step("wait_s"), 5),
            "step_s": round(window.step_s, 5),
            "waits_s": {name: round(seconds / max(1, window.steps), 5) for name, seconds in window.waits_s.items()},
            "memory_bytes": last.memory_bytes,
            "device_bytes": last.device_bytes,
            "device_busy": last.device_busy,
            "cpu": round(window.total("cpu_s") / window.span_s, 3) if window.span_s else 0.0,
            "delay": round(window.total("delay_s") / window.span_s, 3) if window.span_s else 0.0,
            "queued": last.queued,
            "waited_s": round(self._waited_s[window.rank], 2),
            "stack": self._stacks.get(window.rank, []),
        }

    def _link_rows(
        self, uses: Mapping[tuple[str, str], LinkUse], totals: Mapping[tuple[str, str], LinkUse] | None = None
    ) -> list[dict[str, Any]]:
        totals = uses if totals is None else totals
        rows = []
        for (here, there), total in sorted(totals.items()):
            use = uses.get((here, there), LinkUse())
            rows.append(
                {
                    "from": here,
                    "to": there,
                    "bytes": total.sent_bytes,
                    "resent_bytes": total.resent_bytes,
                    "mbit_per_s": round(8e-6 * use.sent_bytes / use.busy_s, 2) if use.busy_s > 1e-4 else 0.0,
                    "rtt_ms": round(use.rtt_s * 1e3, 3),
                }
            )
        return rows

    def _plan_rows(self) -> list[dict[str, Any]]:
        rows = []
        for row in self._plan:
            took = self._took.get(f"{row['route']} {row['name']}"[:60])
            rows.append({**row, "measured_s": round(statistics.median(took), 6) if took else None})
        return rows

    def _timeline(self) -> list[dict[str, Any]]:
        # The newest step of which most workers have told, so that all rows show the same one.
        step = max(self._spans, key=lambda one: (len(self._spans[one]), one), default=None)
        if step is None:
            return []
        shown = self._spans[step]
        begins = [span.begin_s for spans in shown.values() for span in spans]
        if not begins:
            return []
        start_s = min(begins)
        return [
            {
                "rank": rank,
                "step": step,
                "spans": [
                    [span.kind, span.name, round(span.begin_s - start_s, 5), round(span.end_s - start_s, 5)]
                    for span in spans
                ],
            }
            for rank, spans in sorted(shown.items())
        ]

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
