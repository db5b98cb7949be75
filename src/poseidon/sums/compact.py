"""The encoding ``BITS_28``: float32 values without loss, in about 28 bits each. Pure.

Values near each other in a gradient have similar exponents. A group of :data:`GROUP` values stores its largest exponent
once, and each value its distance below that in 4 bits instead of 8. A zero has the last code. So has a *stray*: a value
too far below the others, whose exponent travels in a list at the end. Whatever the values, restoring them gives the
same bits.

================== ======== ==================================================================
bytes              for each what
================== ======== ==================================================================
:data:`HEAD_BYTES` chunk    number of strays (4 bytes, little-endian), then nothing
2                  value    the low 16 bits
1                  value    the sign above 7 more bits of the mantissa
1/2                value    distance; the value half a group further is in the upper 4 bits
1                  group    the largest exponent
4                  stray    its position below its exponent, which has the upper 8 bits
================== ======== ==================================================================

Values are padded with zeros to whole groups. A chunk with so many strays that nothing is gained travels plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from poseidon.sums.chunks import Chunk

GROUP = 256
"""Values that share a largest exponent. One in ten thousand values of real gradients is a stray then; smaller groups
have hardly fewer."""
HEAD_BYTES = 16
COMPACT_SHARE = 28.05 / 32
"""Share of their bytes that real gradients keep, on average."""
FEWEST_COMPACTED = 4096
"""Shorter chunks travel plain."""
SMALLEST_COMPACTED_BYTES = 8 << 20
"""Of a bucket. Nothing hides the exchange of the last buckets of a backward, which are the small ones. The host adds
them sooner than a device that is busy computing, and compacting them would save little."""
MOST_COMPACTED = 1 << 24
"""A stray's position has 24 bits."""
_ALIGNMENT = 16


@dataclass(frozen=True)
class CompactLayout:
    """Where the fields of a compacted chunk lie, for chunks of up to ``values``; cached, as every message asks."""

    values: int

    @cached_property
    def groups(self) -> int:
        """Number of groups."""
        return -(-self.values // GROUP)

    @cached_property
    def low_at(self) -> int:
        """Where the low 16 bits begin."""
        return HEAD_BYTES

    @cached_property
    def high_at(self) -> int:
        """Where the signs and upper bits of the mantissas begin."""
        return self.low_at + 2 * GROUP * self.groups

    @cached_property
    def codes_at(self) -> int:
        """Where the distances begin."""
        return self.high_at + GROUP * self.groups

    @cached_property
    def tops_at(self) -> int:
        """Where the largest exponents begin."""
        return self.codes_at + GROUP // 2 * self.groups

    @cached_property
    def strays_at(self) -> int:
        """Where the strays begin."""
        return _align(self.tops_at + self.groups, 4)

    @cached_property
    def most_strays(self) -> int:
        """With more strays than this, a chunk, even one of a value less, would be no shorter than a plain one."""
        return (4 * (self.values - 1) - 4 - self.strays_at) // 4

    @cached_property
    def row_bytes(self) -> int:
        """Memory for a chunk, compacted or plain."""
        return _align(4 * self.values, _ALIGNMENT)

    def size(self, strays: int) -> int:
        """Return the bytes of a compacted chunk with so many strays."""
        return self.strays_at + 4 * strays

    def sizes(self, values: int) -> range:  # noqa: ARG002 - shorter chunks are padded
        """Return all sizes that a compacted chunk can have."""
        return range(self.size(0), self.size(self.most_strays) + 1, 4)

    def measure(self, payload: memoryview) -> int:
        """Return the size of a compacted chunk with as many strays as it announces."""
        return self.size(strays_in(payload))


@dataclass(frozen=True)
class ChunkRows:
    """The chunks of a bucket as rows of memory: ``quotient`` values each, one more in the first ``longer``."""

    chunks: tuple[Chunk, ...]
    layout: CompactLayout
    quotient: int
    longer: int

    @classmethod
    def of(cls, chunks: tuple[Chunk, ...]) -> ChunkRows:
        """Return the rows of chunks as ``chunks.py`` cuts them."""
        quotient = chunks[-1].length
        longer = sum(chunk.length > quotient for chunk in chunks)
        return cls(chunks, CompactLayout(chunks[0].length), quotient, longer)


def strays_in(compacted: memoryview) -> int:
    """Return how many strays a compacted chunk announces."""
    return int.from_bytes(compacted[:4], "little")


def is_worth_compacting(itemsize: int, chunks: Sequence[Chunk]) -> bool:
    """Return whether a bucket of floating-point numbers, cut into these chunks, travels compacted."""
    lengths = [chunk.length for chunk in chunks]
    if itemsize != 4 or itemsize * sum(lengths) < SMALLEST_COMPACTED_BYTES:
        return False
    return min(lengths) >= FEWEST_COMPACTED and max(lengths) <= MOST_COMPACTED


def _align(position: int, to: int) -> int:
    return -(-position // to) * to
