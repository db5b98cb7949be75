"""A few bytes from every rank to every rank, with the least work: one connection per pair, and no threads.

A collective wakes several threads on every machine and passes its values around in as many hops as there are ranks.
Here a rank writes to each connection and goes on; whoever needs the bytes reads them later, when the kernel usually has
them already. What the kernel does not take at once leaves while this rank waits for others. Threads exist only while
the ranks connect (``door.py``).
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Sequence

from poseidon.errors import WireError
from poseidon.wire.door import Door, enter, listen, set_patience
from poseidon.wire.handshake import Credentials
from poseidon.wire.sending import shut

MOST_BYTES = 64 << 20
"""In one message, and waiting for a rank that does not read."""
_LOOK_S = 0.1
_HEAD = struct.Struct("<QQI")
"""Number, size and checksum of a message; then the checksum of these: a wrong size must not be waited for."""
_CHECK = struct.Struct("<I")
_START = _HEAD.size + _CHECK.size
_READ_BYTES = 1 << 16


class MeshError(WireError):
    """No message came from ``rank``: its connection ended, or it was silent for too long."""

    def __init__(self, rank: int, why: str, is_broken: bool = True, is_damaged: bool = False) -> None:
        super().__init__(f"no message from rank {rank}: {why}")
        self.rank = rank
        self.is_broken = is_broken
        self.is_damaged = is_damaged
        """Whether bytes of it came, and were wrong: then nobody else can be the cause."""


class Mesh:
    """One rank's connections; any thread may use them. It listens at ``address`` from construction on."""

    def __init__(self, rank: int, size: int, ip: str, lost_after_s: float = 30.0) -> None:
        self._rank = rank
        self._size = size
        self._listener = listen(rank, ip, backlog=size)
        name, port = self._listener.getsockname()
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
                while self._missing and (left_s := deadline - time.monotonic()) > 0:
                    self._has_come.wait(left_s)
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
            for peer in self._peers.values():
                peer.send(message)
        return number

    def receive(self, number: int, mine: bytes, timeout_s: float) -> list[bytes]:
        """Return the bytes of all ranks in the messages with this number, ``mine`` among them.

        Raises :class:`MeshError` if one does not come in time.
        """
        deadline = time.monotonic() + timeout_s
        data = [mine if rank == self._rank else self._receive(rank, number, deadline) for rank in range(self._size)]
        # The others wait for what is left here, and this rank may not come back for long.
        while full := [rank for rank, peer in self._peers.items() if peer.is_full and peer.flush()]:
            self._wait(None, full[0], "it does not read", deadline)
        return data

    def _receive(self, rank: int, number: int, deadline: float) -> bytes:
        peer = self._peers[rank]
        while (data := peer.take(number)) is None:
            self._wait(peer, rank, "it was silent for too long", deadline)
        return data

    def _wait(self, source: _Peer | None, rank: int, complaint: str, deadline: float) -> None:
        """Wait until ``source`` has sent something, or any rank has read; until the deadline for ``rank``."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise MeshError(rank, complaint, is_broken=False)
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


class _Peer:
    """The connection to one rank, what has come from it, and what still has to leave."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self._rank = rank
        self._data = bytearray()
        self._unsent = b""
        self._damage = ""
        """What was wrong with a message; nothing that follows it can be read."""
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

    def _read(self) -> bool:
        """Take what has come; return whether anything had."""
        if self._damage:
            raise MeshError(self._rank, self._damage, is_damaged=True)
        try:
            data = self.connection.recv(_READ_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except OSError as error:
            raise MeshError(self._rank, str(error)) from error
        if not data:
            raise MeshError(self._rank, "its connection ended")
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
        self._messages[number] = message
        del self._data[:end]
        return True

    def _give_up(self, why: str) -> bool:
        """Read nothing more; the other end hears of it too. What came before can still be taken."""
        self._damage = why
        shut(self.connection)
        return False


def _pack(number: int, data: bytes) -> bytes:
    head = _HEAD.pack(number, len(data), zlib.crc32(data))
    return head + _CHECK.pack(zlib.crc32(head)) + data


def _close_all(listener: socket.socket, peers: dict[int, _Peer]) -> None:
    listener.close()
    for peer in peers.values():
        peer.close()
