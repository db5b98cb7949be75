"""A bucket as the parameter server knows it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poseidon.server.chunks import Chunk, cut

CHUNK_BYTES = 256 * 1024
"""An urgent chunk waits for one that is being sent, so chunks are small; much smaller ones cost more per byte."""


@dataclass(frozen=True)
class Slot:
    """Number, chunks, and how urgent the sum is."""

    number: int
    chunks: tuple[Chunk, ...]
    priority: int
    """Lower is more urgent."""


def make_slots(
    first: int, sizes: Sequence[int], itemsizes: Sequence[int], owners: int, chunk_bytes: int = CHUNK_BYTES
) -> list[Slot]:
    """Return slots numbered from ``first`` for buckets of so many elements, in the order they become ready.

    What becomes ready last in backward is needed first in the next forward, so it is the most urgent.
    """
    slots = []
    for place, (size, itemsize) in enumerate(zip(sizes, itemsizes, strict=True)):
        number = first + place
        (pieces,) = cut([size], range(owners), max(1, chunk_bytes // itemsize))
        # Each bucket begins with another owner, so that short ones do not all end up with the first.
        chunks = tuple(
            Chunk(number, piece.index, piece.start, piece.stop, (piece.owner + number) % owners) for piece in pieces
        )
        slots.append(Slot(number, chunks, len(sizes) - place))
    return slots
