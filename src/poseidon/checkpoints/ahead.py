"""A worker that joins copies the others' state while they train, from all of them at once.

Each worker of an elastic job has a door (:class:`StateDoor`). A joiner (:func:`fetch_ahead`) asks every one of them for
its part of the pieces of a state. They lend a copy of some complete step, maybe not all of the same, which stays as it
is; so when the joiner takes its seat, only what has changed since has to travel (``sharing.py``). Whatever fails here
costs only time: what did not come, comes then.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from poseidon import files
from poseidon.checkpoints.layout import (
    Description,
    StatePiece,
    cut,
    describe_tensors,
    flatten,
    lift,
    make_room,
    view_of,
)
from poseidon.checkpoints.memory import StepMemory
from poseidon.errors import FrameError, PoseidonError
from poseidon.job.elastic import ElasticJob
from poseidon.job.secret import find_secret
from poseidon.wire.address import default_place
from poseidon.wire.door import Door, enter, listen
from poseidon.wire.handshake import Credentials, read_exactly
from poseidon.wire.reading import read_large
from poseidon.wire.secret import JobSecret
from poseidon.wire.settings import WireSettings
from poseidon.wire.writing import write_large

_log = logging.getLogger(__name__)

ANSWER_S = 5.0
"""For the launcher to say where the doors are."""
_TRIALS, _AGAIN_S = 3, 1.0
ENTER_S = 10.0
"""For a joiner to get through a door."""
SILENCE_S = 20.0
"""Without a byte, it is given up."""
_HELD, _ASKING = 0, 1
"""Ranks in the handshake: who has the state, and who asks for it."""
_SIZE = struct.Struct("<I")
_MOST_BYTES = 64 << 20
"""Of a description."""
_DONE = b"d"
_NICE = 10


@dataclass(frozen=True)
class Lent:
    """What a worker has lent to one joiner: its part of the pieces of a state."""

    place: int
    places: int
    description: Description
    rows: list[Tensor]
    """The bytes of all tensors."""


@dataclass
class Ahead:
    """What a joiner has before it takes its seat: pieces of states that may be of different steps."""

    token: str
    places: int
    description: Description = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    complete: set[int] = field(default_factory=set)
    """Whose pieces have all come."""
    took_s: float = 0.0

    @property
    def size(self) -> int:
        """Bytes of the state."""
        return sum(row.nbytes for row in self.rows)


def dealt(pieces: Sequence[StatePiece], place: int, places: int) -> list[StatePiece]:
    """Return the pieces that one of several workers sends."""
    return list(pieces[place::places])


def open_door(job: ElasticJob, memory: StepMemory) -> StateDoor:
    """Let workers that are about to join copy this one's state, and tell the launcher where."""
    door = StateDoor(memory, job.address, _encrypts())
    job.door = door.port
    return door


def copy_ahead(job: ElasticJob, is_alike: bool = True) -> Ahead | None:
    """Copy the others' state while they train; None if there is none to be had. For a worker that is about to join.

    Unless the others hold the same (``is_alike``), the first one's is copied, and not a part of each.
    """
    ahead = None
    for left in reversed(range(_TRIALS)):
        doors = job.ask_for_doors(ANSWER_S)[: None if is_alike else 1]
        ahead = fetch_ahead(doors, job.address, _encrypts()) if doors else None
        if not doors or not left or (ahead is not None and len(ahead.complete) == ahead.places):
            break
        # An epoch has ended meanwhile; the next one begins soon.
        time.sleep(_AGAIN_S)
    return ahead


def _encrypts() -> bool:
    return WireSettings.from_environment(os.environ, **default_place()).encrypt


def credentials(encrypts: bool) -> Credentials:
    """Return what both ends of a door show each other."""
    return Credentials(JobSecret(find_secret()).derive("state"), encrypts)


class StateDoor:
    """Lends the last complete step to workers that are about to join, from construction until :meth:`close`."""

    def __init__(self, memory: StepMemory, address: str, encrypts: bool) -> None:
        self._memory = memory
        self._lent: dict[str, Lent] = {}
        self._serving: set[str] = set()
        """Of these, those that are being sent."""
        self._lock = threading.Lock()
        listener = listen(_HELD, address, backlog=16)
        self.port: int = listener.getsockname()[1]
        self._door = Door(listener, credentials(encrypts), _HELD, _ASKING + 1, self._serve, _note_refusal)

    def close(self) -> None:
        """Lend nothing any more."""
        self._door.close(ends_served=True)
        self.settle()
        self._memory.take_back()

    @property
    def lent(self) -> dict[str, Lent]:
        """What joiners have, by their tokens."""
        with self._lock:
            return dict(self._lent)

    def settle(self) -> None:
        """Forget what was lent to those who have it all: they have joined, or never will."""
        with self._lock:
            self._lent = {token: self._lent[token] for token in self._serving}
            if not self._lent:
                self._memory.take_back()

    def _serve(self, connection: socket.socket, _rank: int) -> None:
        """Send one joiner its pieces, on a thread of its own."""
        token = ""
        _give_way()
        try:
            with connection:
                connection.settimeout(SILENCE_S)
                asked = _receive(connection)
                token, place, places = str(asked["token"]), int(asked["place"]), int(asked["places"])
                lent = self._lend(token, place, places)
                if lent is None:
                    _send(connection, {})
                    return
                _send(connection, {"description": lent.description})
                for piece in dealt(cut(lent.description), place, places):
                    data = view_of(lent.rows, piece)
                    write_large(connection, data)
                    connection.sendall(_SIZE.pack(zlib.crc32(data)))
                if connection.recv(1) == _DONE:
                    with self._lock:
                        self._serving.discard(token)
                    return
        except Exception as error:
            _log.debug("a joiner did not get its state: %s", error)
        self._drop(token)

    def _lend(self, token: str, place: int, places: int) -> Lent | None:
        with self._lock:  # so that it is not taken back meanwhile
            kept = self._memory.lend()
            if kept is None:
                return None
            self._serving.add(token)
            self._lent[token] = Lent(place, places, [], [])
        _, tensors = lift(kept.parts)
        if any(tensor.is_cuda for tensor in tensors):
            import torch

            torch.cuda.synchronize()  # the copy may still be under way
        threading.Thread(target=self._make_room, name="poseidon-room", daemon=True).start()
        lent = Lent(place, places, describe_tensors(tensors), flatten(tensors))
        with self._lock:
            self._lent[token] = lent
        return lent

    def _make_room(self) -> None:
        _give_way()
        self._memory.make_room()

    def _drop(self, token: str) -> None:
        """Forget a joiner that is gone."""
        with self._lock:
            self._serving.discard(token)
            self._lent.pop(token, None)
            if not self._lent:
                self._memory.take_back()


def _give_way() -> None:
    """Let training come before this thread, also where a machine has few processors."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def fetch_ahead(doors: Sequence[tuple[str, int]], source_ip: str, encrypts: bool) -> Ahead | None:
    """Copy the state of the workers behind these doors; None if nothing came. Blocks for as long as it takes."""
    began = time.monotonic()
    ahead = Ahead(secrets.token_hex(16), len(doors))
    pass_ = credentials(encrypts)
    lock = threading.Lock()
    threads = [
        threading.Thread(
            target=_fetch, args=(ahead, place, door, source_ip, pass_, lock), name="poseidon-ahead", daemon=True
        )
        for place, door in enumerate(doors)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ahead.took_s = time.monotonic() - began
    return ahead if ahead.complete else None


def _fetch(
    ahead: Ahead, place: int, door: tuple[str, int], source_ip: str, pass_: Credentials, lock: threading.Lock
) -> None:
    try:
        with enter(pass_, _ASKING, _HELD, door, source_ip, ENTER_S) as connection:
            connection.settimeout(SILENCE_S)
            _send(connection, {"token": ahead.token, "place": place, "places": ahead.places})
            description = [(str(dtype), list(shape)) for dtype, shape in _receive(connection).get("description", [])]
            with lock:
                if not ahead.rows and description:
                    _check_room(description)
                    ahead.description, ahead.rows = description, make_room(description)
                if not description or description != ahead.description:
                    return
            for piece in dealt(cut(description), place, ahead.places):
                room = view_of(ahead.rows, piece)
                if read_large(connection, room) < piece.size:
                    raise FrameError("truncated", "the connection ended inside a piece")
                (check,) = _SIZE.unpack(_read(connection, _SIZE.size))
                if zlib.crc32(room) != check:
                    raise FrameError("checksum", "a piece was damaged on its way")
            ahead.complete.add(place)
            connection.sendall(_DONE)
            with contextlib.suppress(OSError):
                connection.recv(1)  # so that it is not the first to close, and what it said is read
    except (OSError, PoseidonError, ValueError, KeyError, TypeError, MemoryError) as error:
        _log.debug("a part of the state did not come ahead: %s", error)


def _check_room(description: Description) -> None:
    size = sum(piece.size for piece in cut(description))
    if size > files.memory_bytes():
        raise MemoryError(f"{size} bytes")


def _send(connection: socket.socket, value: Any) -> None:
    data = json.dumps(value).encode()
    connection.sendall(_SIZE.pack(len(data)) + data)


def _receive(connection: socket.socket) -> dict[str, Any]:
    (size,) = _SIZE.unpack(_read(connection, _SIZE.size))
    if size > _MOST_BYTES:
        raise FrameError("length", f"a description of {size} bytes")
    value = json.loads(_read(connection, size))
    if not isinstance(value, dict):
        raise FrameError("request", "not what is said at a state's door")
    return value


def _read(connection: socket.socket, size: int) -> bytes:
    data = read_exactly(connection, size, time.monotonic() + SILENCE_S)
    connection.settimeout(SILENCE_S)
    return data


def _note_refusal(_reason: str, why: str) -> None:
    _log.debug("the state's door: %s", why)
