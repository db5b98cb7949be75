"""What routes and servers may ask of the wire, whatever carries it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable

import numpy as np

from poseidon.errors import WireError
from poseidon.wire.message import Buffer, Header, Kind

Handler = Callable[[Header, memoryview], None]
"""Receives one message, on a receive thread of the wire. The view holds bytes and stays valid as long as it, or
anything made from it (``numpy.frombuffer``), is referenced. A handler may send, and must not wait for messages."""

LostHandler = Callable[[int, str], None]
"""Receives the rank of a peer whose connection ended before it said goodbye, and why; on a wire thread."""


class Transport(ABC):
    """Messages between ``size`` ranks, each of which has one transport."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.stats = WireStats()
        self._handlers: dict[Kind, Handler] = {}
        self._lost_handlers: list[LostHandler] = []

    def listen(self, kind: Kind, handler: Handler) -> None:
        """Hand every message of ``kind`` to ``handler``; must be said before the first such message may arrive."""
        if kind in self._handlers:
            raise WireError(f"rank {self.rank} already listens to {kind.name}; one handler per kind")
        self._handlers[kind] = handler

    def listen_lost(self, handler: LostHandler) -> None:
        """Also tell ``handler`` when a peer goes away without having closed its transport."""
        self._lost_handlers.append(handler)

    @abstractmethod
    def send(
        self,
        peer: int,
        header: Header,
        payload: Buffer | None = None,
        *,
        priority: int = 0,
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Queue a message and return at once; any thread, and ``peer`` may be this rank.

        Lower priorities leave first, equal ones in the order they were sent. The payload must not change until
        ``on_sent`` is called, on any thread. ``header.length`` is the payload's size in bytes.
        """

    @abstractmethod
    def close(self) -> None:
        """Send what is queued, as far as the deadline allows, and end all threads; further calls do nothing."""

    def _payload_view(self, peer: int, header: Header, payload: Buffer | None) -> memoryview:
        """Return the payload's bytes, having checked what every transport must check before it sends."""
        if not 0 <= peer < self.size:
            raise WireError(f"rank {self.rank} cannot send to rank {peer}; there are {self.size} ranks")
        if payload is None:
            payload = b""
        view = payload.data if isinstance(payload, np.ndarray) else memoryview(payload)
        if not view.c_contiguous:
            raise WireError(f"the payload of {header} is spread over memory; send one contiguous piece")
        if header.length != view.nbytes:
            raise WireError(f"{header} announces {header.length} bytes, but its payload has {view.nbytes}")
        return view.cast("B") if view.nbytes else memoryview(b"")


class WireStats:
    """What went over the wire so far; headers are not counted as bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sent_messages = 0
        self.sent_bytes = 0
        self.received_messages = 0
        self.received_bytes = 0
        self.refused: Counter[str] = Counter()
        """Frames and connections refused, by reason."""

    def count_sent(self, size_bytes: int) -> None:
        """Count one message handed to the wire."""
        with self._lock:
            self.sent_messages += 1
            self.sent_bytes += size_bytes

    def count_received(self, size_bytes: int) -> None:
        """Count one message accepted."""
        with self._lock:
            self.received_messages += 1
            self.received_bytes += size_bytes

    def count_refused(self, reason: str) -> bool:
        """Count one refusal; say whether it is the first for this reason."""
        with self._lock:
            self.refused[reason] += 1
            return self.refused[reason] == 1
