"""The encoding ``COMPACT``: float32 values without loss, in as many bits as they need. Pure.

Three things make gradients shorter than 32 bits a value. Values near each other have similar exponents. What was
computed in half precision, or is a sum of a few such values, ends in zeros. And many values are zero altogether.

A group of :data:`GROUP` values stores its largest exponent, the *top*, once. Its bits lie in :data:`PLANES` planes of
:data:`PLANE_BYTES` bytes. Byte ``i`` of a plane belongs to value ``i`` of the group, to value ``i + 128``, or to both:

========= ================================================== =============================================
planes    bits of a value                                    bytes
========= ================================================== =============================================
0         4: the exponent's code                             of both; ``i + 128`` in the upper 4 bits
1, 2      8: the sign, above mantissa bits 22 to 16          of ``i``; of ``i + 128``
3         4: mantissa bits 15 to 12                          of both
4         4: mantissa bits 11 to 8                           of both
5, 6      8: mantissa bits 7 to 0                            of ``i``; of ``i + 128``
7, 8      8: the exponent, if the code is 0                  of ``i``; of ``i + 128``
========= ================================================== =============================================

A code of 1 to 15 stands for the exponent ``top + 1 - code``. Code 0 is that of zeros, and of *strays*: values so far
below the others that the code cannot say it. A plane of a group is absent if all its bytes are zero; sparse, a bitmap
of the bytes that are not zero and then those bytes, if that is shorter; and otherwise dense. Plane 0 may be *paired*,
where most codes are small: a pair of codes of 1 to 8 is a number of 6 bits, :data:`ESCAPE` stands for any other pair,
which follows as it is. So gradients computed in bf16 take about 11.4 bits a value, those computed in fp16 15.4, others
27.4, and groups of zeros nothing.

============= =========================== ================================================
bytes         of a paired plane           for each byte ``i``
============= =========================== ================================================
64            the numbers' bits 3 to 0    of pair ``i``; above them of pair ``i + 64``
32            their bits 5 and 4          of pair ``i``; then ``i + 32``, ``i + 64``, ``i + 96``
any           pairs of codes              the next pair that has no number, as in plane 0
============= =========================== ================================================

================== ======== ====================================================================
bytes              for each what
================== ======== ====================================================================
:data:`HEAD_BYTES` chunk    number of bytes in the tail (4 bytes), then nothing
8                  group    directory: where its planes begin in the tail (32 bits), a kind for
                            each plane (2 bits each, plane 0 lowest), nothing (6), the top (8)
any                group    tail: the planes, one after the other. Groups come in any order
================== ======== ====================================================================

All numbers are little-endian. Values are padded with zeros to whole groups. A chunk that would not be shorter travels
plain. Values in bf16 are compacted as float32. Whatever the values, restoring them gives the same bits.

Changes
-------
A step moves a weight by little, so whoever has the old weight needs few bits for the new one. The bits of float32,
those below the sign inverted where it is set, count up as values do. The *change* is the difference of two such
numbers, modulo 2**32, in zigzag form: 0, -1, 1, -2, 2 ... become 0, 1, 2, 3, 4 .... The change of weights that are
rounded to bf16 is that of their upper halves. So that small changes leave whole planes empty, the bits of a change go
to other places: bits 0 to 7 stay, 8 to 14 become 16 to 22 and 15 the sign, 16 to 19 become 12 to 15, 20 to 23 become 8
to 11, and 24 to 31 the exponent. With AdamW at a learning rate of 1e-4, weights take about 21 bits then, and rounded
ones 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from poseidon.sums.chunks import Chunk

GROUP = 256
"""Values that share a top. One in ten thousand values of real gradients is a stray then; smaller groups have hardly
fewer."""
PLANES = 9
PLANE_BYTES = GROUP // 2
BITMAP_BYTES = PLANE_BYTES // 8
ABSENT, SPARSE, DENSE, PAIRED = 0, 1, 2, 3
"""Kinds of planes; only plane 0 is ever paired."""
LARGEST_PAIRED = 8
"""The largest code that the short form of a pair can say."""
ESCAPE = LARGEST_PAIRED**2 - 1
"""The last pair, which is rare, has to follow too."""
PAIRED_BYTES = PLANE_BYTES * 6 // 8
"""Of a paired plane without the pairs that follow."""
FEWEST_DENSE = PLANE_BYTES - BITMAP_BYTES
"""A plane with at least so many bytes that are not zero is dense."""
HEAD_BYTES = 16
ENTRY_BYTES = 8
"""Of the directory."""
KINDS_AT, TOP_AT = 32, 56
"""Bits of a directory's entry."""
_BITS = {"float32": 27.4, "bf16": 11.4, "fp16": 15.4}
"""Of a gradient's value, by what it was computed in."""
_SUM_BITS = {"bf16": (14.5, 1.5), "fp16": (17.7, 1.4)}
"""Of a sum: bits, and more of them each time the number of workers doubles."""
EMPTY_BITS = 8 * ENTRY_BYTES / GROUP
"""Of a value in a group of zeros, which is only an entry in the directory."""
FEWEST_COMPACTED = 4096
"""Shorter chunks travel plain."""
SMALLEST_COMPACTED = 1 << 15
"""Values of a bucket. Below this there is little to save. Above it, halving, adding and joining on the host would keep
threads of Python busy for milliseconds at the end of a backward, where nothing hides them; a device needs few calls."""
MOST_COMPACTED = 1 << 24
"""So that any position in a chunk has 32 bits."""
ALIGNMENT = 16


@dataclass(frozen=True)
class CompactLayout:
    """Where the fields of a compacted chunk lie, for chunks of up to ``values``; cached, as every message asks."""

    values: int
    itemsize: int = 4
    """Bytes of a plain value: 2 for bf16."""

    @cached_property
    def groups(self) -> int:
        """Number of groups."""
        return -(-self.values // GROUP)

    @cached_property
    def tail_at(self) -> int:
        """Where the tail begins."""
        return HEAD_BYTES + ENTRY_BYTES * self.groups

    @cached_property
    def row_bytes(self) -> int:
        """Memory for a chunk, compacted or plain."""
        return align(max(self.itemsize * self.values, self.tail_at))

    def sizes(self, values: int) -> range:
        """Return all sizes that a compacted chunk of ``values`` can have: it is shorter than a plain one."""
        return range(self.tail_at, self.itemsize * values)

    def measure(self, payload: memoryview) -> int:
        """Return the size of a compacted chunk with as long a tail as it announces."""
        return self.tail_at + int.from_bytes(payload[:4], "little")


@dataclass(frozen=True)
class ChunkRows:
    """The chunks of a bucket as rows of memory: ``quotient`` values each, one more in the first ``longer``."""

    chunks: tuple[Chunk, ...]
    layout: CompactLayout
    quotient: int
    longer: int

    @classmethod
    def of(cls, chunks: tuple[Chunk, ...], itemsize: int = 4) -> ChunkRows:
        """Return the rows of chunks as ``chunks.py`` cuts them."""
        quotient = chunks[-1].length
        longer = sum(chunk.length > quotient for chunk in chunks)
        return cls(chunks, CompactLayout(chunks[0].length, itemsize), quotient, longer)

    @classmethod
    def alone(cls, length: int, layout: CompactLayout) -> ChunkRows:
        """Return the row of one chunk among others of this layout."""
        return cls((Chunk(0, 0, 0, length, 0),), layout, length, 0)


HALVES_SHARE = 0.5
"""Share of their bytes that gradients computed in bf16 keep on the host: ``halves.py``, which needs NumPy."""


def compacted_bits(precision: str, workers: int) -> tuple[float, float]:
    """Return about how many of 32 bits a gradient's value takes as a part, and as the sum of all parts.

    ``precision`` is what it was computed in: float32, or under autocast bf16 or fp16.
    """
    part = _BITS[precision]
    if precision not in _SUM_BITS or workers == 1:
        return part, part
    least, more = _SUM_BITS[precision]
    return part, min(least + more * math.log2(workers), _BITS["float32"])


def is_worth_compacting(chunks: Sequence[Chunk]) -> bool:
    """Return whether a bucket of float32 or bf16, cut into these chunks, travels compacted."""
    lengths = [chunk.length for chunk in chunks]
    if sum(lengths) < SMALLEST_COMPACTED:
        return False
    return min(lengths) >= FEWEST_COMPACTED and max(lengths) <= MOST_COMPACTED


def align(position: int) -> int:
    """Return the first aligned position that is not before ``position``."""
    return -(-position // ALIGNMENT) * ALIGNMENT
