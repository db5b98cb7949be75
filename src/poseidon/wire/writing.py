"""Writes a message to a connection with the fewest calls and packets."""

from __future__ import annotations

import socket

from poseidon.wire.sealing import SEALED_BYTES, blocks_of
from poseidon.wire.tls import RECORD_BYTES, TlsSocket


def write_message(connection: socket.socket, head: bytes, payload: memoryview) -> None:
    """Write a header and its payload; blocks until the kernel has taken everything."""
    if isinstance(connection, TlsSocket):
        if connection.sealing is not None and payload.nbytes >= SEALED_BYTES:
            connection.sendall(head)
            write_large(connection, payload)
            return
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


def write_large(connection: socket.socket, payload: memoryview) -> None:
    """Write what the other end reads with ``read_large``."""
    seal = connection.sealing if isinstance(connection, TlsSocket) else None
    if seal is None or payload.nbytes < SEALED_BYTES:
        connection.sendall(payload)
        return
    for block in blocks_of(payload):
        # Past TLS, between two of its records: it reads no further than the end of one.
        socket.socket.sendall(connection, seal.close(block))
