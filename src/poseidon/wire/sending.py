"""Sends messages to one peer over ZeroMQ by urgency, without a thread of its own.

The thread that brings a message, and the one that learns that a connection has sent one, hand the next to ZeroMQ. They
never wait for each other: a thread that finds the sender busy leaves its news there and returns.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from poseidon.wire.cap import SharedBucket
from poseidon.wire.message import SIZE
from poseidon.wire.outbox import Outbox, Outgoing

COPY_BELOW = 16 << 10
"""Payloads smaller than this are copied: cheaper than tracking when they are sent."""


class Sender:
    """Sends to one peer over its sockets (PUSH, one per stream), which nothing else may use."""

    def __init__(
        self,
        sockets: Sequence[zmq.Socket[bytes]],
        in_flight_bytes: int,
        pacer: Pacer | None,
        on_idle: Callable[[], None],
    ) -> None:
        self._sockets = sockets
        self._outbox = Outbox(len(sockets), in_flight_bytes)
        self._pacer = pacer
        self._on_idle = on_idle
        self._lock = threading.Lock()
        self._arrived: deque[Outgoing] = deque()
        self._released: deque[_Hold] = deque()
        self._holds: dict[int, _Hold] = {}
        self._is_closed = False

    def send(self, message: Outgoing) -> None:
        """Queue a message and send what may leave."""
        self._arrived.append(message)
        self.pump()

    def pump(self) -> None:
        """Hand over to the sockets what may leave, unless another thread does so already: it will see the news."""
        while self._lock.acquire(blocking=False):
            finished: list[Callable[[], None]] = []
            try:
                if self._is_closed:
                    return
                self._take_news(finished)
                self._hand_over(finished)
                is_idle = self._outbox.idle
            finally:
                self._lock.release()
            # Outside the lock: callbacks may send again.
            for on_sent in finished:
                on_sent()
            if not self._arrived and not self._released:
                if is_idle:
                    self._on_idle()
                return

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing is in flight."""
        return not self._arrived and self._outbox.idle

    def close(self, linger_s: float) -> None:
        """Close the sockets; ZeroMQ may still send what it has for ``linger_s``."""
        with self._lock:
            self._is_closed = True
            for socket in self._sockets:
                socket.close(linger=int(linger_s * 1000))

    def _take_news(self, finished: list[Callable[[], None]]) -> None:
        while self._released:
            hold = self._released.popleft()
            self._outbox.release(hold.stream, hold.size_bytes)
            if hold.on_sent is not None:
                finished.append(hold.on_sent)
        while self._arrived:
            self._outbox.put(self._arrived.popleft())

    def _hand_over(self, finished: list[Callable[[], None]]) -> None:
        while self._outbox.waiting and (self._pacer is None or self._pacer.may_send()):
            taken = self._outbox.take()
            if taken is None:
                return
            stream, message = taken
            size_bytes = message.payload.nbytes
            if self._pacer is not None:
                self._pacer.charge(SIZE + size_bytes)
            socket = self._sockets[stream]
            if size_bytes >= COPY_BELOW:
                hold = _Hold(message.payload, self._let_go)
                hold.stream, hold.size_bytes, hold.on_sent = stream, size_bytes, message.on_sent
                self._holds[id(hold)] = hold
                socket.send(message.head, zmq.SNDMORE)
                socket.send(message.payload, copy=False)
                continue
            if size_bytes:
                socket.send(message.head, zmq.SNDMORE)
                socket.send(message.payload)
            else:
                socket.send(message.head)
            self._outbox.release(stream, size_bytes)
            if message.on_sent is not None:
                finished.append(message.on_sent)

    def _let_go(self, hold: weakref.ref[memoryview]) -> None:
        """Note that ZeroMQ dropped a payload: the kernel has it. Runs on any thread, even inside :meth:`pump`."""
        self._released.append(self._holds.pop(id(hold)))
        self.pump()


class _Hold(weakref.ref[memoryview]):
    """A payload that ZeroMQ still reads; that it drops the reference is the only sign that it was sent."""

    __slots__ = ("on_sent", "size_bytes", "stream")

    stream: int
    size_bytes: int
    on_sent: Callable[[], None] | None


class Pacer:
    """Keeps all senders of a rank under one cap: they ask before each message and are pumped when it may leave."""

    def __init__(self, rate_mbit: float) -> None:
        self._bucket = SharedBucket(rate_mbit)
        self._asked = threading.Event()
        self._is_closed = False
        self._senders: Sequence[Sender] = ()
        self._thread = threading.Thread(target=self._run, name="poseidon-wire-pacer", daemon=True)

    def start(self, senders: Sequence[Sender]) -> None:
        """Start to pump ``senders``."""
        self._senders = senders
        self._thread.start()

    def may_send(self) -> bool:
        """Return whether a message may leave now; if not, all senders are pumped as soon as one may."""
        if self._bucket.wait_s():
            self._asked.set()
            return False
        return True

    def charge(self, size_bytes: int) -> None:
        """Charge a message that leaves now."""
        self._bucket.charge(size_bytes)

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        self._asked.set()
        self._thread.join()

    def _run(self) -> None:
        first = 0
        while self._asked.wait() and not self._is_closed:
            self._asked.clear()
            time.sleep(self._bucket.wait_s())
            # Another one first each time, so that all peers share a tight cap.
            first = (first + 1) % len(self._senders)
            for sender in (*self._senders[first:], *self._senders[:first]):
                sender.pump()
