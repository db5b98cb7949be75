"""Derives from a job's secret whatever proves it: answers to challenges, and the key of encrypted connections."""

from __future__ import annotations

import hashlib
import hmac

from poseidon.job.secret import check_secret


class JobSecret:
    """The secret that all workers of a job share; never sent, never printed."""

    def __init__(self, secret: bytes) -> None:
        self._secret = check_secret(secret, "given")

    def __repr__(self) -> str:
        return "JobSecret(...)"

    def proof(self, role: str, first: bytes, second: bytes, sender: int, receiver: int) -> bytes:
        """Return the proof of knowing the secret, for the peer that drew one of the two challenges."""
        return self.derive(role, first.hex(), second.hex(), sender, receiver)

    def derive(self, *purpose: str | int) -> bytes:
        """Return 32 bytes for one purpose, from which neither the secret nor those of another can be told."""
        return hmac.new(self._secret, "\0".join(map(str, purpose)).encode(), hashlib.sha256).digest()
