"""The listening end of a link: answers connections and datagrams of probes that know the token, for a short time.

A connection starts with a header: token, request, and duration. ``ECHO`` sends everything back, ``SINK`` counts what
arrives and reports the count. A datagram is answered with its size, so nothing is amplified.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from poseidon.doctor.facts import BUSY

TOKEN_BYTES = 16
HEADER = struct.Struct(f"!{TOKEN_BYTES}scd")
REPORT = struct.Struct("!ddQ")
DATAGRAM = struct.Struct(f"!{TOKEN_BYTES}sI")
ECHO = b"E"
SINK = b"S"
WARM_UP = 0.2
"""Share of a stream's duration, from its first bytes on, that is not counted: the start is not representative."""
_LATE_S = 2.0
"""How much longer a stream lasts of which nothing has been counted: a busy machine may not have run us in time."""
_SILENCE_S = 5.0
_MAX_STREAM_S = 60.0
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Listening:
    """The ports of a listener."""

    ports: tuple[int, ...]
    failed: dict[int, str]
    """Requested port -> why it cannot be listened on."""
    bulk_port: int
    """A port assigned by the system, for measurements; accepts datagrams too."""


class ProbeListener:
    """Listens on one address until closed, with a thread per connection."""

    def __init__(self, address: str, ports: Sequence[int], token: bytes) -> None:
        self._token = token
        self._selector = selectors.DefaultSelector()
        self._sockets: list[socket.socket] = []
        self._family = socket.AF_INET6 if ":" in address else socket.AF_INET
        bulk_port = self._listen(address, 0)
        self._take_datagrams(address, bulk_port)
        opened, failed = [bulk_port], {}
        for port in ports:
            try:
                opened.append(self._listen(address, port))
            except OSError as error:
                failed[port] = BUSY if error.errno == errno.EADDRINUSE else str(error.strerror)
        self.listening = Listening(tuple(opened), failed, bulk_port)
        self._waker, wakened = socket.socketpair()
        self._selector.register(self._keep(wakened), selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._serve, name="doctor-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; open connections end by themselves."""
        self._waker.close()
        self._thread.join()
        self._selector.close()
        for one in self._sockets:
            one.close()

    def _listen(self, address: str, port: int) -> int:
        waiting = self._keep(socket.socket(self._family, socket.SOCK_STREAM))
        waiting.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        waiting.bind((address, port))
        waiting.listen(64)
        waiting.setblocking(False)
        self._selector.register(waiting, selectors.EVENT_READ, self._accept)
        return int(waiting.getsockname()[1])

    def _take_datagrams(self, address: str, port: int) -> None:
        waiting = self._keep(socket.socket(self._family, socket.SOCK_DGRAM))
        waiting.bind((address, port))
        waiting.setblocking(False)
        self._selector.register(waiting, selectors.EVENT_READ, self._answer_datagram)

    def _keep(self, one: socket.socket) -> socket.socket:
        self._sockets.append(one)
        return one

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                # A client may be gone before it is answered.
                with contextlib.suppress(OSError):
                    key.data(key.fileobj)

    def _accept(self, waiting: socket.socket) -> None:
        link, _ = waiting.accept()
        threading.Thread(target=self._serve_link, args=(link,), name="doctor-link", daemon=True).start()

    def _answer_datagram(self, waiting: socket.socket) -> None:
        data, sender = waiting.recvfrom(1 << 16)
        if len(data) >= DATAGRAM.size and hmac.compare_digest(data[:TOKEN_BYTES], self._token):
            waiting.sendto(DATAGRAM.pack(self._token, len(data)), sender)

    def _serve_link(self, link: socket.socket) -> None:
        with link, contextlib.suppress(OSError):
            link.settimeout(_SILENCE_S)
            header = receive_exactly(link, HEADER.size)
            token, request, seconds = HEADER.unpack(header)
            if not hmac.compare_digest(token, self._token):
                return
            if request == ECHO:
                _echo(link)
            elif request == SINK:
                _sink(link, min(seconds, _MAX_STREAM_S))


def receive_exactly(link: socket.socket, size: int) -> bytes:
    """Return ``size`` bytes; raise if the connection ends first."""
    data = b""
    while len(data) < size:
        part = link.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the connection ended early")
        data += part
    return data


def _echo(link: socket.socket) -> None:
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := link.recv(4096):
        link.sendall(data)


def _sink(link: socket.socket, seconds: float) -> None:
    """Count what arrives between the warm-up and the end, report it, and discard the rest.

    Time begins with the first bytes: of a sender that a busy machine has not run in time, what its queues let pass at
    once would be counted otherwise, as if the link were as fast.
    """
    buffer = bytearray(_CHUNK_BYTES)
    now = began = time.monotonic()
    has_come = False
    counted_from: float | None = None
    count = 0
    while (left := began + seconds + (0 if count else _LATE_S) - now) > 0:
        # The window ends on time even if nothing more arrives; the silence is part of the rate.
        link.settimeout(left)
        try:
            size = link.recv_into(buffer)
        except TimeoutError:
            now = time.monotonic()
            continue
        if not size:
            break
        now = time.monotonic()
        if not has_come:
            has_come, began = True, now
        elif counted_from is not None:
            count += size
        elif now >= began + WARM_UP * seconds:
            counted_from = now
    link.settimeout(_SILENCE_S)
    link.sendall(REPORT.pack(now if counted_from is None else counted_from, now, count))
    while link.recv_into(buffer):
        pass
