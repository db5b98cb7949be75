"""Writes a timeline as a Chrome trace: open it in Perfetto (ui.perfetto.dev) to see what overlaps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from poseidon import files
from poseidon.sim.outcome import Outcome, Span

_ROWS = {"device": (1, "device"), "out": (2, "network card, sending")}


def write_trace(path: Path, outcomes: Mapping[str, Outcome]) -> None:
    """Write one process per outcome, with one row for the device and one for the network card."""
    events: list[dict[str, Any]] = []
    for process, (name, outcome) in enumerate(outcomes.items(), start=1):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        for row, title in _ROWS.values():
            events.append(
                {"ph": "M", "name": "thread_name", "pid": process, "tid": row, "args": {"name": title}},
            )
        events.extend(_events(process, outcome.spans))
    files.write_json(path, {"traceEvents": events, "displayTimeUnit": "ms"}, "trace", indent=None)


def _events(process: int, spans: Iterable[Span]) -> Iterable[dict[str, Any]]:
    for span in spans:
        row, _ = _ROWS[span.place]
        yield {
            "ph": "X",
            "pid": process,
            "tid": row,
            "name": span.name,
            "cat": span.route,
            "ts": round(span.start_s * 1e6, 3),
            "dur": round((span.end_s - span.start_s) * 1e6, 3),
        }
