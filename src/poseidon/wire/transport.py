"""What routes and servers may ask of the wire, whatever carries the bytes."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from poseidon import failpoints
from poseidon.errors import FrameError, WireError
from poseidon.wire.message import Buffer, Header, Kind

_log = logging.getLogger(__name__)

Handler = Callable[[Header, memoryview], None]
"""Receives one message, on a receive thread of the wire; messages from different senders may arrive concurrently on
different threads. The view holds bytes and stays valid as long as it, or anything made from it
(``numpy.frombuffer``), is referenced. A handler may send, and must not wait for messages."""

Placer = Callable[[Header], memoryview | None]
"""Returns the memory for the payload of an incoming message, ``header.length`` writable bytes, or None to let the wire
allocate it. Called on the receive thread before the payload is read. If it or the handler raises, the
sender is lost."""

LostHandler = Callable[[int, str], None]
"""Receives the rank of a peer whose connection ended without a goodbye, and why; on a wire thread."""


class Transport(ABC):
    """Messages between ``size`` ranks, each of which has one transport."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.max_message_bytes = 1 << 62
        """The longest payload of one message."""
        self.stats = WireStats()
        self.route = ""
        """What its bytes are counted as; empty: whoever uses it counts them."""
        self._handlers: dict[Kind, Handler] = {}
        self._placers: dict[Kind, Placer] = {}
        self._lost_handlers: list[LostHandler] = []
        self._awaiting: list[Callable[[int], bool]] = []
        self._left: set[int] = set()
        """Peers that said goodbye, and from which nothing more can come."""
        self._losing = threading.Lock()
        self._lost: list[tuple[int, str]] = []

    def listen(self, kind: Kind, handler: Handler, placer: Placer | None = None) -> None:
        """Pass every message of ``kind`` to ``handler``; call it before the first such message can arrive.

        With ``placer``, payloads are received into the memory it returns, and the handler gets a view of that.
        """
        if placer is not None:
            self._placers[kind] = placer
        if kind in self._handlers:
            raise WireError(f"rank {self.rank} already listens to {kind.name}; one handler per kind")
        self._handlers[kind] = handler

    def listen_lost(self, handler: LostHandler) -> None:
        """Also call ``handler`` when a peer vanishes without closing its transport, or has vanished already."""
        with self._losing:
            self._lost_handlers.append(handler)
            lost = list(self._lost)
        for peer, why in lost:
            handler(peer, why)

    def listen_left(self, awaits: Callable[[int], bool]) -> None:
        """Lose a peer that leaves in good order while ``awaits(peer)``: nothing more comes from it.

        Call :meth:`check_left` when something begins to be awaited, since a peer may have left before.
        """
        self._awaiting.append(awaits)

    def check_left(self) -> None:
        """Lose the peers that have left and are awaited."""
        for peer in list(self._left):
            if any(awaits(peer) for awaits in self._awaiting):
                self._left.discard(peer)
                self._tell_lost(peer, "it has left, though its part was still needed: did it fail, or do fewer steps?")

    def send(
        self,
        peer: int,
        header: Header,
        payload: Buffer | None = None,
        *,
        priority: int = 0,
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Queue a message without blocking. Any thread may call it, and ``peer`` may be this rank.

        Lower priorities leave first, equal ones in the order they were sent. The payload must not change until
        ``on_sent`` is called, on any thread. ``header.length`` is the payload's size in bytes.
        """
        self._queue((peer,), header, payload, priority, on_sent)

    def send_all(
        self, peers: Sequence[int], header: Header, payload: Buffer | None = None, *, priority: int = 0
    ) -> None:
        """Queue the same message to each of several peers, as :meth:`send` does one; it is checked and packed once."""
        if peers:
            self._queue(peers, header, payload, priority, None)

    def _queue(
        self,
        peers: Sequence[int],
        header: Header,
        payload: Buffer | None,
        priority: int,
        on_sent: Callable[[], None] | None,
    ) -> None:
        for peer in peers:
            if not 0 <= peer < self.size:
                raise WireError(f"rank {self.rank} cannot send to rank {peer}; there are {self.size} ranks")
        view = _payload_view(header, payload)
        self._check_sendable(peers[0], header)
        self.stats.count_sent(view.nbytes, len(peers))
        self._send(peers, header, view, priority, on_sent)

    def sent_by_route(self) -> dict[str, int]:
        """Return the bytes sent so far, by the name of the route; headers do not count."""
        return {self.route: self.stats.sent_bytes} if self.route else {}

    @abstractmethod
    def _check_sendable(self, peer: int, header: Header) -> None:
        """Raise ``WireError`` if this message cannot be sent now."""

    @abstractmethod
    def _send(
        self,
        peers: Sequence[int],
        header: Header,
        payload: memoryview,
        priority: int,
        on_sent: Callable[[], None] | None,
    ) -> None:
        """Queue a message that was checked to each of ``peers``."""

    @abstractmethod
    def close(self) -> None:
        """Send queued messages until the deadline, and end all threads. Further calls do nothing."""

    def give_up(self, why: str, culprit: int | None = None) -> None:  # noqa: B027 - without threads nobody waits
        """Tell all other ranks at once that this one will not go on, so that nobody waits for it; only once.

        They lose the rank that this one lost first, or ``culprit``, or this one if it has lost none.
        """

    @property
    def is_to_blame(self) -> bool:
        """Whether the first peer was lost by a fault of this rank: it could not handle a message, or not send one."""
        return False

    def _place(self, header: Header) -> memoryview | None:
        """Return the memory for the payload, None for any; raise ``FrameError`` if nothing listens to it."""
        if header.kind not in self._handlers:
            raise FrameError("unheard", f"rank {header.sender} sent {header.kind.name}, to which nothing listens here")
        placer = self._placers.get(header.kind)
        try:
            if failpoints.ARMED:
                failpoints.hit("wire.place")
            place = None if placer is None else placer(header)
        except FrameError:
            raise
        except Exception as error:
            raise self._explain("placer", header, error) from error
        if place is not None and place.nbytes != header.length:
            raise FrameError("length", f"{header} came, but {place.nbytes} bytes were expected")
        return place

    def _deliver(self, header: Header, payload: memoryview) -> None:
        """Pass a message that was checked to its handler; ``FrameError`` if that fails, so that its sender is lost."""
        self.stats.count_received(payload.nbytes)
        try:
            if failpoints.ARMED:
                failpoints.hit("wire.handle")
            self._handlers[header.kind](header, payload)
        except Exception as error:
            raise self._explain("handler", header, error) from error

    def _explain(self, reason: str, header: Header, error: Exception) -> FrameError:
        _log.error("rank %d could not handle %s", self.rank, header, exc_info=error)
        return FrameError(reason, f"{header.name} failed here: {type(error).__name__}: {error}")

    def _refuse(self, reason: str, message: str) -> None:
        """Count a refusal, and log the first for each reason."""
        if self.stats.count_refused(reason):
            _log.warning("rank %d refused: %s (counted from now on, not shown again)", self.rank, message)

    def _tell_lost(self, peer: int, why: str) -> None:
        with self._losing:
            self._lost.append((peer, why))
            handlers = list(self._lost_handlers)
        for handler in handlers:
            try:
                handler(peer, why)
            except Exception:
                # The others must hear of it all the same.
                _log.exception("rank %d could not handle the loss of rank %d (%s)", self.rank, peer, why)


class WireStats:
    """Traffic so far; headers do not count as bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sent_messages = 0
        self.sent_bytes = 0
        self.received_messages = 0
        self.received_bytes = 0
        self.refused: Counter[str] = Counter()
        """Frames and connections refused, by reason."""

    def count_sent(self, size_bytes: int, messages: int = 1) -> None:
        """Count messages sent, of this size each."""
        with self._lock:
            self.sent_messages += messages
            self.sent_bytes += size_bytes * messages

    def count_received(self, size_bytes: int) -> None:
        """Count one message accepted."""
        with self._lock:
            self.received_messages += 1
            self.received_bytes += size_bytes

    def count_refused(self, reason: str) -> bool:
        """Count one refusal; return whether it is the first for this reason."""
        with self._lock:
            self.refused[reason] += 1
            return self.refused[reason] == 1


def _payload_view(header: Header, payload: Buffer | None) -> memoryview:
    """Return the payload's bytes, after the checks that every transport makes before it sends."""
    if payload is None:
        payload = b""
    view = payload.data if isinstance(payload, np.ndarray) else memoryview(payload)
    if not view.c_contiguous:
        raise WireError(f"the payload of {header} is not contiguous; send one contiguous piece")
    if header.length != view.nbytes:
        raise WireError(f"{header} announces {header.length} bytes, but its payload has {view.nbytes}")
    return view.cast("B") if view.nbytes else memoryview(b"")
