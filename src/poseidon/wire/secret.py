"""Derives from a job's secret the password that opens a connection, and the keys of an encrypted one.

Every listener draws a nonce and publishes it with its address, so a password overheard in one job is useless in
another. On an unencrypted wire, whoever can overhear this job's traffic can also replay its passwords: use ``encrypt``
there.
"""

from __future__ import annotations

import hashlib
import hmac

from poseidon.errors import ConfigError

SHORTEST_SECRET = 16


class JobSecret:
    """The secret that all workers of a job share; never sent, never printed."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < SHORTEST_SECRET:
            raise ConfigError(
                f"the job's secret has {len(secret)} bytes; at least {SHORTEST_SECRET} are needed "
                "(secrets.token_bytes(32) makes a good one)"
            )
        self._secret = secret

    def __repr__(self) -> str:
        return "JobSecret(...)"

    def password(self, nonce: str, sender: int, receiver: int) -> str:
        """Return the password with which rank ``sender`` opens a connection to the listener of ``receiver``."""
        return self._derive("password", nonce, sender, receiver).hex()

    def proof(self, role: str, first: bytes, second: bytes, sender: int, receiver: int) -> bytes:
        """Return the proof of knowing the secret, for the peer that drew one of the two challenges."""
        return self._derive(role, first.hex(), second.hex(), sender, receiver)

    def keys(self, role: str, nonce: str, rank: int) -> tuple[bytes, bytes]:
        """Return the public and the secret CURVE key of ``rank`` as ``role`` ("listener" or "sender")."""
        # Only the carrier that encrypts needs ZeroMQ.
        import zmq
        from zmq.utils import z85

        secret_key = z85.encode(self._derive(role, nonce, rank))
        return zmq.curve_public(secret_key), secret_key

    def _derive(self, *purpose: str | int) -> bytes:
        return hmac.new(self._secret, "\0".join(map(str, purpose)).encode(), hashlib.sha256).digest()
