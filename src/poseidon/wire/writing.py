"""Writes a message to a connection with the fewest calls and packets."""

from __future__ import annotations

import socket
import ssl

from poseidon.wire.tls import RECORD_BYTES


def write_message(connection: socket.socket, head: bytes, payload: memoryview) -> None:
    """Write a header and its payload; blocks until the kernel has taken everything."""
    if isinstance(connection, ssl.SSLSocket):
        # The header shares the first record: a record costs a packet, its own header and a call of the kernel.
        first = min(payload.nbytes, RECORD_BYTES - len(head))
        connection.sendall(b"".join((head, payload[:first])))
        if first < payload.nbytes:
            connection.sendall(payload[first:])
        return
    sent = connection.sendmsg([head, payload], [], socket.MSG_NOSIGNAL) - len(head)
    if sent < 0:
        # A process that was stopped and continued may find that less was sent.
        connection.sendall(head[sent:])
        sent = 0
    if sent < payload.nbytes:
        connection.sendall(payload[sent:])
