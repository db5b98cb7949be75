"""Chunks in one piece of memory, one behind the other, behind a table that says where and how they lie. Pure.

So a device gets them all in one copy of just their bytes. An entry of the table is a position and an encoding, 8 bytes
each.
"""

from __future__ import annotations

import threading

import numpy as np

from poseidon.sums.compact import align
from poseidon.wire.formats import Array

HERE = 255
"""In place of an encoding: the chunk is on the device already."""
_ENTRY_BYTES = 16


class ChunkTable:
    """A table in the first bytes of ``memory``, and the room behind it; any thread may call it."""

    def __init__(self, memory: Array, count: int) -> None:
        self._entries = memory[: _ENTRY_BYTES * count].view(np.int64).reshape(count, 2)
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Forget all chunks: they are here."""
        self._entries[:] = 0, HERE
        self._end = table_bytes(len(self._entries))

    def place(self, number: int, length: int) -> int:
        """Take room for a chunk of ``length`` bytes; return its position."""
        with self._lock:
            position = self._end
            self._end = align(position + length)
        self._entries[number, 0] = position
        return position

    def mark(self, number: int, encoding: int) -> None:
        """Say how a chunk is encoded; until then it counts as here."""
        self._entries[number, 1] = encoding

    @property
    def used_bytes(self) -> int:
        """Size of the table and of all that lies behind it."""
        return self._end


def table_bytes(count: int) -> int:
    """Return the size of a table of ``count`` chunks."""
    return align(_ENTRY_BYTES * count)
