"""Sends to one peer: messages wait by urgency for the next free connection."""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import queue
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from poseidon import failpoints
from poseidon.wire.cap import SharedBucket
from poseidon.wire.message import SIZE
from poseidon.wire.share import BufferShare
from poseidon.wire.writing import write_message

FIRST, LAST = -1 << 62, 1 << 62
"""Priorities: before everything else, and after it."""
_COUNT = struct.Struct("i")
CUT_S = 1.0
"""How long a thread whose connection was cut may take to notice."""


@dataclass(slots=True)
class Outgoing:
    """A message on its way out."""

    head: bytes
    payload: memoryview
    priority: int = 0
    on_sent: Callable[[], None] | None = field(default=None)


class PeerSender:
    """The connections to one peer, with a thread for each.

    A thread hands over one message at a time, so an urgent one waits for the bytes in the kernel's buffer and for the
    rest of one message. Whatever goes wrong on one connection ends all of them, and is told once.
    """

    def __init__(
        self,
        peer: int,
        connections: Sequence[socket.socket],
        bucket: SharedBucket | None,
        share: BufferShare,
        on_broken: Callable[[int, Exception], None],
    ) -> None:
        self._peer = peer
        self._connections = connections
        self._bucket = bucket
        self._share = share
        self._buffer_bytes = dict.fromkeys(connections, 0)
        self._on_broken = on_broken
        self._is_broken = False
        self._numbers = itertools.count()
        self._heap: list[tuple[int, int, Outgoing]] = []
        self._lock = threading.Lock()
        # One token per message in the heap: a counter to wait on, a tenth as costly as a Semaphore or PriorityQueue.
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(connection,), name=f"poseidon-wire-to-{peer}", daemon=True)
            for connection in connections
        ]
        for thread in self._threads:
            thread.start()

    def put(self, message: Outgoing) -> None:
        """Queue a message; drop it if the peer is gone."""
        if not self._is_broken:
            self._share.add(self._peer, message.payload.nbytes)
            with self._lock:
                heapq.heappush(self._heap, (message.priority, next(self._numbers), message))
            self._tokens.put(None)

    def waiting(self) -> list[int]:
        """Return the sizes of the messages that wait, in bytes."""
        # A copy without the lock, which senders need: what leaves meanwhile may count or not.
        return [message.payload.nbytes for _, _, message in self._heap.copy()]

    def finish(self, goodbye: bytes) -> None:
        """End every connection with ``goodbye``, after what is queued."""
        for _ in self._threads:
            self.put(Outgoing(goodbye, memoryview(b""), LAST))

    def join(self, deadline: float) -> None:
        """Wait for the threads to end; after ``deadline`` cut their connections."""
        for thread in self._threads:
            _join(thread, deadline - time.monotonic())
        if any(thread.is_alive() for thread in self._threads):
            self._cut()
            for thread in self._threads:
                _join(thread, CUT_S)

    def _cut(self) -> None:
        """End all connections: wake the threads that are blocked in one, and those that wait for a message."""
        with self._lock:
            self._is_broken = True
            self._heap.clear()
        for connection in self._connections:
            shut(connection)
        for _ in self._threads:
            self._tokens.put(None)

    def _run(self, connection: socket.socket) -> None:
        with contextlib.closing(connection):
            try:
                while self._send_next(connection):
                    pass
            except Exception as error:
                with self._lock:
                    is_first, self._is_broken = not self._is_broken, True
                # Told before the peer can notice: what it then says of this rank would be taken for the cause.
                if is_first:
                    self._share.drop(self._peer)
                    self._on_broken(self._peer, error)
                self._cut()

    def _send_next(self, connection: socket.socket) -> bool:
        """Send the most urgent message, waiting for one if necessary; return False after the last."""
        self._tokens.get()
        with self._lock:
            if self._is_broken:
                return False
            priority, _, message = heapq.heappop(self._heap)
        payload = message.payload
        if self._bucket is not None:
            self._bucket.spend(SIZE + payload.nbytes)
        self._fit_buffer(connection)
        head = message.head
        if failpoints.ARMED and failpoints.hit("wire.send", lambda: shut(connection)):
            head = failpoints.damaged(head)
        write_message(connection, head, payload)
        self._share.add(self._peer, -payload.nbytes)
        if message.on_sent is not None:
            message.on_sent()
        return priority != LAST

    def _fit_buffer(self, connection: socket.socket) -> None:
        """Give a connection the share of the link that its peer should have for the next message."""
        wanted = self._share.buffer_bytes(self._peer)
        if wanted != self._buffer_bytes[connection]:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, wanted)
            self._buffer_bytes[connection] = wanted


def shut(connection: socket.socket) -> None:
    """Wake the thread that is blocked in a connection; closing alone would not."""
    with contextlib.suppress(OSError):
        # Not an encrypted socket's own method, which would make the socket a plain one.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def unacknowledged(connection: socket.socket) -> int:
    """Return how many bytes the kernel at the other end has not confirmed; 0 if the connection is closed."""
    try:
        return int(_COUNT.unpack(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(_COUNT.size)))[0])
    except (OSError, ValueError):
        return 0


def _join(thread: threading.Thread, limit_s: float) -> None:
    if thread is not threading.current_thread():
        thread.join(max(0.0, limit_s))
