"""How many bits values have taken on their way through the server: what plans are ranked with, once it is known."""

from __future__ import annotations

import threading
from collections import defaultdict

from poseidon.planning.transfers import SentBits
from poseidon.sums.arithmetic import Adder
from poseidon.sums.chunks import Chunk
from poseidon.sums.encodings import Encoded, Encoding


class Tally:
    """Counts what this worker sends; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: defaultdict[tuple[bool, bool], tuple[int, int]] = defaultdict(lambda: (0, 0))
        """By whether a device compacts it, and whether it is a part: values and bytes."""

    def note(self, adder: Adder, chunk: Chunk, encoded: Encoded, is_part: bool) -> None:
        """Count a chunk, once for all to whom it is sent."""
        kind = (Encoding.COMPACT in adder.layouts, is_part)
        with self._lock:
            values, size_bytes = self._sent[kind]
            self._sent[kind] = values + chunk.length, size_bytes + encoded.payload.nbytes

    def bits(self) -> SentBits:
        """Return the bits that a value took, where parts and sums have been sent."""
        with self._lock:
            every = {kind: 8 * size_bytes / values for kind, (values, size_bytes) in self._sent.items()}
        device, host = (
            (every[kind, True], every[kind, False]) if {(kind, True), (kind, False)} <= set(every) else None
            for kind in (True, False)
        )
        return SentBits(device, host)
