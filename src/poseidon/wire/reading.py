"""Reads bytes from a connection into memory, with the fewest calls and wake-ups."""

from __future__ import annotations

import contextlib
import socket
import ssl

from poseidon.wire.tls import RECORD_BYTES

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
    if isinstance(connection, ssl.SSLSocket):
        return _read_records(connection, view)
    # One call for everything: the kernel collects the pieces while Python's other threads run.
    filled = connection.recv_into(view, 0, socket.MSG_WAITALL) if view.nbytes else 0
    while 0 < filled < view.nbytes:
        # Cut short by a signal, by the socket's timeout, or by the end of the connection, which the next call shows.
        count = connection.recv_into(view[filled:], 0, socket.MSG_WAITALL)
        if not count:
            break
        filled += count
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
    """Like :func:`read_into`, for a payload that takes many packets."""
    bulk = bulk_bytes(view.nbytes, isinstance(connection, ssl.SSLSocket))
    if bulk < LOW_WATER_BYTES:
        return read_into(connection, view)
    _wake_at(connection, LOW_WATER_BYTES)
    filled = read_into(connection, view[:bulk])
    # Less than the low-water mark may be left, and nothing may follow for long: wake for every packet from here on.
    _wake_at(connection, 1)
    return filled + read_into(connection, view[bulk:]) if filled == bulk else filled


def bulk_bytes(size_bytes: int, is_encrypted: bool) -> int:
    """Return how much of a payload may be awaited with the low-water mark: so much must always be left to come.

    OpenSSL waits for the rest of a record, which may end beyond what was asked for. Without room for it, less than the
    mark could be left on its way, and the kernel would never wake the reader.
    """
    return size_bytes - LOW_WATER_BYTES - (2 * RECORD_BYTES if is_encrypted else 0)


def _wake_at(connection: socket.socket, size_bytes: int) -> None:
    # A system without this option keeps waking for every packet.
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)
