"""Failpoints: named places in the real code where something goes wrong on request, to see what a job does then.

::

    POSEIDON_FAILPOINTS="unsafe wire.send=raise@20#1 disk.write=delay:0.5" poseidon run --nproc 2 train.py

Rank 1 fails when it sends its 20th message on the wire, and every rank takes half a second longer to write its first
file. A word is ``PLACE=ACTION``; ``@N`` means the Nth time (default 1), ``#RANK`` one worker only (default all). The
first word must be ``unsafe``, so that nobody breaks a job by accident.

A place costs one look at an empty dictionary while nothing is armed::

    if failpoints.ARMED and failpoints.hit("wire.send", drop):
        ...  # send something damaged
"""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from poseidon.errors import ConfigError, unknown_name

VARIABLE = "POSEIDON_FAILPOINTS"
CONSENT = "unsafe"
EXIT_STATUS = 86
"""Of a process that ends at a failpoint."""


class FailpointError(RuntimeError):
    """What a failpoint raises; to the rest of the code, an error that nobody foresaw."""


_ANYWHERE = ("raise", "delay", "exit")
_CONNECTED = (*_ANYWHERE, "drop")

PLACES: dict[str, tuple[str, ...]] = {
    "wire.handshake": _CONNECTED,  # a connection is to be authenticated, at either end
    "wire.send": (*_CONNECTED, "damage"),  # a message leaves
    "wire.receive": _CONNECTED,  # a message's header has come
    "wire.place": _ANYWHERE,  # room is to be found for a payload
    "wire.handle": _ANYWHERE,  # a message is whole and correct
    "mesh.send": (*_CONNECTED, "damage"),  # a roll call begins
    "pairs.help": _ANYWHERE,  # the thread of factors and rows has something to do
    "levels.sum": _ANYWHERE,  # the thread of sums inside a machine has something to do
    "server.step": _ANYWHERE,  # the thread that steps the optimizer on a server has something to do
    "disk.write": _ANYWHERE,  # a file is complete, and goes to the disk; raises an error of the disk
}
"""Where something can go wrong, and what."""

_WORD = re.compile(r"([a-z.]+)=([a-z]+)(?::(\d+(?:\.\d+)?))?(?:@([1-9]\d*))?(?:#(\d+))?")
_FORM = "PLACE=ACTION, then perhaps @TIME and #RANK, such as wire.send=raise@20#1 or disk.write=delay:0.5"


@dataclass(eq=False)
class Failpoint:
    """One thing that goes wrong once."""

    place: str
    action: str
    seconds: float
    """For ``delay``."""
    time: int
    """Which time, counted from 1."""
    rank: int | None
    """On which worker; None: on all."""
    hits: int = field(default=0, compare=False)


ARMED: dict[str, list[Failpoint]] = {}
"""By place. Empty unless somebody asked for it: look here before :func:`hit`."""

_LOCK = threading.Lock()
_ASKED: list[Sequence[str]] = []
"""What the environment has asked for: a second team does not arm it again."""


def arm_as_asked(words: Sequence[str], rank: int) -> None:
    """Arm what the words of the environment variable ask for, once in a process."""
    if not words or _ASKED:
        return
    if words[0] != CONSENT:
        raise ConfigError(
            f"{VARIABLE} makes jobs fail on purpose; if that is what you want, its first word must be {CONSENT!r}, "
            f"not {words[0]!r}"
        )
    arm(words[1:], rank)
    _ASKED.append(words)


def arm(words: Sequence[str], rank: int) -> None:
    """Arm failpoints of this process, the worker ``rank``; times count from now."""
    points = [parse(word) for word in words]
    for point in points:
        if point.rank in (None, rank):
            ARMED.setdefault(point.place, []).append(point)


def disarm() -> None:
    """Let everything go well again."""
    ARMED.clear()


def parse(word: str) -> Failpoint:
    """Return what a word such as ``wire.send=raise@20#1`` asks for. Pure."""
    match = _WORD.fullmatch(word)
    if match is None or (match[2] == "delay") != (match[3] is not None):
        raise ConfigError(f"a word of {VARIABLE} is {word!r}, expected {_FORM}")
    place, action, seconds, time_text, rank = match.groups()
    if place not in PLACES:
        raise unknown_name("failpoint", place, list(PLACES))
    if action not in PLACES[place]:
        raise unknown_name(f"action of failpoint {place}", action, PLACES[place])
    return Failpoint(place, action, float(seconds or 0), int(time_text or 1), None if rank is None else int(rank))


def hit(place: str, drop: Callable[[], None] | None = None) -> bool:
    """Do what is armed for this time; return whether what is about to leave must be damaged.

    ``drop`` ends the connection at hand, as if the network had.
    """
    with _LOCK:
        due = []
        for point in ARMED.get(place, ()):
            point.hits += 1
            if point.hits == point.time:
                due.append(point)
    is_damage = False
    for point in due:
        if point.action == "raise":
            text = f"failpoint {place}, time {point.time}"
            raise OSError(errno.EIO, text) if place == "disk.write" else FailpointError(text)
        if point.action == "exit":
            os._exit(EXIT_STATUS)
        if point.action == "delay":
            time.sleep(point.seconds)
        elif point.action == "drop":
            assert drop is not None
            drop()
        is_damage |= point.action == "damage"
    return is_damage


def damaged(data: bytes) -> bytes:
    """Return bytes of which one bit is wrong."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
