"""What one worker reports of itself a few times a second: one record, small enough for one write to a pipe. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from poseidon.observe.links import LinkUse, pack_links, unpack_links

_LONGEST_NAME = 90
_MOST_WAITS = 6
_MOST_PLACES = 3
_MOST_ROUTES = 12


@dataclass(frozen=True)
class Record:
    """One worker's last fraction of a second. Times are seconds of this worker, waits for others not included."""

    at_s: float = 0.0
    """On the worker's own clock, which only it knows."""
    span_s: float = 0.0
    """Time since the record before."""
    step: int = 0
    steps: int = 0
    """Completed in the span."""
    samples: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    between_s: float = 0.0
    """From the end of a backward to the next forward: landing, optimizer, the next batch."""
    wait_s: float = 0.0
    """Waited for others, in all phases."""
    waits_s: Mapping[str, float] = field(default_factory=dict)
    """The largest of them, by what was waited for."""
    places: Mapping[str, int] = field(default_factory=dict)
    """Where it was found between steps, sample by sample: ``input``, ``optimizer``, or a line of the user's program."""
    doing: int = 0
    """The phase at the end of the span."""
    doing_s: float = 0.0
    """For how long."""
    waits_for: str = ""
    """What it waits for now."""
    where: str = ""
    """The line of the program it is in, if it has been in one phase for long."""
    links: Mapping[str, LinkUse] = field(default_factory=dict)
    """By the peer's address."""
    ip: str = ""
    """Its own address for the others."""
    memory_bytes: int = 0
    device_bytes: int = 0
    """Memory taken on its GPU."""
    device_busy: float = -1.0
    """Share of the time that its GPU was in use; negative: not known."""
    cpu_s: float = 0.0
    """Processor time of all its threads in the span."""
    delay_s: float = 0.0
    """How long the training thread waited for a processor."""
    stalled_s: float = 0.0
    """How long the whole process stood still."""
    faults: int = 0
    """Pages that had to be read from disk."""
    routes: Mapping[str, int] = field(default_factory=dict)
    """Bytes sent in the span, by route."""
    queued: int = 0
    """Messages that wait in the wire's queues now."""
    queued_bytes: int = 0
    """Their bytes."""
    is_async: bool = False
    """Whether the device computes on its own, so that the times are the host's."""

    def pack(self) -> dict[str, Any]:
        """Return it as plain data, short: what is zero or empty is left out."""
        data: dict[str, Any] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name == "links":
                value = pack_links(value)
            elif one.name == "waits_s":
                first = sorted(value, key=lambda what: -value[what])[:_MOST_WAITS]
                value = {shorten(what): round(value[what], 4) for what in first}
            elif one.name == "places":
                first = sorted(value, key=lambda place: -value[place])[:_MOST_PLACES]
                value = {shorten(place): value[place] for place in first}
            elif isinstance(value, float):
                value = round(value, 5)
            elif isinstance(value, str):
                value = shorten(value)
            elif one.name == "routes":
                value = {shorten(route): count for route, count in list(value.items())[:_MOST_ROUTES]}
            if value != one.default and value != {}:
                data[one.name] = value
        return data

    @classmethod
    def unpack(cls, data: object) -> Record | None:
        """Return the record in plain data that a worker sent; None if it is not one of this version."""
        if not isinstance(data, dict):
            return None
        try:
            return cls(
                **{one.name: _CONVERTERS[str(one.type)](data[one.name]) for one in fields(cls) if one.name in data}
            )
        except (TypeError, ValueError, OverflowError):
            return None


def shorten(name: str, most: int = _LONGEST_NAME) -> str:
    """Return a name that takes at most so many bytes of JSON: a line that is too long for the pipe is lost whole."""
    while len(json.dumps(name)) > most + 2:
        name = name[: min(most, len(name) - 1)]
    return name


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def _numbers(data: object) -> dict[str, float]:
    if not isinstance(data, dict):
        raise TypeError(data)
    return {str(name): _finite(value) for name, value in data.items()}


def _counts(data: object) -> dict[str, int]:
    return {name: int(value) for name, value in _numbers(data).items()}


_CONVERTERS: dict[str, Any] = {
    "float": _finite,
    "int": int,
    "bool": bool,
    "str": str,
    "Mapping[str, float]": _numbers,
    "Mapping[str, int]": _counts,
    "Mapping[str, LinkUse]": unpack_links,
}
