"""Formats a plan for people: one line per unit, with runs of dense units folded."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from poseidon.planning.planner import Plan, PlanEntry

_HEADER = ("layer", "shape", "rows", "route", "bytes/step", "why")


def format_bytes(size: float) -> str:
    """Format a number of bytes for people: ``37.7 MB``."""
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= 0.9995 * scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} B"


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return aligned columns; numbers are left-aligned too, so that they line up with the text."""
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([text[0], "  ".join("-" * width for width in widths), *text[1:]])


def format_plan(plan: Plan) -> str:
    """Return the table with its totals and the cluster it was planned for."""
    rows = [_row(entry) for entry in _folded(plan.entries)]
    parts = [format_table(_HEADER, rows)]
    total, dense = plan.wire_bytes, plan.allreduce_bytes
    if total > 0:
        saved = f", {dense / total:.1f}x less than allreduce alone ({format_bytes(dense)})" if dense > total else ""
        parts.append(f"one machine sends {format_bytes(total)} per step{saved}")
    else:
        parts.append("one worker: nothing is exchanged")
    lossy = [entry for entry in plan.entries if entry.is_lossy]
    if lossy:
        exact = sum(entry.exact_bytes for entry in plan.entries)
        parts.append(
            f"lossy, as asked for: {len(lossy)} of {len(plan.entries)} layers; "
            f"exact, one machine would send {format_bytes(exact)} per step"
        )
    parts.append(f"cluster: {plan.cluster}")
    if plan.tried:
        parts.append(format_tried(plan))
    return "\n".join(parts)


def format_tried(plan: Plan) -> str:
    """Return what was tried before the plan was kept, and what it took."""
    measured = [one for one in plan.tried if one.measured_s is not None]
    origin = " in an earlier run" if plan.is_remembered else ""
    if not measured:
        (best, *others) = [one.predicted_s * 1e3 for one in plan.tried]
        return (
            f"plan: {plan.name}; predicted {best:.3g} ms{origin}, clearly faster than the others ({min(others):.3g} ms)"
        )
    rows = [
        (
            one.name,
            f"{1e3 * one.predicted_s:.3g} ms",
            f"{1e3 * (one.measured_s or 0):.3g} ms",
            "kept" * (one.name == plan.name),
        )
        for one in measured
    ]
    return f"plans tried{origin}, time of one step:\n" + format_table(("plan", "predicted", "measured", ""), rows)


def _row(entry: PlanEntry | tuple[PlanEntry, ...]) -> tuple[str, ...]:
    if isinstance(entry, tuple):
        first, last = entry[0], entry[-1]
        size = sum(one.cost.wire_bytes for one in entry)
        name = f"{first.unit} ... {last.unit}"
        return (name, f"{len(entry)} units", "", first.route, format_bytes(size), first.why)
    shape = " + ".join("x".join(map(str, shape)) or "1" for shape in entry.shape)
    rows = "" if entry.rows is None else f"{entry.rows:.4g}"
    return (entry.unit, shape, rows, entry.route, format_bytes(entry.cost.wire_bytes), entry.why)


def _folded(entries: Sequence[PlanEntry]) -> list[PlanEntry | tuple[PlanEntry, ...]]:
    """Fold runs of more than three dense units of one route into one line: a ResNet has about 150 of them."""
    folded: list[PlanEntry | tuple[PlanEntry, ...]] = []
    for (kind, _), group in itertools.groupby(entries, key=lambda entry: (entry.kind, entry.route)):
        run = tuple(group)
        folded.extend([run] if kind == "dense" and len(run) > 3 else run)
    return folded
