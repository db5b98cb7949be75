"""What a compacted chunk looks like: float32 values without loss, in about 28 bits each. Pure.

Values near each other in a gradient have similar exponents. A group of :data:`GROUP` values keeps its largest exponent
once, and each value its distance below that in 4 bits instead of 8. A zero has the last code. So has a *stray*: a value
too far below the others, whose exponent travels in a list at the end. Whatever the values, restoring gives their very
bits.

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

Values are filled up with zeros to whole groups. A chunk with so many strays that nothing is gained travels as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from poseidon.sums.chunks import Chunk

GROUP = 256
"""Values with one largest exponent. Of real gradients one in ten thousand is a stray then; in smaller groups hardly
fewer."""
HEAD_BYTES = 16
COMPACT_SHARE = 28.05 / 32
"""Bytes that real gradients keep, on the average."""
FEWEST_COMPACTED = 4096
"""Shorter chunks travel as they are."""
SMALLEST_COMPACTED_BYTES = 8 << 20
"""Of a bucket. Nothing hides the exchange of the last ones of a backward, which are the small ones, and a device that
is busy computing takes its time; the host adds them up sooner than a device, and they save little."""
MOST_COMPACTED = 1 << 24
"""A stray's position has so many values."""
_ALIGNMENT = 16


@dataclass(frozen=True)
class CompactLayout:
    """Where the parts of a compacted chunk lie, for chunks of up to so many values. Every message asks."""

    values: int

    @cached_property
    def groups(self) -> int:
        """How many groups there are."""
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
        """With more than this, nothing is gained. A compacted chunk is shorter than one of a value less as it is."""
        return (4 * (self.values - 1) - 4 - self.strays_at) // 4

    @cached_property
    def row_bytes(self) -> int:
        """Memory for a chunk, compacted or as it is."""
        return _align(4 * self.values, _ALIGNMENT)

    def size(self, strays: int) -> int:
        """Return the bytes of a compacted chunk with so many strays."""
        return self.strays_at + 4 * strays

    def could_be(self, length: int, values: int) -> bool:
        """Return whether a chunk of ``values`` may have ``length`` bytes on the wire."""
        is_compacted = self.size(0) <= length <= self.size(self.most_strays) and length % 4 == 0
        return is_compacted or self.is_plain(length, values)

    def is_plain(self, length: int, values: int) -> bool:
        """Return whether a chunk of ``values`` that takes ``length`` bytes travels as it is."""
        return length == 4 * values


def is_worth_compacting(itemsize: int, chunks: Sequence[Chunk]) -> bool:
    """Return whether a bucket of floating-point numbers, cut into these chunks, is compacted."""
    lengths = [chunk.length for chunk in chunks]
    if itemsize != 4 or itemsize * sum(lengths) < SMALLEST_COMPACTED_BYTES:
        return False
    return min(lengths) >= FEWEST_COMPACTED and max(lengths) <= MOST_COMPACTED


def _align(position: int, to: int) -> int:
    return -(-position // to) * to
