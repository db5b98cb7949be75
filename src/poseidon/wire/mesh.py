"""A few bytes from every rank to every rank, with the least work: one connection per pair, and no threads.

Besides messages, which have numbers and wait until they are asked for, there are signals: of these only a rank's last
one is kept.

A collective wakes several threads on every machine and passes its values around in as many hops as there are ranks.
Here a rank writes to each connection and goes on; whoever needs the bytes reads them later, when the kernel usually has
them already. What the kernel does not take at once leaves while this rank waits for others. Threads exist only while
the ranks connect (``door.py``).
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from poseidon import failpoints
from poseidon.errors import WireError
from poseidon.job.elastic import epoch_is_over
from poseidon.wire.door import Door, enter, listen, set_patience
from poseidon.wire.handshake import Credentials
from poseidon.wire.sending import shut, unacknowledged
from poseidon.wire.tls import is_damage

MOST_BYTES = 64 << 20
"""In one message, and waiting for a rank that does not read."""
SOON_S = 0.1
"""What comes by then is not worth being announced as a wait."""
LINGER_S, _LINGER_LOOK_S = 2.0, 0.001
"""How long a rank that leaves waits until its last bytes have arrived, and between two looks."""
_LOOK_S = 0.1
_HEAD = struct.Struct("<QQI")
"""Number, size and checksum of a message; then the checksum of these: a wrong size must not be waited for."""
_CHECK = struct.Struct("<I")
_START = _HEAD.size + _CHECK.size
_READ_BYTES = 1 << 16
_SIGNAL = (1 << 64) - 1
"""In the place of a message's number."""


@dataclass(frozen=True)
class Heard:
    """What is known of a rank without waiting for it."""

    at: float
    """When anything last came from it, or when it was connected."""
    signal: bytes = b""
    """Its last one."""
    ended: str = ""
    """Why nothing more can come from it; empty while its connection lasts."""


class MeshError(WireError):
    """No message came from ``rank``: its connection ended, or it was silent for too long."""

    def __init__(self, rank: int, why: str, is_broken: bool = True, is_damaged: bool = False) -> None:
        super().__init__(f"no message from rank {rank}: {why}")
        self.rank = rank
        self.is_broken = is_broken
        self.is_damaged = is_damaged
        """Whether bytes of it came, and were wrong: then nobody else can be the cause."""


class Looking(Protocol):
    """One wait, of somebody who knows whether it is worth while."""

    def look(self, peer: int) -> None:
        """Raise if nothing can come from ``peer`` any more."""


Patience = Callable[[], contextlib.AbstractContextManager[Looking | None]]


class Mesh:
    """One rank's connections; any thread may use them. It listens at ``address`` from construction on."""

    def __init__(self, rank: int, size: int, ip: str, lost_after_s: float = 30.0) -> None:
        self._rank = rank
        self._size = size
        self._listener = listen(rank, ip, backlog=size)
        name, port = self._listener.getsockname()[:2]
        self._address = (str(name), int(port))
        self.lost_after_s = lost_after_s
        """After how long without an answer a machine's connections end."""
        self._peers: dict[int, _Peer] = {}
        self._has_come = threading.Condition()
        self._is_connecting = False
        self._refused = ""
        """Why the last connection was turned away."""
        self._number = 0
        self._lock = threading.Lock()
        self._close = weakref.finalize(self, _close_all, self._listener, self._peers)
        self._close.atexit = False

    @property
    def address(self) -> tuple[str, int]:
        """Where the other ranks find this one."""
        return self._address

    def connect(self, addresses: Sequence[tuple[str, int]], credentials: Credentials, timeout_s: float) -> None:
        """Connect to all ranks, given their addresses by rank; ``WireError`` if that takes longer than ``timeout_s``.

        Of two ranks the higher one opens the connection; both prove that they know the secret. ``ConfigError`` if this
        process has too many files open for it.
        """
        deadline = time.monotonic() + timeout_s
        announced = {ip for ip, _ in addresses}
        self._is_connecting = True
        door = Door(self._listener, credentials, self._rank, self._size, self._let_in, self._note_refusal, announced)
        try:
            for peer in range(self._rank):
                left_s = deadline - time.monotonic()
                self._add(peer, enter(credentials, self._rank, peer, addresses[peer], self._address[0], left_s))
            with self._has_come:
                while self._missing and (left_s := deadline - time.monotonic()) > 0 and not epoch_is_over():
                    self._has_come.wait(min(left_s, _LOOK_S))
            if self._missing:
                last = f"; of the connections that were refused, the last one: {self._refused}" if self._refused else ""
                failure = WireError(f"they did not come within {timeout_s:g} s{last}")
                failure.peer = self._missing[0]
                raise failure
        except WireError as error:
            failure = WireError(f"rank {self._rank} is not connected to ranks {self._missing}: {error}")
            failure.peer = error.peer
            raise failure from error
        finally:
            with self._has_come:
                self._is_connecting = False
            door.close(ends_served=False)

    @property
    def _missing(self) -> list[int]:
        return [peer for peer in range(self._size) if peer != self._rank and peer not in self._peers]

    def _let_in(self, connection: socket.socket, sender: int) -> None:
        """Take a connection from the door, on a thread of its own."""
        with self._has_come:
            if not self._is_connecting or sender <= self._rank:
                connection.close()
                return
            before = self._peers.get(sender)
            if before is not None:
                # It would not come again if its first connection had not failed.
                before.close()
            self._add(sender, connection)
            self._has_come.notify()

    def _add(self, peer: int, connection: socket.socket) -> None:
        set_patience(connection, self.lost_after_s)
        self._peers[peer] = _Peer(peer, connection)

    def _note_refusal(self, _reason: str, why: str) -> None:
        self._refused = why

    def send(self, data: bytes) -> int:
        """Send bytes to all ranks, at most :data:`MOST_BYTES`, without waiting; return the message's number.

        Ranks must send equally often; the messages with one number belong together. The connection to a rank that has
        not read for too long ends, so that both hear of it.
        """
        if len(data) > MOST_BYTES:
            raise WireError(
                f"rank {self._rank} cannot send {len(data)} bytes at once to all; {MOST_BYTES} are the most"
            )
        with self._lock:
            number, self._number = self._number, self._number + 1
            message = _pack(number, data)
            if failpoints.ARMED and failpoints.hit("mesh.send", self._cut):
                message = failpoints.damaged(message)
            for peer in self._peers.values():
                peer.send(message)
        return number

    def _cut(self) -> None:
        for peer in self._peers.values():
            shut(peer.connection)

    def receive(
        self, number: int, mine: bytes, timeout_s: float, patience: Patience = contextlib.nullcontext
    ) -> list[bytes]:
        """Return the bytes of all ranks in the messages with this number, ``mine`` among them.

        Raises :class:`MeshError` if one does not come in time. After a moment in vain it enters ``patience()``, whose
        ``look`` it calls now and then with the rank that it waits for; that may raise.
        """
        now = time.monotonic()
        found = [mine if rank == self._rank else None for rank in range(self._size)]
        try:
            return self._collect(number, found, _Wait(now + min(timeout_s, SOON_S), None))
        except MeshError as error:
            if error.is_broken or timeout_s <= SOON_S:
                raise
        with patience() as waiting:
            look = None if waiting is None else waiting.look
            return self._collect(number, found, _Wait(now + timeout_s, look))

    def _collect(self, number: int, found: list[bytes | None], wait: _Wait) -> list[bytes]:
        """Wait for what has not been found yet, and for the kernel to take what has not left."""
        data = []
        for rank, before in enumerate(found):
            one = found[rank] = self._receive(rank, number, wait) if before is None else before
            data.append(one)
        # The others wait for what is left here, and this rank may not come back for long.
        while full := [rank for rank, peer in self._peers.items() if peer.is_full and peer.flush()]:
            self._wait(None, full[0], "it does not read", wait)
        return data

    def signal(self, data: bytes) -> None:
        """Send a signal to all ranks; their :meth:`hear` returns it. Never waits."""
        message = _pack(_SIGNAL, data)
        with self._lock:
            for peer in self._peers.values():
                peer.send(message)

    def hear(self) -> dict[int, Heard]:
        """Read what has come, send what the kernel has not taken; return what is known of the other ranks."""
        for peer in self._peers.values():
            peer.flush()
        return {rank: peer.hear() for rank, peer in self._peers.items()}

    def part(self) -> None:
        """Send nothing more, so that what was sent reaches the others before they see the connections end."""
        for peer in self._peers.values():
            peer.part()
        # If this process ended now, the answer to a heartbeat on its way here would be a reset, which may overtake.
        deadline = time.monotonic() + LINGER_S
        while any(peer.is_leaving for peer in self._peers.values()) and time.monotonic() < deadline:
            if epoch_is_over():  # the connections are cut, and somebody may be gone
                return
            time.sleep(_LINGER_LOOK_S)

    def _receive(self, rank: int, number: int, wait: _Wait) -> bytes:
        peer = self._peers[rank]
        while (data := peer.take(number)) is None:
            self._wait(peer, rank, "it was silent for too long", wait)
        return data

    def _wait(self, source: _Peer | None, rank: int, complaint: str, wait: _Wait) -> None:
        """Wait until ``source`` has sent something, or any rank has read; until the deadline for ``rank``."""
        left_s = wait.deadline - time.monotonic()
        if left_s <= 0:
            raise MeshError(rank, complaint, is_broken=False)
        if wait.look is not None:
            wait.look(rank)
        poll = select.poll()
        if source is not None:
            poll.register(source.connection, select.POLLIN)
        for other in self._peers.values():
            if other.is_full and other.flush():
                poll.register(other.connection, select.POLLOUT | (select.POLLIN if other is source else 0))
        # Not for too long: another thread may take what comes.
        poll.poll(min(left_s, _LOOK_S) * 1e3)

    def close(self) -> None:
        """Close all connections."""
        self._close()


@dataclass(frozen=True)
class _Wait:
    """How long to wait."""

    deadline: float
    look: Callable[[int], None] | None


class _Peer:
    """The connection to one rank, what has come from it, and what still has to leave."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self._rank = rank
        self._data = bytearray()
        self._unsent = b""
        self._end: tuple[str, bool] | None = None
        """Why nothing more can be read, and whether because a message was damaged."""
        self._heard_at = time.monotonic()
        self._signal = b""
        self._messages: dict[int, bytes] = {}
        """By number, what nobody has asked for yet."""
        # An encrypted connection cannot be read and written by two threads at a time.
        self._lock = threading.Lock()

    def close(self) -> None:
        self.connection.close()

    @property
    def is_full(self) -> bool:
        """Whether the kernel has not taken everything."""
        return bool(self._unsent)

    @property
    def is_leaving(self) -> bool:
        """Whether bytes that were sent may not have arrived."""
        return self._end is None and unacknowledged(self.connection) > 0

    def send(self, data: bytes) -> None:
        with self._lock:
            self._unsent += data
            self._flush()
            if len(self._unsent) > MOST_BYTES:
                # Nothing reads at the other end. What came next would be misread, so nothing does.
                self._unsent = b""
                shut(self.connection)

    def flush(self) -> bool:
        """Send what is left, as far as the kernel takes it; return whether anything is left."""
        with self._lock:
            self._flush()
            return self.is_full

    def _flush(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self.connection.send(self._unsent) :]
        except (BlockingIOError, ssl.SSLWantWriteError):
            pass
        except OSError:
            # Whoever waits for an answer reports that the connection has ended.
            self._unsent = b""

    def take(self, number: int) -> bytes | None:
        """Return the message with this number, None if it has not come."""
        with self._lock:
            while number not in self._messages and self._read():
                pass
            return self._messages.pop(number, None)

    def hear(self) -> Heard:
        """Read what has come; return what is known of this rank."""
        with self._lock:
            with contextlib.suppress(MeshError):
                while self._read():
                    pass
            return Heard(self._heard_at, self._signal, "" if self._end is None else self._end[0])

    def part(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._flush()
            # Closing a connection with something unread would reset it, and what was sent could be lost.
            with contextlib.suppress(MeshError):
                while self._read():
                    pass
            socket.socket.shutdown(self.connection, socket.SHUT_WR)

    def _read(self) -> bool:
        """Take what has come; return whether anything had."""
        if self._end is None:
            try:
                data = self.connection.recv(_READ_BYTES)
                if not data:
                    self._end = "its connection ended", False
            except (BlockingIOError, ssl.SSLWantReadError):
                return False
            except OSError as error:
                if is_damage(error):
                    self._give_up(f"a message is damaged: {error}")
                else:
                    self._end = str(error), False
        if self._end is not None:
            why, is_damaged = self._end
            raise MeshError(self._rank, why, is_damaged=is_damaged)
        self._heard_at = time.monotonic()
        self._data += data
        while len(self._data) >= _START and self._unpack():
            pass
        return True

    def _unpack(self) -> bool:
        """Take one message from the bytes that have come; return whether it was there."""
        number, size, checksum = _HEAD.unpack_from(self._data)
        (expected,) = _CHECK.unpack_from(self._data, _HEAD.size)
        found = zlib.crc32(self._data[: _HEAD.size])
        if found != expected:
            return self._give_up(f"the head of a message is damaged: its checksum is {found:08x}, not {expected:08x}")
        if size > MOST_BYTES:
            return self._give_up(f"it sent {size} bytes at once; {MOST_BYTES} are the most")
        end = _START + size
        if len(self._data) < end:
            return False
        message = bytes(self._data[_START:end])
        found = zlib.crc32(message)
        if found != checksum:
            return self._give_up(f"message {number} is damaged: its checksum is {found:08x}, not {checksum:08x}")
        if number == _SIGNAL:
            self._signal = message
        else:
            self._messages[number] = message
        del self._data[:end]
        return True

    def _give_up(self, why: str) -> bool:
        """Read nothing more; the other end hears of it too. What came before can still be taken."""
        self._end = why, True
        shut(self.connection)
        return False


def _pack(number: int, data: bytes) -> bytes:
    head = _HEAD.pack(number, len(data), zlib.crc32(data))
    return head + _CHECK.pack(zlib.crc32(head)) + data


def _close_all(listener: socket.socket, peers: dict[int, _Peer]) -> None:
    listener.close()
    for peer in peers.values():
        peer.close()
