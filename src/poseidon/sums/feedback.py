"""Lossy sums on the host, with error feedback at both ends. Pure.

A worker encodes its part of a chunk, and keeps what that leaves out for its next part. The owner adds the parts in rank
order, its own as it is, encodes the sum, and keeps what that leaves out for its next sum. So of every value each worker
keeps one float32, for the part or for the sum, and either way it is something that the sum still lacks: all that was
sent and all that is kept add up to all gradients, whoever owns what.

Everybody decodes the owner's bytes, the owner too, so replicas stay identical.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from poseidon.errors import ServerError
from poseidon.sums.arithmetic import Fail, Then
from poseidon.sums.chunks import Chunk
from poseidon.sums.encodings import Encoded, Payload
from poseidon.sums.lossy import LossyCodec, keep_rest
from poseidon.sums.messages import Layouts
from poseidon.sums.slots import Slot
from poseidon.sums.touched import TouchedRows
from poseidon.wire.formats import Array, Format
from poseidon.wire.pool import Pool


class LossyAdder:
    """Adds up one slot lossily, an :class:`~poseidon.sums.arithmetic.Adder`; means come back.

    ``kept`` has a float32 for each value; whoever has it may read and write it between steps. Values are float32, or
    shorter ones of ``number_format``.
    """

    together = 1

    def __init__(
        self, slot: Slot, rank: int, codec: LossyCodec, kept: Array, number_format: Format, pool: Pool, divisor: int
    ) -> None:
        self.layouts: Layouts = {codec.encoding: codec}
        self._slot = slot
        self._rank = rank
        self._codec = codec
        self._kept = kept
        self._format = number_format
        self._pool = pool
        self._divisor = np.float32(divisor)
        self._values: Array | None = None

    def open(self, values: Array, then: Then, fail: Fail) -> None:  # noqa: ARG002 - nothing happens on another thread
        """Begin a step: the values can be read at once."""
        if values.shape != self._kept.shape or values.dtype != self._format.stored:
            raise ServerError(
                f"slot {self._slot.number} was given {values.size} values of {values.dtype}; "
                f"it holds {self._kept.size} of {self._format.stored}"
            )
        self._values = values
        then()

    def part(self, chunk: Chunk) -> Encoded:
        """Return this worker's part, with what was kept of earlier ones."""
        kept = self._kept[chunk.start : chunk.stop]
        return self._encode(np.add(self.own(chunk), kept), kept)

    def own(self, chunk: Chunk) -> Array:
        """Return this worker's part of a chunk that it owns, as it is: what is kept here is of the sum."""
        assert self._values is not None
        return self._format.widen(self._values[chunk.start : chunk.stop])

    def place_part(self, chunk: Chunk, rank: int, length: int) -> None:
        """Let the wire choose the memory."""

    def decode(self, chunk: Chunk, encoding: int, payload: memoryview) -> Array:  # noqa: ARG002 - there is one
        """Return the values of a part."""
        return self._codec.decode(np.frombuffer(payload, np.uint8), chunk.length)

    def touch(self, chunk: Chunk, everybody: Sequence[TouchedRows]) -> Array:  # noqa: ARG002 - as in the contract
        """Refuse them: rows travel to tables, and what is summed lossily is none."""
        raise ServerError(
            f"slot {self._slot.number} is summed lossily, but rows came for its values from {chunk.start}; "
            "only the exact sum of a table takes rows"
        )

    def add(self, chunk: Chunk, parts: Sequence[Array], total: Array | None) -> Array:
        """Add ``parts`` to ``total``, now."""
        if total is None:
            total = np.frombuffer(self._pool.lend(4 * chunk.length), np.float32)
            np.copyto(total, parts[0])
            parts = parts[1:]
        with np.errstate(over="ignore", invalid="ignore"):
            for part in parts:
                np.add(total, part, out=total)
        return total

    def wait(self, total: Array, then: Then, fail: Fail) -> None:  # noqa: ARG002 - as in the contract
        """Go on at once."""
        then()

    def encode(self, chunk: Chunk, total: Array) -> Encoded:
        """Return a finished sum, with what was kept of earlier ones."""
        kept = self._kept[chunk.start : chunk.stop]
        return self._encode(np.add(total, kept, out=total), kept)

    def place_sum(self, chunk: Chunk, length: int) -> memoryview:  # noqa: ARG002 - as in the contract
        """Return new memory: the place of the values may be too short."""
        return self._pool.lend(length)

    def land(self, chunk: Chunk, encoding: int, payload: Payload) -> None:
        """Leave the mean in the values."""
        assert self._values is not None
        data = payload.data if isinstance(payload, np.ndarray) else payload
        total = self.decode(chunk, encoding, data)
        np.divide(total, self._divisor, out=total)
        np.copyto(self._values[chunk.start : chunk.stop], self._format.narrow(total))

    def close(self) -> None:
        """Let go of the values."""
        self._values = None

    def _encode(self, values: Array, kept: Array) -> Encoded:
        payload = self._codec.encode(values)
        keep_rest(values, self._codec.decode(payload, values.size), kept)
        return Encoded(self._codec.encoding, payload)
