"""What the page, ``poseidon status`` and the metrics show of workers, links, plan and one step, as plain data. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from poseidon.observe.links import LinkUse
from poseidon.observe.records import shorten
from poseidon.observe.spans import StepSpan
from poseidon.observe.windows import PHASE_WORDS, Window


def worker_row(window: Window, waited_s: float, stack: Sequence[str]) -> dict[str, Any]:
    """Return one worker: what it does, and where the time of its steps goes."""
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
        "queued": max((record.queued for record in window.records), default=0),
        "queued_bytes": max((record.queued_bytes for record in window.records), default=0),
        "unsent_bytes": sum(use.waiting_bytes for use in window.links.values()),
        "waited_s": round(waited_s, 2),
        "stack": list(stack),
    }


def link_rows(
    uses: Mapping[tuple[str, str], LinkUse], totals: Mapping[tuple[str, str], LinkUse]
) -> list[dict[str, Any]]:
    """Return the traffic between machines: bytes in all, and the rate of the last seconds while in use."""
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


def route_rows(windows: Sequence[Window], totals: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return what all workers sent by each route: bytes in all, and a step's on average in the last seconds."""
    steps = max((window.steps for window in windows), default=0)
    last: Counter[str] = Counter()
    for window in windows:
        for record in window.records:
            last.update(record.routes)
    return [
        {"route": route, "bytes": total, "step_bytes": round(last[route] / steps) if steps else 0}
        for route, total in sorted(totals.items(), key=lambda pair: -pair[1])
    ]


def plan_rows(plan: Sequence[Mapping[str, Any]], took: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Return the plan's items with what each really took; ``took`` has the last times by route and name."""
    rows = []
    for row in plan:
        times = took.get(shorten(f"{row['route']} {row['name']}", 60))
        rows.append({**row, "measured_s": round(statistics.median(times), 6) if times else None})
    return rows


def timeline_rows(spans: Mapping[int, Mapping[int, Sequence[StepSpan]]]) -> list[dict[str, Any]]:
    """Return one step of all workers, from the steps that were recorded in full."""
    # The newest step of which most workers have told, so that all rows show the same one.
    step = max(spans, key=lambda one: (len(spans[one]), one), default=None)
    if step is None:
        return []
    shown = spans[step]
    begins = [span.begin_s for each in shown.values() for span in each]
    if not begins:
        return []
    start_s = min(begins)
    return [
        {
            "rank": rank,
            "step": step,
            "spans": [
                [span.kind, span.name, round(span.begin_s - start_s, 5), round(span.end_s - start_s, 5)]
                for span in each
            ],
        }
        for rank, each in sorted(shown.items())
    ]
