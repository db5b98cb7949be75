"""Lays what torch.profiler recorded beside a run's trace, on one clock. Pure.

Both are Chrome traces. A profile has the time of day of its worker's machine; a run's trace knows what that clock said
when the trace began (``zero_unix_s``, by worker).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from poseidon.errors import ConfigError
from poseidon.observe.chrome import name_row

ZERO = "zero_unix_s"
"""Key of a trace: for each worker, the time of day on its machine when the trace begins."""
_FIRST_ROW = 1000
"""Of a worker's rows: those of its profile, below its own."""
_MARGIN_S = 0.1
"""What lies further outside the traced steps is left out."""


def rank_of(profile: Mapping[str, Any], name: str) -> int:
    """Return the worker that a profile is of; torch notes it where there is a process group."""
    rank = (profile.get("distributedInfo") or {}).get("rank")
    if not isinstance(rank, int):
        raise ConfigError(f"{name} does not say of which worker it is; write --profile RANK={name}")
    return rank


def merge_profiles(trace: Mapping[str, Any], profiles: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the trace with each worker's profile as rows of its process, as far as it is of the traced steps."""
    zeros = trace.get(ZERO) or {}
    events: list[dict[str, Any]] = list(trace.get("traceEvents") or [])
    ends = [event["ts"] + event["dur"] for event in events if event.get("ph") == "X"]
    until = max(ends, default=0.0) + _MARGIN_S * 1e6
    for rank, profile in sorted(profiles.items()):
        zero = zeros.get(str(rank))
        if not isinstance(zero, int | float):
            raise ConfigError(f"the trace has no steps of worker {rank}; it has {', '.join(sorted(zeros)) or 'none'}")
        base_s = float(profile.get("baseTimeNanoseconds") or 0) / 1e9
        found = _on_clock(profile.get("traceEvents") or [], 1e6 * (base_s - zero), until)
        if not found:
            raise ConfigError(
                f"the profile of worker {rank} has nothing in the traced steps: profile the steps that --trace records"
            )
        events += _as_rows(found, rank + 1)
    return {**trace, "traceEvents": events}


def _on_clock(events: Sequence[Any], shift: float, until: float) -> list[dict[str, Any]]:
    """Return what took time in the traced steps, in the trace's microseconds."""
    found = []
    for event in events:
        if not (isinstance(event, dict) and event.get("ph") == "X" and event.get("cat") != "Trace"):
            continue
        start, length = event.get("ts"), event.get("dur")
        if not (isinstance(start, int | float) and isinstance(length, int | float)):
            continue
        moved = start + shift
        if moved + length >= -_MARGIN_S * 1e6 and moved <= until:
            found.append({**event, "ts": round(moved, 3)})
    return found


def _as_rows(events: Sequence[dict[str, Any]], process: int) -> list[dict[str, Any]]:
    """Return the events as rows of one process: a row for each thread and each stream of a device."""
    rows: dict[tuple[str, str], int] = {}
    found: list[dict[str, Any]] = []
    for event in events:
        is_device = event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        key = (f"GPU {event.get('pid')} stream" if is_device else "thread", str(event.get("tid")))
        if key not in rows:
            rows[key] = _FIRST_ROW + len(rows)
            found.append(name_row(process, rows[key], f"torch.profiler, {key[0]} {key[1]}"))
        found.append({**event, "pid": process, "tid": rows[key]})
    return found
