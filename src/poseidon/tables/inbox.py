"""Restores the order in which messages were sent. Pure.

A transport with several connections or receive threads may deliver two messages of one peer out of order. Tables need
the order: the clock that ends a step must not overtake its updates.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from poseidon.errors import ServerError

T = TypeVar("T")

FARTHEST = 1 << 16
"""How far ahead of the next message one may be; more than a peer ever has in flight."""


class Inbox(Generic[T]):
    """Numbered messages of one peer, starting from 0. Not thread-safe."""

    def __init__(self, peer: int) -> None:
        self._peer = peer
        self._next = 0
        self._early: dict[int, T] = {}

    def put(self, number: int, message: T) -> list[T]:
        """Take a message; return those that are due now, in order."""
        if number < self._next or number in self._early or number > self._next + FARTHEST:
            raise ServerError(f"rank {self._peer} sent message {number}; expected {self._next} or one soon after it")
        self._early[number] = message
        ready = []
        while self._next in self._early:
            ready.append(self._early.pop(self._next))
            self._next += 1
        return ready
