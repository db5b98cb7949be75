"""Memory for payloads, reused once nothing refers to it any more. Pure.

Fresh memory costs a page fault and a cleared page per 4 KiB: for payloads that are read once and dropped, a tenth of
all processor time.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

SMALLEST_BYTES = 64 << 10
"""The system's allocator reuses smaller pieces by itself."""
MOST_SPARE_BYTES = 64 << 20
"""How much is kept of blocks of one size; beyond it, the oldest go back to the system."""

Block = npt.NDArray[np.uint8]


class Pool:
    """Lends memory and notices when it is free again. Any thread may borrow.

    The last reference may disappear anywhere, even while the same thread borrows, so there is no lock: the pool relies
    on deques, whose ``append`` and ``pop`` are atomic.
    """

    def __init__(self, most_spare_bytes: int = MOST_SPARE_BYTES) -> None:
        self._most = most_spare_bytes
        self._spare: dict[int, deque[Block]] = {}
        """By size; the latest to come back is lent first, because it is the likeliest to be in a cache."""
        self._loans: dict[int, weakref.ref[Block]] = {}

    def lend(self, size_bytes: int) -> memoryview:
        """Return ``size_bytes`` of memory, valid as long as the view or anything made from it is referenced."""
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
        # Whatever is made from the view refers to the view, and that to the loan, never directly to the block.
        loan = block[:size_bytes]
        number = id(loan)

        def take_back(_: object) -> None:
            del self._loans[number]
            spare.append(block)

        self._loans[number] = weakref.ref(loan, take_back)
        return loan.data

    @property
    def spare_bytes(self) -> int:
        """Bytes that are free to be lent again."""
        return sum(len(spare) * block_bytes for block_bytes, spare in list(self._spare.items()))


def _round_up(size_bytes: int) -> int:
    """Return the block size for ``size_bytes``: one of four between a power of two and the next."""
    step = 1 << (size_bytes - 1).bit_length() - 3
    return -(-size_bytes // step) * step
