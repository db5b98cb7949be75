"""Sums on the host, by NumPy. Parts are added a few at a time as soon as the next ones are here. Pure.

Every worker receives the bits that one owner computed, so replicas stay identical.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from poseidon.errors import ServerError
from poseidon.sums.arithmetic import Fail, Then
from poseidon.sums.chunks import Chunk
from poseidon.sums.encodings import Encoded, Encoding, Payload, PlainLayout
from poseidon.sums.halves import HalvesFinder, HalvesLayout, join_halves
from poseidon.sums.messages import Layouts
from poseidon.sums.slots import Slot
from poseidon.sums.touched import TouchedRows, add_up
from poseidon.wire.formats import Array, Format, find_format
from poseidon.wire.pool import MOST_SPARE_BYTES, Pool

PIECE_BYTES = 128 * 1024
"""Parts that are here together are added piece by piece, so that the sum stays in the core's own cache."""
FEWEST_ADDED = 4
"""Parts wait until there are so many to add at once: each pass reads and writes the whole sum once."""


class HostAdder:
    """Adds up one slot in host memory, an :class:`~poseidon.sums.arithmetic.Adder`.

    Sums travel as they are, and whoever receives one divides it by ``divisor``: quotients have more bits than sums.
    Half precision is added in float32, divided by the owner and rounded once. Parts are read where they lie. Memory
    for sums comes from ``pool`` and goes back by itself once it has been sent.
    """

    together = FEWEST_ADDED

    def __init__(self, slot: Slot, rank: int, number_format: Format, pool: Pool, divisor: int = 1) -> None:
        plain = PlainLayout(number_format.stored.itemsize)
        halves = number_format.name == "float32"
        self.layouts: Layouts = (
            {Encoding.PLAIN: plain, Encoding.HALVES: HalvesLayout()} if halves else {Encoding.PLAIN: plain}
        )
        self._short_parts, self._short_sums = (HalvesFinder(len(slot.chunks)) if halves else None for _ in range(2))
        """None if no chunk may travel in halves."""
        self._slot = slot
        self._size = slot.chunks[-1].stop if slot.chunks else 0
        self._rank = rank
        self._format = number_format
        self._pool = pool
        self._divisor = divisor
        self._values: Array | None = None

    def open(self, values: Array, then: Then, fail: Fail) -> None:  # noqa: ARG002 - nothing happens on another thread
        """Begin a step: the values can be read at once."""
        if values.shape != (self._size,) or values.dtype != self._format.stored:
            raise ServerError(
                f"slot {self._slot.number} was given {values.size} values of {values.dtype}; "
                f"it holds {self._size} of {self._format.stored}"
            )
        self._values = values
        then()

    def part(self, chunk: Chunk) -> Encoded:
        """Return this worker's part, where it lies unless it can be shorter."""
        return self._shorten(chunk, self.own(chunk), self._short_parts)

    def own(self, chunk: Chunk) -> Array:
        """Return this worker's part, where it lies."""
        assert self._values is not None
        return self._values[chunk.start : chunk.stop]

    def place_part(self, chunk: Chunk, rank: int, length: int) -> None:
        """Let the wire choose the memory."""

    def decode(self, chunk: Chunk, encoding: int, payload: memoryview) -> Array:
        """Return the values of a part, where they lie if it is plain."""
        if encoding == Encoding.HALVES:
            return join_halves(np.frombuffer(payload, np.uint8), chunk.length, self._pool.lend)
        return np.frombuffer(payload, self._format.stored)

    def touch(self, chunk: Chunk, everybody: Sequence[TouchedRows]) -> Array:
        """Return the sum of the rows, and zeros elsewhere."""
        part = np.frombuffer(self._pool.lend(chunk.length * self._format.stored.itemsize), self._format.stored)
        add_up(everybody, chunk, part)
        return part

    def add(self, chunk: Chunk, parts: Sequence[Array], total: Array | None) -> Array:
        """Add ``parts`` to ``total``, now."""
        values = [self._format.widen(part) for part in parts]
        if total is None:
            dtype = self._format.summed
            total = np.frombuffer(self._pool.lend(chunk.length * dtype.itemsize), dtype)
        else:
            values.insert(0, total)
        _sum_pieces(values, total)
        return total

    def wait(self, total: Array, then: Then, fail: Fail) -> None:  # noqa: ARG002 - as in the contract
        """Go on at once."""
        then()

    def encode(self, chunk: Chunk, total: Array) -> Encoded:
        """Return a finished sum; in half precision, divided and rounded."""
        if self._format.rounds and self._divisor != 1:
            np.divide(total, self._divisor, out=total)
        return self._shorten(chunk, self._format.narrow(total), self._short_sums)

    def place_sum(self, chunk: Chunk, length: int) -> memoryview:
        """Return the memory of this worker's part."""
        return self.own(chunk).data.cast("B")[:length]

    def land(self, chunk: Chunk, encoding: int, payload: Payload) -> None:
        """Divide a sum, unless its owner did, and leave it in its place, where a plain one from another rank lies."""
        own = self.own(chunk)
        is_in_place = encoding == Encoding.PLAIN and chunk.owner != self._rank
        data = payload.data if isinstance(payload, np.ndarray) else payload
        total = own if is_in_place else self.decode(chunk, encoding, data)
        if not self._format.rounds and self._divisor != 1:
            np.divide(total, self._divisor, out=own)
        elif not is_in_place:
            np.copyto(own, total)

    def close(self) -> None:
        """Let go of the values."""
        self._values = None

    def _shorten(self, chunk: Chunk, values: Array, finder: HalvesFinder | None) -> Encoded:
        halves = None if finder is None else finder.halve(chunk.index, values, self._pool.lend)
        return Encoded(Encoding.PLAIN, values) if halves is None else Encoded(Encoding.HALVES, halves)


def host_adders(slots: Sequence[Slot], formats: Sequence[str], rank: int, divisor: int = 1) -> list[HostAdder]:
    """Return an adder for each slot, given the names of their number formats; they share memory for sums."""
    found = [find_format(name) for name in formats]
    owned_bytes = sum(
        chunk.length * number_format.summed.itemsize
        for slot, number_format in zip(slots, found, strict=True)
        for chunk in slot.chunks
        if chunk.owner == rank
    )
    # A pool rounds sizes up by a quarter at most. Every plan gets a pool of its own, which goes with it.
    pool = Pool(max(MOST_SPARE_BYTES, owned_bytes * 5 // 4))
    return [
        HostAdder(slot, rank, number_format, pool, divisor) for slot, number_format in zip(slots, found, strict=True)
    ]


def _sum_pieces(values: Sequence[Array], target: Array) -> None:
    """Write the sum of ``values``, added from left to right, to ``target``, which may be the first of them."""
    first, *others = values
    if not others:
        np.copyto(target, first)
        return
    step = max(1, PIECE_BYTES // target.itemsize)
    # Finding infinities and NaNs is up to the caller (loss scaling looks for them), so they raise no warnings here.
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, target.size, step):
            piece = slice(start, start + step)
            into = target[piece]
            np.add(first[piece], others[0][piece], out=into)
            for one in others[1:]:
                np.add(into, one[piece], out=into)
