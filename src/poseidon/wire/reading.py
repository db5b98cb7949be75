"""Reads bytes from a connection into memory, with the fewest calls and wake-ups."""

from __future__ import annotations

import contextlib
import functools
import socket
import ssl

from poseidon.wire.sealing import BLOCK_BYTES, SEALED_BYTES, Seal, blocks_of
from poseidon.wire.tls import RECORD_BYTES, TlsSocket

LOW_WATER_BYTES = 256 << 10
"""The kernel wakes a thread that waits for a large payload once this much has arrived, not for every packet."""
HELD_BYTES = 1 << 20
"""How much the kernel may buffer; with no more than ``LOW_WATER_BYTES`` a late reader would stall its sender."""


def widen(connection: socket.socket) -> None:
    """Let the kernel buffer ``HELD_BYTES`` of this connection from the start, or as much as the system allows."""
    # The kernel makes room for the low-water mark. (SO_RCVBUF is limited to less, and would fix the size for good.)
    _wake_at(connection, HELD_BYTES)
    _wake_at(connection, 1)


def read_into(connection: socket.socket, view: memoryview) -> int:
    """Fill ``view`` from the connection; return how many bytes arrived before it ended."""
    return _read_records(connection, view) if isinstance(connection, ssl.SSLSocket) else _read_bytes(connection, view)


def _read_bytes(connection: socket.socket, view: memoryview) -> int:
    receive = connection.recv_into
    if isinstance(connection, ssl.SSLSocket):  # past TLS, which would look for records where a sealed payload comes
        receive = functools.partial(socket.socket.recv_into, connection)
    # One call for everything: the kernel collects the pieces while Python's other threads run.
    filled = receive(view, 0, socket.MSG_WAITALL) if view.nbytes else 0
    while 0 < filled < view.nbytes:
        # Cut short by a signal, by the socket's timeout, or by the end of the connection, which the next call shows.
        count = receive(view[filled:], 0, socket.MSG_WAITALL)
        if not count:
            break
        filled += count
    return filled


def _read_sealed(connection: socket.socket, seal: Seal, view: memoryview) -> int:
    filled = 0
    for block in blocks_of(view):
        sealed = seal.room(block.nbytes)
        if _read_bytes(connection, sealed) < sealed.nbytes:
            break
        seal.open(block)
        filled += block.nbytes
    return filled


def _read_records(connection: ssl.SSLSocket, view: memoryview) -> int:
    filled = 0
    while filled < view.nbytes:
        # One record of at most 16 KiB at a time: that is how OpenSSL decrypts.
        count = connection.recv_into(view[filled:])
        if not count:
            break
        filled += count
    return filled


def read_large(connection: socket.socket, view: memoryview) -> int:
    """Like :func:`read_into`, for a payload that takes many packets, and that ``write_large`` has written."""
    is_encrypted = isinstance(connection, ssl.SSLSocket)
    seal = connection.opening if isinstance(connection, TlsSocket) and view.nbytes >= SEALED_BYTES else None

    def read(part: memoryview) -> int:
        return read_into(connection, part) if seal is None else _read_sealed(connection, seal, part)

    bulk = sealed_bulk_bytes(view.nbytes) if seal is not None else bulk_bytes(view.nbytes, is_encrypted)
    if bulk < LOW_WATER_BYTES:
        return read(view)
    _wake_at(connection, LOW_WATER_BYTES)
    filled = read(view[:bulk])
    # Less than the low-water mark may be left, and nothing may follow for long: wake for every packet from here on.
    _wake_at(connection, 1)
    return filled + read(view[bulk:]) if filled == bulk else filled


def bulk_bytes(size_bytes: int, is_encrypted: bool) -> int:
    """Return how much of a payload may be awaited with the low-water mark: so much must always be left to come.

    OpenSSL waits for the rest of a record, which may end beyond what was asked for. Without room for it, less than the
    mark could be left on its way, and the kernel would never wake the reader.
    """
    return size_bytes - LOW_WATER_BYTES - (2 * RECORD_BYTES if is_encrypted else 0)


def sealed_bulk_bytes(size_bytes: int) -> int:
    """Return the same for a sealed payload: whole blocks, as the sender cut them."""
    return bulk_bytes(size_bytes, is_encrypted=False) // BLOCK_BYTES * BLOCK_BYTES


def _wake_at(connection: socket.socket, size_bytes: int) -> None:
    # A system without this option keeps waking for every packet.
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)
