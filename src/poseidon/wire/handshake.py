"""The handshake in which two ranks prove to each other that they know the job's secret.

The listener sends a challenge; the connecting rank names itself, answers the challenge and sends its own, which the
listener answers. Answers are keyed digests over both challenges and both ranks, so none can be replayed, and an
eavesdropper learns nothing that opens another connection.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct

from poseidon.errors import FrameError
from poseidon.wire.reading import read_into
from poseidon.wire.secret import JobSecret

_CHALLENGE = struct.Struct("<8s16s")
_CLAIM = struct.Struct("<8sHH16s32s")
_PROOF = struct.Struct("<32s")
_MAGIC = b"poseidn1"


def challenge(connection: socket.socket, secret: JobSecret, rank: int, size: int) -> int:
    """Authenticate the rank at the other end of a new connection and return it; ``FrameError`` if it fails."""
    ours = secrets.token_bytes(16)
    connection.sendall(_CHALLENGE.pack(_MAGIC, ours))
    magic, sender, receiver, theirs, proof = _CLAIM.unpack(read_exactly(connection, _CLAIM.size))
    if magic != _MAGIC:
        raise FrameError("handshake", f"a connection spoke another protocol: it began with {magic!r}")
    expected = secret.proof("claim", ours, theirs, sender, receiver)
    if not hmac.compare_digest(proof, expected) or receiver != rank or sender >= size:
        raise FrameError("wrong secret", f"a connection as rank {sender} does not know this job's secret")
    connection.sendall(_PROOF.pack(secret.proof("answer", ours, theirs, sender, receiver)))
    return int(sender)


def claim(connection: socket.socket, secret: JobSecret, rank: int, peer: int) -> None:
    """Prove to the listener of ``peer`` that this is ``rank``, and authenticate it; ``FrameError`` if it fails."""
    magic, theirs = _CHALLENGE.unpack(read_exactly(connection, _CHALLENGE.size))
    if magic != _MAGIC:
        raise FrameError("handshake", f"the listener of rank {peer} spoke another protocol: it began with {magic!r}")
    ours = secrets.token_bytes(16)
    connection.sendall(_CLAIM.pack(_MAGIC, rank, peer, ours, secret.proof("claim", theirs, ours, rank, peer)))
    try:
        (proof,) = _PROOF.unpack(read_exactly(connection, _PROOF.size))
    except FrameError:
        raise FrameError("wrong secret", f"rank {peer} refused rank {rank}: it has another secret") from None
    if not hmac.compare_digest(proof, secret.proof("answer", theirs, ours, rank, peer)):
        raise FrameError("wrong secret", f"the listener of rank {peer} does not know this job's secret")


def read_exactly(connection: socket.socket, size_bytes: int) -> bytes:
    """Return the next ``size_bytes`` bytes; ``FrameError`` if the connection ends first."""
    data = bytearray(size_bytes)
    if read_into(connection, memoryview(data)) < size_bytes:
        raise FrameError("handshake", f"a connection ended inside a handshake of {size_bytes} bytes")
    return bytes(data)
