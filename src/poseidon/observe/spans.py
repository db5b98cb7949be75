"""Steps recorded in full: phases, waits and items with their times, and the trace that Perfetto shows. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from poseidon.observe.chrome import complete_event, name_process, name_row
from poseidon.observe.profiles import ZERO
from poseidon.observe.windows import PHASE_WORDS

KINDS = ("phase", "wait", "item")
_ROWS = {"phase": (1, "computing"), "wait": (2, "waiting for others"), "item": (3, "wire")}


@dataclass(frozen=True)
class StepSpan:
    """Something that took time: a phase of a step, a wait for others, or an item on the wire, until it was taken."""

    kind: str
    name: str
    begin_s: float
    end_s: float

    def moved(self, offset_s: float) -> StepSpan:
        """Return it on another clock."""
        return replace(self, begin_s=self.begin_s + offset_s, end_s=self.end_s + offset_s)


def read_spans(data: object) -> list[StepSpan]:
    """Return the spans that a worker sent; what is not one is left out."""
    spans = []
    for row in data if isinstance(data, list) else []:
        if not (isinstance(row, list) and len(row) == 4 and row[0] in KINDS):
            continue
        kind, name, begin, end = row
        if not (isinstance(begin, int | float) and isinstance(end, int | float) and end >= begin):
            continue
        if kind == "phase":
            name = PHASE_WORDS[int(name)] if str(name).isdigit() and int(name) < len(PHASE_WORDS) else ""
        spans.append(StepSpan(str(kind), str(name), float(begin), float(end)))
    return spans


def trace_events(
    spans: Mapping[int, Sequence[StepSpan]], names: Sequence[str], times_of_day: Mapping[int, float] | None = None
) -> dict[str, Any]:
    """Return a Chrome trace: a process per worker, with a row each for computing, waiting and the wire.

    ``times_of_day``: by worker, what to add to these spans' times for the time of day on its machine.
    """
    begins = [span.begin_s for each in spans.values() for span in each]
    start_s = min(begins, default=0.0)
    events: list[dict[str, Any]] = []
    for rank, each in sorted(spans.items()):
        events.append(name_process(rank + 1, names[rank]))
        lanes: list[float] = []
        for kind, (row, title) in _ROWS.items():
            chosen = [span for span in each if span.kind == kind and span.end_s > span.begin_s]
            if kind != "item" and chosen:
                events.append(name_row(rank + 1, row, title))
            for span in sorted(chosen, key=lambda one: one.begin_s):
                lane = 0
                if kind == "item":
                    # Items overlap, and one row can only nest: each goes to the first that is free.
                    lane = next((n for n, end_s in enumerate(lanes) if end_s <= span.begin_s), len(lanes))
                    if lane == len(lanes):
                        lanes.append(0.0)
                        events.append(name_row(rank + 1, row + lane, title if lane == 0 else f"{title} {lane + 1}"))
                    lanes[lane] = span.end_s
                category, _, rest = span.name.partition(" ")
                name, cat = (rest, category) if kind == "item" else (span.name, kind)
                events.append(
                    complete_event(rank + 1, row + lane, name, cat, span.begin_s - start_s, span.end_s - start_s)
                )
    zeros = {str(rank): start_s + offset_s for rank, offset_s in (times_of_day or {}).items() if rank in spans}
    return {"traceEvents": events, "displayTimeUnit": "ms", ZERO: zeros}
