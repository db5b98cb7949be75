"""What is derived from a job's secret: the word that opens a connection, and the keys of an encrypted one.

Every listener draws a nonce and publishes it with its address, so a word overheard in one job opens nothing in
another. On an unencrypted wire somebody who can overhear this job's traffic can also repeat its words: that is what
``encrypt`` is for.
"""

from __future__ import annotations

import hashlib
import hmac

from poseidon.errors import ConfigError

SHORTEST_SECRET = 16


class JobSecret:
    """The secret all workers of a job share; never sent, never shown."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < SHORTEST_SECRET:
            raise ConfigError(
                f"the job's secret has {len(secret)} bytes; at least {SHORTEST_SECRET} are needed "
                "(secrets.token_bytes(32) makes a good one)"
            )
        self._secret = secret

    def __repr__(self) -> str:
        return "JobSecret(...)"

    def word(self, nonce: str, sender: int, receiver: int) -> str:
        """Return the word with which rank ``sender`` opens a connection to the listener of ``receiver``."""
        return self._derive("word", nonce, sender, receiver).hex()

    def proof(self, role: str, first: bytes, second: bytes, sender: int, receiver: int) -> bytes:
        """Return what proves knowledge of the secret to one who drew one of two challenges."""
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
