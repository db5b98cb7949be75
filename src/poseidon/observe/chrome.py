"""The events of a Chrome trace, which Perfetto (ui.perfetto.dev) shows; for real steps and for simulated ones. Pure."""

from __future__ import annotations

from typing import Any


def name_process(process: int, name: str) -> dict[str, Any]:
    """Return the event that names a process."""
    return {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}


def name_row(process: int, row: int, name: str) -> dict[str, Any]:
    """Return the event that names a row of a process."""
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": row, "args": {"name": name}}


def complete_event(process: int, row: int, name: str, category: str, start_s: float, end_s: float) -> dict[str, Any]:
    """Return something that took time."""
    return {
        "ph": "X",
        "pid": process,
        "tid": row,
        "name": name,
        "cat": category,
        "ts": round(start_s * 1e6, 3),
        "dur": round((end_s - start_s) * 1e6, 3),
    }
