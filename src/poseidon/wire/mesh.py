"""A few integers from every rank to every rank, with the least work: one connection per pair, and no threads.

A collective wakes several threads on every machine and passes its values around in as many hops as there are ranks.
Here a rank writes to each connection and goes on; whoever needs the values reads them later, when the kernel usually
has them already.
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
from collections.abc import Collection, Sequence

from poseidon.errors import FrameError, WireError
from poseidon.wire.handshake import Credentials
from poseidon.wire.sending import shut

MOST_WORDS = 1024
"""In one message: whatever else is under way, the kernel takes it at once, so sending never waits."""
_HANDSHAKE_S = 2.0
_LOOK_S = 0.1
_HEAD = struct.Struct("<QI")
_READ_BYTES = 1 << 16


class MeshError(WireError):
    """No message came from ``rank``: its connection ended, or it was silent for too long."""

    def __init__(self, rank: int, why: str, is_broken: bool = True) -> None:
        super().__init__(f"no message from rank {rank}: {why}")
        self.rank = rank
        self.is_broken = is_broken


class Mesh:
    """One rank's connections; any thread may use them. It listens at ``address`` from construction on."""

    def __init__(self, rank: int, size: int, ip: str) -> None:
        self._rank = rank
        self._size = size
        self._listener = socket.create_server((ip, 0), backlog=size)
        self._peers: dict[int, _Peer] = {}
        self._number = 0
        self._lock = threading.Lock()
        self._close = weakref.finalize(self, _close_all, self._listener, self._peers)
        self._close.atexit = False

    @property
    def address(self) -> tuple[str, int]:
        """Where the other ranks find this one."""
        ip, port = self._listener.getsockname()
        return str(ip), int(port)

    def connect(self, addresses: Sequence[tuple[str, int]], credentials: Credentials, timeout_s: float) -> None:
        """Connect to all ranks, given their addresses by rank; ``WireError`` if that takes longer than ``timeout_s``.

        Of two ranks the higher one opens the connection; both prove that they know the secret.
        """
        deadline = time.monotonic() + timeout_s
        announced = {ip for ip, _ in addresses}
        try:
            for peer in range(self._rank):
                self._peers[peer] = _Peer(peer, self._open(peer, addresses[peer], credentials, deadline))
            while len(self._peers) < self._size - 1:
                self._admit(credentials, announced, deadline)
        except (OSError, FrameError) as error:
            missing = [peer for peer in range(self._size) if peer != self._rank and peer not in self._peers]
            raise WireError(f"rank {self._rank} is not connected to ranks {missing}: {error}") from error
        self._listener.close()

    def send(self, words: Sequence[int]) -> int:
        """Send integers of 64 bits to all ranks, at most :data:`MOST_WORDS`; return the message's number.

        Ranks must send equally often; the messages with one number belong together. The connection to a rank that has
        not read for so long that the kernel takes no more ends, so that both hear of it.
        """
        body = struct.pack(f"<{len(words)}q", *words)
        with self._lock:
            number, self._number = self._number, self._number + 1
            data = _HEAD.pack(number, len(words)) + body
            for peer in self._peers.values():
                peer.send(data)
        return number

    def receive(self, number: int, mine: Sequence[int], timeout_s: float) -> list[list[int]]:
        """Return the words of all ranks in the messages with this number, ``mine`` among them.

        Raises :class:`MeshError` if one does not come in time.
        """
        deadline = time.monotonic() + timeout_s
        peers = self._peers
        return [
            list(mine) if rank == self._rank else peers[rank].receive(number, deadline) for rank in range(self._size)
        ]

    def close(self) -> None:
        """Close all connections."""
        self._close()

    def _open(self, peer: int, address: tuple[str, int], credentials: Credentials, deadline: float) -> socket.socket:
        with contextlib.ExitStack() as undo:
            source = (self.address[0], 0)
            left_s = max(0.1, deadline - time.monotonic())
            plain = undo.enter_context(socket.create_connection(address, left_s, source))
            connection = undo.enter_context(credentials.wrap(plain, is_listener=False))
            credentials.enter(connection, self._rank, peer, deadline)
            undo.pop_all()
        return connection

    def _admit(self, credentials: Credentials, announced: Collection[str], deadline: float) -> None:
        """Accept one connection; a stranger's is closed."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("they did not come in time")
        self._listener.settimeout(left_s)
        plain, (ip, _) = self._listener.accept()
        with contextlib.ExitStack() as undo:
            undo.enter_context(plain)
            if ip not in announced:
                return
            connection = undo.enter_context(credentials.wrap(plain, is_listener=True))
            with contextlib.suppress(FrameError, OSError):
                limit = min(deadline, time.monotonic() + _HANDSHAKE_S)
                sender = credentials.welcome(connection, self._rank, self._size, limit)
                if sender > self._rank and sender not in self._peers:
                    self._peers[sender] = _Peer(sender, connection)
                    undo.pop_all()


class _Peer:
    """The connection to one rank, and what has come from it."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rank = rank
        self._connection = connection
        self._data = bytearray()
        self._words: dict[int, list[int]] = {}
        """By number, what nobody has asked for yet."""
        self._lock = threading.Lock()

    def close(self) -> None:
        self._connection.close()

    def send(self, data: bytes) -> None:
        # A connection that has ended is reported by whoever waits for the answer. An encrypted one cannot be read and
        # written by two threads at a time.
        with self._lock, contextlib.suppress(OSError):
            try:
                is_whole = self._connection.send(data) == len(data)
            except (BlockingIOError, ssl.SSLWantWriteError):
                is_whole = False
            if not is_whole:
                # It is full: nothing reads at the other end. What came next would be misread, so nothing does.
                shut(self._connection)

    def receive(self, number: int, deadline: float) -> list[int]:
        while True:
            with self._lock:
                while number not in self._words and self._read():
                    pass
                if number in self._words:
                    return self._words.pop(number)
            self._wait(deadline)

    def _read(self) -> bool:
        """Take what has come; return whether anything had."""
        try:
            data = self._connection.recv(_READ_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except OSError as error:
            raise MeshError(self._rank, str(error)) from error
        if not data:
            raise MeshError(self._rank, "its connection ended")
        self._data += data
        while len(self._data) >= _HEAD.size:
            number, count = _HEAD.unpack_from(self._data)
            end = _HEAD.size + 8 * count
            if count > MOST_WORDS:
                raise MeshError(self._rank, f"it sent {count} words at once; {MOST_WORDS} are the most")
            if len(self._data) < end:
                break
            self._words[number] = list(struct.unpack_from(f"<{count}q", self._data, _HEAD.size))
            del self._data[:end]
        return True

    def _wait(self, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise MeshError(self._rank, "it was silent for too long", is_broken=False)
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        # Not for too long: another thread may take what comes.
        poll.poll(min(left_s, _LOOK_S) * 1e3)


def _close_all(listener: socket.socket, peers: dict[int, _Peer]) -> None:
    listener.close()
    for peer in peers.values():
        peer.close()
