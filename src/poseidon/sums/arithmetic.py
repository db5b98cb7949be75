"""What the server asks of an arithmetic: read parts, add them, write sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from poseidon.sums.chunks import Chunk
from poseidon.sums.encodings import Encoded, Payload
from poseidon.sums.messages import Layouts
from poseidon.sums.touched import TouchedRows

Then = Callable[[], None]
Fail = Callable[[BaseException], None]


class Adder(Protocol):
    """Adds up one slot. Made when the slot is booked, and used for one step after the other.

    Methods are called from several threads, for one chunk by one thread at a time. Whatever the adder needs to add a
    part, it returns from :meth:`own` or :meth:`decode` and gets back in :meth:`add`.
    """

    layouts: Layouts
    """How parts and sums of this slot may be encoded."""
    together: int
    """How many parts :meth:`add` wants at a time."""

    def open(self, values: Any, then: Then, fail: Fail) -> None:
        """Begin a step with this worker's values, and call ``then`` once :meth:`part` and :meth:`own` can read them.

        ``fail`` is called instead if that, or ``then``, raises on another thread. Until :meth:`close`, nobody else may
        write the values.
        """

    def part(self, chunk: Chunk) -> Encoded:
        """Return this worker's part of a chunk that another rank owns."""

    def own(self, chunk: Chunk) -> Any:
        """Return this worker's part of a chunk it owns itself."""

    def place_part(self, chunk: Chunk, rank: int, length: int) -> memoryview | None:
        """Return where to receive the part of ``rank``, whose turn it is; None for memory of the wire's own.

        Parts of one chunk may be received, and so placed, on several threads at once.
        """

    def decode(self, chunk: Chunk, encoding: int, payload: memoryview) -> Any:
        """Return a part that has been received."""

    def touch(self, chunk: Chunk, everybody: Sequence[TouchedRows]) -> Any:
        """Return the touched rows of all workers, in rank order, as one more part, the last; float32 only."""

    def add(self, chunk: Chunk, parts: Sequence[Any], total: Any) -> Any:
        """Return ``total`` (None at first) plus ``parts``, added from left to right. It may be still to be computed."""

    def wait(self, total: Any, then: Then, fail: Fail) -> None:
        """Call ``then`` once ``total`` has been computed; ``fail`` as in :meth:`open`."""

    def encode(self, chunk: Chunk, total: Any) -> Encoded:
        """Return a finished sum as it travels."""

    def place_sum(self, chunk: Chunk, length: int) -> memoryview:
        """Return where to receive a sum: where this worker's part lay, which the owner must have had by then."""

    def land(self, chunk: Chunk, encoding: int, payload: Payload) -> None:
        """Note that a sum is here: as :meth:`encode` returned it, or received where :meth:`place_sum` said."""

    def close(self) -> Any:
        """End the step, all sums being here: leave them in the values, and return what the slot's future brings."""
