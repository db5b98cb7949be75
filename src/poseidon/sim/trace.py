"""Writes a timeline as a Chrome trace: open it in Perfetto (ui.perfetto.dev) to see what overlaps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from poseidon import files
from poseidon.observe.chrome import complete_event, name_process, name_row
from poseidon.sim.outcome import Outcome, Span

_ROWS = {"device": (1, "device"), "out": (2, "network card, sending")}


def write_trace(path: Path, outcomes: Mapping[str, Outcome]) -> None:
    """Write one process per outcome, with one row for the device and one for the network card."""
    events: list[dict[str, Any]] = []
    for process, (name, outcome) in enumerate(outcomes.items(), start=1):
        events.append(name_process(process, name))
        events += [name_row(process, row, title) for row, title in _ROWS.values()]
        events.extend(_events(process, outcome.spans))
    files.write_json(path, {"traceEvents": events, "displayTimeUnit": "ms"}, "trace", indent=None)


def _events(process: int, spans: Iterable[Span]) -> Iterable[dict[str, Any]]:
    for span in spans:
        row, _ = _ROWS[span.place]
        yield complete_event(process, row, span.name, span.route, span.start_s, span.end_s)
