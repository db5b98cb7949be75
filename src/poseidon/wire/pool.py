"""Memory for payloads that is used again once nobody refers to it any more. Pure.

Fresh memory costs a page fault for every 4 KiB, and the kernel clears each page first: for payloads that are read
once and dropped, a tenth of all processor time.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

SMALLEST_BYTES = 64 << 10
"""The system's allocator hands smaller pieces out again by itself."""
MOST_SPARE_BYTES = 128 << 20
"""Beyond this, memory that comes back goes back to the system."""

Block = npt.NDArray[np.uint8]


class Pool:
    """Lends memory, and finds out by itself when it is free again; any thread may lend."""

    def __init__(self, most_spare_bytes: int = MOST_SPARE_BYTES) -> None:
        self._most = most_spare_bytes
        self._lock = threading.Lock()
        self._spare: defaultdict[int, list[Block]] = defaultdict(list)
        self._spare_bytes = 0
        self._loans: dict[int, weakref.ref[Block]] = {}
        # The last reference may go anywhere, even while this very thread lends, so what comes back takes no lock.
        self._returned: SimpleQueue[Block] = SimpleQueue()

    def lend(self, size_bytes: int) -> memoryview:
        """Return ``size_bytes`` of memory, for as long as the view or anything made from it is referred to."""
        if size_bytes < SMALLEST_BYTES:
            return np.empty(size_bytes, np.uint8).data
        with self._lock:
            self._collect()
            stack = self._spare[_round_up(size_bytes)]
            block = stack.pop() if stack else None
            if block is not None:
                self._spare_bytes -= block.nbytes
        if block is None:
            block = np.empty(_round_up(size_bytes), np.uint8)
        # What is made from the view refers to the view, and that to the loan; never to the block alone.
        loan = block[:size_bytes]
        self._watch(loan, block)
        return loan.data

    @property
    def spare_bytes(self) -> int:
        """Bytes that wait to be lent again."""
        with self._lock:
            self._collect()
            return self._spare_bytes

    def _watch(self, loan: Block, block: Block) -> None:
        number = id(loan)

        def take_back(_: weakref.ref[Block]) -> None:
            del self._loans[number]
            self._returned.put(block)

        self._loans[number] = weakref.ref(loan, take_back)

    def _collect(self) -> None:
        """Sort what came back; the latest lies on top, as it is the likeliest to be in a cache still."""
        for _ in range(self._returned.qsize()):
            block = self._returned.get()
            if self._spare_bytes + block.nbytes <= self._most:
                self._spare[block.nbytes].append(block)
                self._spare_bytes += block.nbytes


def _round_up(size_bytes: int) -> int:
    """Return the size of the block that serves ``size_bytes``: one of four between a power of two and the next."""
    step = 1 << (size_bytes - 1).bit_length() - 3
    return -(-size_bytes // step) * step
