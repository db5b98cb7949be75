"""Defects that were mended, put back one at a time: the simulation must find each of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from poseidon.errors import FrameError
from poseidon.launch import cause
from poseidon.tables.node import Node
from poseidon.tables.post import Post
from poseidon.team.watch import Watch
from poseidon.wire import mesh, tcp
from poseidon.wire.door import Door
from poseidon.wire.message import Kind
from poseidon.wire.tcp import TcpTransport, check_payload, read_large


def _take(self: TcpTransport, connection: Any, header: Any) -> None:
    payload = self._place(header)
    payload = self._pool.lend(header.length) if payload is None else payload
    read_large(connection, payload)
    try:
        check_payload(header, payload)
    except FrameError as error:
        self._refuse(error.reason, str(error))
    else:
        self._deliver(header, payload)


def _admit(self: Door) -> None:
    with contextlib.suppress(OSError):
        while True:
            self._let_in(self._listener.accept()[0])


def _unpack(self: Any) -> bool:
    number, size, _ = mesh._HEAD.unpack_from(self._data)
    end = mesh._START + size
    if size > mesh.MOST_BYTES or len(self._data) < end:
        return False
    self._messages[number] = bytes(self._data[mesh._START : end])
    del self._data[:end]
    return True


def _verdict(self: Watch, _peer: int | None, error: BaseException) -> str:
    return _REAL_VERDICT(self, None, error)


_REAL_VERDICT = Watch._verdict


def _tell_at_the_end(self: Watch) -> Any:
    beat = _REAL_BEAT(self)
    return beat if self._stop.is_set() else replace(beat, left="", why="")


_REAL_BEAT = Watch._beat


def _answer_error(self: Post, header: Any, error: Any) -> None:
    if header.kind is not Kind.ERROR:
        self.send(header.sender, Kind.ERROR, header.subject, header.clock, str(error).encode())


def _tell_others(self: Node, rank: int, lost: int, clock: int) -> None:
    if rank != lost:
        _REAL_TELL(self, rank, lost, clock)


_REAL_TELL = Node._tell_loss


def _as_found(found: Any, _deaths: Any, _running: Any) -> Any:
    return found


@contextlib.contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Put old code in the place of new."""
    with contextlib.ExitStack() as stack:
        for target, name, value in changes:
            stack.enter_context(mock.patch.object(target, name, value))
        yield


RELAPSES: dict[str, tuple[str, Callable[[], Any]]] = {
    "a damaged payload is counted, and nobody is told": ("flip", lambda: replaced((TcpTransport, "_take", _take))),
    "the mesh has no checksums": ("flip", lambda: replaced((mesh._Peer, "_unpack", _unpack))),
    "one accept that fails ends the door": ("descriptors", lambda: replaced((Door, "_admit", _admit))),
    "nothing limits the silence of a connection": (
        "half-open",
        lambda: replaced(*((module, "set_patience", lambda *_: None) for module in (tcp, mesh))),
    ),
    "a broken connection is blamed on the slowest worker": ("reset", lambda: replaced((Watch, "_verdict", _verdict))),
    "the launcher names the first to complain": (
        "reset",
        lambda: replaced((cause, "accused", lambda _deaths: None)),
    ),
    "a table in lockstep goes on without a worker that was lost before": (
        "reset",
        lambda: replaced((Node, "_receive_hello", lambda self, *args: self.holder.open(*args))),
    ),
    "nobody tells a worker that it was given up": (
        "silent reset",
        lambda: replaced((Node, "_tell_loss", _tell_others), (Post, "_answer_error", _answer_error)),
    ),
    # The launcher makes up for it in nearly all cases, so that must be taken back, too.
    "who gives up tells it only after its connections have ended": (
        "freeze",
        lambda: replaced((Watch, "_beat", _tell_at_the_end), (cause, "_behind", _as_found)),
    ),
}
"""By name: the kind of fault that shows it, and how to bring it back."""
