"""How two ranks meet on a new connection: each proves to the other that it knows the job's secret.

The listener sends a challenge; the connecting rank names itself, answers the challenge and sends its own, which the
listener answers. Answers are keyed digests over both challenges and both ranks, so none can be replayed, and an
eavesdropper learns nothing that opens another connection. On an encrypted wire all of it happens inside TLS, which
neither end goes without (``tls.py``), so that nobody else knows the challenges: with the secret, they make the keys of
large payloads (``sealing.py``).

Until it is over, nothing is believed and nothing is allocated for the other end, which has one deadline for all of it.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import ssl
import struct
import time

from poseidon import failpoints
from poseidon.errors import FrameError
from poseidon.wire.secret import JobSecret
from poseidon.wire.tls import Tls, TlsSocket, explain

_CHALLENGE = struct.Struct("<8s16s")
_CLAIM = struct.Struct("<8sHH16s32s")
_PROOF = struct.Struct("<32s")
_MAGIC = b"poseidn1"
_REFUSAL = bytes(_PROOF.size)
"""In the place of the answer to a claim that does not prove anything: without it, that would look like a failure."""

_WAYS = ("to the listener", "from the listener")


class Credentials:
    """What a rank has to show and asks to see."""

    def __init__(self, secret: bytes, encrypt: bool) -> None:
        self._secret = JobSecret(secret)
        self._tls = Tls(self._secret) if encrypt else None

    @property
    def encrypts(self) -> bool:
        """Whether connections are encrypted."""
        return self._tls is not None

    def wrap(self, connection: socket.socket, is_listener: bool) -> socket.socket:
        """Return the connection to use from now on. Does not block."""
        return connection if self._tls is None else self._tls.wrap(connection, is_listener)

    def welcome(self, connection: socket.socket, rank: int, size: int, deadline: float) -> int:
        """Authenticate the rank that opened a connection and return it; ``FrameError`` or ``OSError`` if it fails."""
        self._encrypt(connection, "a connection", deadline)
        return challenge(connection, self._secret, rank, size, deadline)

    def enter(self, connection: socket.socket, rank: int, peer: int, deadline: float) -> None:
        """Prove to the listener of ``peer`` that this is ``rank``, and authenticate it; errors as in ``welcome``."""
        who = f"the listener of rank {peer}"
        self._encrypt(connection, who, deadline)
        try:
            claim(connection, self._secret, rank, peer, deadline)
        except ssl.SSLError as error:
            # The other end says only now that it did not like our certificate.
            raise explain(error, who) from None

    @staticmethod
    def _encrypt(connection: socket.socket, who: str, deadline: float) -> None:
        if failpoints.ARMED:
            failpoints.hit("wire.handshake", connection.close)
        if isinstance(connection, ssl.SSLSocket):
            Tls.shake_hands(connection, who, deadline)


def challenge(connection: socket.socket, secret: JobSecret, rank: int, size: int, deadline: float) -> int:
    """Authenticate the rank at the other end of a new connection and return it; ``FrameError`` if it fails."""
    ours = secrets.token_bytes(16)
    connection.sendall(_CHALLENGE.pack(_MAGIC, ours))
    magic, sender, receiver, theirs, proof = _CLAIM.unpack(read_exactly(connection, _CLAIM.size, deadline))
    if magic != _MAGIC:
        raise FrameError("handshake", f"a connection spoke another protocol: it began with {magic!r}")
    expected = secret.proof("claim", ours, theirs, sender, receiver)
    if not hmac.compare_digest(proof, expected) or receiver != rank or sender >= size:
        connection.sendall(_PROOF.pack(_REFUSAL))
        raise FrameError("wrong secret", f"a connection as rank {sender} does not know this job's secret")
    connection.sendall(_PROOF.pack(secret.proof("answer", ours, theirs, sender, receiver)))
    if isinstance(connection, TlsSocket):
        to_us, from_us = (secret.proof(way, ours, theirs, sender, receiver) for way in _WAYS)
        connection.seal(outgoing=from_us, incoming=to_us)
    return int(sender)


def claim(connection: socket.socket, secret: JobSecret, rank: int, peer: int, deadline: float) -> None:
    """Prove to the listener of ``peer`` that this is ``rank``, and authenticate it; ``FrameError`` if it fails."""
    magic, theirs = _CHALLENGE.unpack(read_exactly(connection, _CHALLENGE.size, deadline))
    if magic != _MAGIC:
        raise FrameError("handshake", f"the listener of rank {peer} spoke another protocol: it began with {magic!r}")
    ours = secrets.token_bytes(16)
    connection.sendall(_CLAIM.pack(_MAGIC, rank, peer, ours, secret.proof("claim", theirs, ours, rank, peer)))
    (proof,) = _PROOF.unpack(read_exactly(connection, _PROOF.size, deadline))
    if proof == _REFUSAL:
        raise FrameError("wrong secret", f"rank {peer} refused rank {rank}: it has another secret")
    if not hmac.compare_digest(proof, secret.proof("answer", theirs, ours, rank, peer)):
        raise FrameError("wrong secret", f"the listener of rank {peer} does not know this job's secret")
    if isinstance(connection, TlsSocket):
        from_us, to_us = (secret.proof(way, theirs, ours, rank, peer) for way in _WAYS)
        connection.seal(outgoing=from_us, incoming=to_us)


def read_exactly(connection: socket.socket, size_bytes: int, deadline: float) -> bytes:
    """Return the next ``size_bytes`` bytes; ``FrameError`` if the connection ends first, or the time."""
    data = b""
    while len(data) < size_bytes:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise FrameError("slow handshake", f"only {len(data)} of {size_bytes} bytes of a handshake came in time")
        connection.settimeout(left_s)
        try:
            more = connection.recv(size_bytes - len(data))
        except TimeoutError:
            continue
        if not more:
            raise FrameError("handshake", f"a connection ended inside a handshake of {size_bytes} bytes")
        data += more
    return data
