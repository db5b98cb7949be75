"""Memory for payloads that is used again once nobody refers to it any more. Pure.

Fresh memory costs a page fault for every 4 KiB, and the kernel clears each page first: for payloads that are read
once and dropped, a tenth of all processor time.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

SMALLEST_BYTES = 64 << 10
"""The system's allocator hands smaller pieces out again by itself."""
MOST_SPARE_BYTES = 64 << 20
"""So much is kept of blocks of one size; beyond it, the oldest go back to the system."""

Block = npt.NDArray[np.uint8]


class Pool:
    """Lends memory, and finds out by itself when it is free again; any thread may lend.

    The last reference may go anywhere, even while the same thread lends, so there is no lock: all rests on deques,
    whose ``append`` and ``pop`` are atomic.
    """

    def __init__(self, most_spare_bytes: int = MOST_SPARE_BYTES) -> None:
        self._most = most_spare_bytes
        self._spare: dict[int, deque[Block]] = {}
        """By size; the latest that came back is lent first, as it is the likeliest to be in a cache still."""
        self._loans: dict[int, weakref.ref[Block]] = {}

    def lend(self, size_bytes: int) -> memoryview:
        """Return ``size_bytes`` of memory, for as long as the view or anything made from it is referred to."""
        if size_bytes < SMALLEST_BYTES:
            return np.empty(size_bytes, np.uint8).data
        block_bytes = _round_up(size_bytes)
        spare = self._spare.get(block_bytes)
        if spare is None:
            spare = self._spare.setdefault(block_bytes, deque(maxlen=self._most // block_bytes))
        try:
            block = spare.pop()
        except IndexError:
            block = np.empty(block_bytes, np.uint8)
        # What is made from the view refers to the view, and that to the loan; never to the block alone.
        loan = block[:size_bytes]
        number = id(loan)

        def take_back(_: object) -> None:
            del self._loans[number]
            spare.append(block)

        self._loans[number] = weakref.ref(loan, take_back)
        return loan.data

    @property
    def spare_bytes(self) -> int:
        """Bytes that wait to be lent again."""
        return sum(len(spare) * block_bytes for block_bytes, spare in list(self._spare.items()))


def _round_up(size_bytes: int) -> int:
    """Return the size of the block that serves ``size_bytes``: one of four between a power of two and the next."""
    step = 1 << (size_bytes - 1).bit_length() - 3
    return -(-size_bytes // step) * step
