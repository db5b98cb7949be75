"""Bytes from a connection into memory, with the fewest calls and the fewest awakenings."""

from __future__ import annotations

import contextlib
import socket

LOW_WATER_BYTES = 256 << 10
"""The kernel wakes a thread that waits for a large payload when so much has come, not for every packet."""
HELD_BYTES = 1 << 20
"""What the kernel may hold of it meanwhile: with no more than the former, a thread that comes late stops its sender."""


def widen(connection: socket.socket) -> None:
    """Let the kernel hold ``HELD_BYTES`` of this connection from the beginning, or what the system allows."""
    # It makes room for whatever it is asked to gather. (SO_RCVBUF is allowed less, and would fix the size for good.)
    _wake_at(connection, HELD_BYTES)
    _wake_at(connection, 1)


def read_into(connection: socket.socket, view: memoryview) -> int:
    """Fill ``view`` from the connection; return how many bytes came before it ended."""
    # One call for all of it: the kernel gathers the pieces while Python's other threads run.
    filled = connection.recv_into(view, 0, socket.MSG_WAITALL) if view.nbytes else 0
    while 0 < filled < view.nbytes:
        # Cut short by a signal or a time limit of the socket; or at its end, which the next call tells.
        count = connection.recv_into(view[filled:], 0, socket.MSG_WAITALL)
        if not count:
            break
        filled += count
    return filled


def read_large(connection: socket.socket, view: memoryview) -> int:
    """Like :func:`read_into`, for a payload that takes many packets."""
    bulk = view.nbytes - LOW_WATER_BYTES
    if bulk < LOW_WATER_BYTES:
        return read_into(connection, view)
    _wake_at(connection, LOW_WATER_BYTES)
    filled = read_into(connection, view[:bulk])
    # Less than that may be left now, with nothing behind it for long: from here on, every packet counts.
    _wake_at(connection, 1)
    return filled + read_into(connection, view[bulk:]) if filled == bulk else filled


def _wake_at(connection: socket.socket, size_bytes: int) -> None:
    # A system that cannot be asked goes on waking for every packet.
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)
