"""Large payloads of an encrypted connection, sealed block by block beside TLS. Pure.

TLS cuts everything into records of 16 KiB, with a call of the kernel, a copy and a turn of Python's lock for each, and
that costs more than the cipher. So where both ends have the ``cryptography`` package, TLS carries what is small, and
large payloads pass between its records in blocks sixteen times as large. The cipher is TLS's own (AES-256 in GCM); the
keys, one for each direction of each connection, come from numbers that the ends drew and exchanged inside TLS
(``handshake.py``). Blocks are numbered, and the number is the nonce: one that is changed, left out, repeated or moved
does not open.
"""

from __future__ import annotations

import functools
import hmac
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from poseidon.errors import FrameError

BLOCK_BYTES = 256 << 10
"""Large enough that calls and wake-ups cost little; fits into a processor's own memory until the kernel fetches it."""
TAG_BYTES = 16
SEALED_BYTES = 32 << 10
"""Payloads from this size on are sealed; a smaller one shares TLS records with its header."""
BLOCKS_PER_KEY = 1 << 18
"""64 GiB. The more one key of GCM has encrypted, the less it hides; TLS 1.3 allows it six times as much."""


OLDEST = 50
"""The first ``cryptography`` that encrypts in place and lets Python's other threads run meanwhile."""


@functools.cache
def find_cipher() -> Any:
    """Return the cipher's class, or None where this machine has no ``cryptography`` that is new enough, and works."""
    try:
        # Before it is imported: an old one may not even come up with this Python.
        if int(metadata.version("cryptography").split(".")[0]) < OLDEST:
            return None
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        AESGCM(bytes(32)).encrypt_into(bytes(12), b"", None, bytearray(TAG_BYTES))
    except Exception:  # whatever is wrong with it, TLS does without
        return None
    return AESGCM


class Seal:
    """One direction of one connection: a key that nothing else has, and the number of the next block."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._cipher = find_cipher()(key)
        self._number = 0
        self._room: memoryview | None = None

    def room(self, size_bytes: int) -> memoryview:
        """Return memory for a sealed block of ``size_bytes`` plain bytes; the same every time."""
        if self._room is None:  # most connections carry payloads in one direction only
            self._room = memoryview(bytearray(BLOCK_BYTES + TAG_BYTES))
        return self._room[: size_bytes + TAG_BYTES]

    def close(self, block: memoryview) -> memoryview:
        """Return a block sealed, in :meth:`room`."""
        sealed = self.room(block.nbytes)
        cipher, nonce = self._next()
        cipher.encrypt_into(nonce, block, None, sealed)
        return sealed

    def open(self, block: memoryview) -> None:
        """Fill ``block`` from what was received into :meth:`room`; ``FrameError`` if that is not what was sealed."""
        from cryptography.exceptions import InvalidTag

        cipher, nonce = self._next()
        try:
            cipher.decrypt_into(nonce, self.room(block.nbytes), None, block)
        except InvalidTag:
            # What an attacker has chosen must not stay where a script may look.
            block[:] = bytes(block.nbytes)
            raise FrameError("seal", "a part of a payload was changed on its way: its seal does not fit") from None

    def _next(self) -> tuple[Any, bytes]:
        """Return cipher and nonce of one block; no nonce is ever used twice with one key."""
        if self._number == BLOCKS_PER_KEY:
            self._key = hmac.digest(self._key, b"the next key", "sha256")
            self._cipher = find_cipher()(self._key)
            self._number = 0
        self._number += 1
        return self._cipher, self._number.to_bytes(12, "big")


def blocks_of(payload: memoryview) -> Iterator[memoryview]:
    """Cut a payload into what is sealed at a time."""
    for start in range(0, payload.nbytes, BLOCK_BYTES):
        yield payload[start : start + BLOCK_BYTES]
