"""How the values of a chunk can lie in a message. The header names the encoding of each chunk. Pure.

A new encoding is a number here, a :class:`Layout`, and an adder (``arithmetic.py``) that offers it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from poseidon.wire.formats import Array


class Encoding(IntEnum):
    """Numbers that travel in the header of a PART or SUM."""

    PLAIN = 0
    """Value after value, in the slot's number format."""
    COMPACT = 1
    """float32 or bf16 in as many bits as they need, without loss: ``compact.py``. For devices."""
    HALVES = 2
    """float32, mostly in 16 bits, without loss: ``halves.py``. For processors."""
    CHANGE = 3
    """New weights as their change (``compact.py``) from those that the receiver has, laid out like ``COMPACT``."""
    ROUNDED_CHANGE = 4
    """The same from those that the receiver has, rounded to bf16."""
    BF16 = 5
    """Lossy (``lossy.py``): float32 rounded to 16 bits."""
    INT8 = 6
    """Lossy: about 8 bits a value, with a scale for each block."""
    TOPK = 7
    """Lossy: the largest values and their places."""
    INT4 = 8
    """Lossy: about 4 bits a value, with a scale for each block."""


Payload = Array | memoryview


class Encoded(NamedTuple):
    """A chunk as it travels."""

    encoding: int
    payload: Payload


class Layout(Protocol):
    """Which sizes a chunk can have in one encoding."""

    def sizes(self, values: int) -> range:
        """Return all sizes in bytes that a chunk of ``values`` can have."""

    def measure(self, payload: memoryview) -> int:
        """Return the size in bytes that the content of a chunk implies: whoever decodes it relies on that."""


@dataclass(frozen=True)
class PlainLayout:
    """:attr:`Encoding.PLAIN`: every value takes ``itemsize`` bytes."""

    itemsize: int

    def sizes(self, values: int) -> range:
        """Return the one size there is."""
        size_bytes = self.itemsize * values
        return range(size_bytes, size_bytes + 1)

    def measure(self, payload: memoryview) -> int:
        """Return the size of the payload: content implies nothing."""
        return payload.nbytes
