"""A bucket as the parameter server knows it: a numbered slot with chunks and a priority. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from poseidon.sums.chunks import Chunk, cut

CHUNK_S = 8e-3
"""An urgent chunk waits for the one being sent to its peer, so sending a chunk takes about this long ..."""
WHOLE_CHUNK_S = 20e-3
"""... or this long where everything lands before anything goes on: no chunk is urgent then ..."""
SMALLEST_CHUNK_BYTES, LARGEST_CHUNK_BYTES = 2**16, 2**22
"""... but smaller chunks cost too much CPU time per byte, and larger ones gain nothing."""
LEAST_SPREAD_BYTES = 2**19
"""A small bucket is cut into pieces of at least this size, so that its exchange uses several links."""


def chunk_bytes_for(bytes_per_s: float, lands_whole: bool = False) -> int:
    """Return a chunk size for links of this speed, the nearest power of two.

    ``lands_whole``: a step waits for all chunks.
    """
    seconds = WHOLE_CHUNK_S if lands_whole else CHUNK_S
    wanted = min(max(bytes_per_s * seconds, SMALLEST_CHUNK_BYTES), LARGEST_CHUNK_BYTES)
    return int(2 ** round(math.log2(wanted)))


@dataclass(frozen=True)
class Slot:
    """A bucket's number, chunks and priority."""

    number: int
    chunks: tuple[Chunk, ...]
    priority: int
    """Lower is more urgent."""
    width: int = 0
    """Values in a row, if every worker brings touched rows of a table besides its part (``touched.py``); else 0."""

    def count_parts(self, workers: int) -> int:
        """Return of how many parts a chunk is the sum: one of each worker, and one for the touched rows of all."""
        return workers + bool(self.width)


def make_slots(first: int, sizes: Sequence[int], itemsizes: Sequence[int], owners: int, chunk_bytes: int) -> list[Slot]:
    """Return slots numbered from ``first`` for buckets of these sizes in elements, in the order they become ready.

    What becomes ready last in backward is needed first in the next forward, so it is the most urgent.
    """
    slots = []
    for place, (size, itemsize) in enumerate(zip(sizes, itemsizes, strict=True)):
        number = first + place
        least = max(1, min(chunk_bytes // 4, LEAST_SPREAD_BYTES) // itemsize)
        (pieces,) = cut([size], range(owners), max(1, chunk_bytes // itemsize), least)
        # Each bucket starts with a different owner; otherwise the first would own all short buckets.
        chunks = tuple(
            Chunk(number, piece.index, piece.start, piece.stop, (piece.owner + number) % owners) for piece in pieces
        )
        slots.append(Slot(number, chunks, len(sizes) - place))
    return slots
