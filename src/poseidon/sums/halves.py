"""The encoding ``HALVES``: float32 values of which few need more than their upper 16 bits, in NumPy. Pure.

Gradients computed in bf16 have no other bits. This is no match for ``compact.py``, but costs a processor next to
nothing: a seventh of a nanosecond for each byte, where sending one takes 8 at 1 Gbit/s.

===== ======== =====================================================
bytes for each what
===== ======== =====================================================
4     rest     position of a value with more bits, in rising order
2     value    the upper 16 bits
2     rest     the lower 16 bits of that value
===== ======== =====================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from poseidon.errors import ServerError
from poseidon.wire.formats import Array

_REST_BYTES = 6
_MOST_RESTS = 8
"""At most one in so many values may have more bits."""
_SAMPLES = 128
"""Values to look at first, most gradients being of no use here."""

_LONGEST_PAUSE = 31
"""Steps after which a chunk is looked at again, at the latest."""

Lend = Callable[[int], Any]
"""Returns memory of some size in bytes."""


class HalvesLayout:
    """:attr:`~poseidon.sums.encodings.Encoding.HALVES`."""

    def sizes(self, values: int) -> range:
        """Return all sizes; each stands for a number of values with more bits."""
        fewest = 2 * values
        return range(fewest, fewest + values // _MOST_RESTS * _REST_BYTES + 1, _REST_BYTES)

    def measure(self, payload: memoryview) -> int:
        """Return the size of the payload: content implies nothing."""
        return payload.nbytes


def halve(values: Array, lend: Lend) -> Array | None:
    """Return float32 values as they travel, in memory from ``lend``; None if too many have more bits."""
    size = len(values)
    bits = values.view(np.uint32)
    sample = bits[:: size // _SAMPLES + 1] & np.uint32(0xFFFF)
    if np.count_nonzero(sample) > len(sample) // 4:
        return None
    positions: Array = np.empty(0, np.uint32)
    halves = bits.view(np.uint16)
    if np.bitwise_or.reduce(bits) & 0xFFFF:
        positions = np.flatnonzero(halves[::2])
        if len(positions) > size // _MOST_RESTS:
            return None
    payload = np.frombuffer(lend(2 * size + _REST_BYTES * len(positions)), np.uint8)
    places, upper, lower = _split(payload, size)
    places[:] = positions
    upper[:] = halves[1::2]
    lower[:] = halves[::2][positions]
    return payload


class HalvesFinder:
    """Halves the chunks of one slot where that shortens them, step after step.

    A chunk whose values keep having more bits, as those that were never bf16 do, is looked at less and less often.
    """

    def __init__(self, chunks: int) -> None:
        self._pauses = [0] * chunks
        """By chunk: steps between two looks..."""
        self._left = [0] * chunks
        """... and until the next one."""

    def halve(self, index: int, values: Array, lend: Lend) -> Array | None:
        """Return the values of a chunk as :func:`halve` does; None also if this is not the step to look."""
        if self._left[index]:
            self._left[index] -= 1
            return None
        payload = halve(values, lend)
        self._pauses[index] = 0 if payload is not None else min(2 * self._pauses[index] + 1, _LONGEST_PAUSE)
        self._left[index] = self._pauses[index]
        return payload


def join_halves(payload: Array, size: int, lend: Lend) -> Array:
    """Return the ``size`` float32 values of a payload of any length that :class:`HalvesLayout` allows."""
    places, upper, lower = _split(payload, size)
    bits = np.frombuffer(lend(4 * size), np.uint32)
    np.left_shift(upper, 16, out=bits, dtype=np.uint32)
    if len(places):
        if places.max() >= size:
            raise ServerError(f"a chunk of {size} values came with lower bits for value {places.max()}")
        bits[places] |= lower
    return bits.view(np.float32)


def _split(payload: Array, size: int) -> tuple[Array, Array, Array]:
    count = (len(payload) - 2 * size) // _REST_BYTES
    places = payload[: 4 * count].view(np.uint32)
    upper = payload[4 * count :][: 2 * size].view(np.uint16)
    return places, upper, payload[4 * count + 2 * size :].view(np.uint16)
