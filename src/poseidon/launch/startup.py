"""How far a job is on its way to its first step, in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from poseidon.launch.places import Place
from poseidon.observe.windows import Window


def describe_start(places: Sequence[Place], heard: Mapping[int, str], windows: Sequence[Window]) -> str:
    """Return what the job waits for; ``heard`` has the workers that reported, with what they said they do."""
    count, absent = len(places), [place for place in places if place.rank not in heard]
    if len(absent) == count:
        return "starting: the workers load their libraries"
    if absent:
        others = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        return f"starting: {count - len(absent)} of {count} workers are there, {absent[0].label}{others} not yet"
    quiet = [window.rank for window in windows if not window.records]
    if quiet:
        return f"starting: {places[quiet[0]].label} {heard[quiet[0]] or 'prepares'}"
    late = next((one for one in windows if one.last.where), windows[0])
    where = f", {late.last.where}" if late.last.where else ""
    how = f"waits for {late.last.waits_for}" if late.last.waits_for else f"prepares{where}"
    return f"starting: no step yet; {places[late.rank].label} {how}"
