"""A bucket as the parameter server knows it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from poseidon.sums.chunks import Chunk, cut

CHUNK_S = 4e-3
"""An urgent chunk waits for the one that is being sent to its peer, so a chunk takes about this long..."""
SMALLEST_CHUNK_BYTES, LARGEST_CHUNK_BYTES = 2**16, 2**22
"""... but smaller ones cost too much processor time per byte, and larger ones gain nothing."""
LEAST_SPREAD_BYTES = 2**19
"""A small bucket is cut into pieces of this size at the least, so that its exchange uses several links."""


def chunk_bytes_for(bytes_per_s: float) -> int:
    """Return a chunk size for links of this speed: a power of two."""
    wanted = min(max(bytes_per_s * CHUNK_S, SMALLEST_CHUNK_BYTES), LARGEST_CHUNK_BYTES)
    return int(2 ** math.floor(math.log2(wanted)))


@dataclass(frozen=True)
class Slot:
    """Number, chunks, and how urgent the sum is."""

    number: int
    chunks: tuple[Chunk, ...]
    priority: int
    """Lower is more urgent."""


def make_slots(first: int, sizes: Sequence[int], itemsizes: Sequence[int], owners: int, chunk_bytes: int) -> list[Slot]:
    """Return slots numbered from ``first`` for buckets of so many elements, in the order they become ready.

    What becomes ready last in backward is needed first in the next forward, so it is the most urgent.
    """
    slots = []
    for place, (size, itemsize) in enumerate(zip(sizes, itemsizes, strict=True)):
        number = first + place
        least = max(1, min(chunk_bytes // 4, LEAST_SPREAD_BYTES) // itemsize)
        (pieces,) = cut([size], range(owners), max(1, chunk_bytes // itemsize), least)
        # Each bucket begins with another owner, so that short ones do not all end up with the first.
        chunks = tuple(
            Chunk(number, piece.index, piece.start, piece.stop, (piece.owner + number) % owners) for piece in pieces
        )
        slots.append(Slot(number, chunks, len(sizes) - place))
    return slots
