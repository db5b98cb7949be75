"""One direction of a network card, or a link inside a machine: carries one piece after the other.

Parcels of a lower priority number go first. Parcels of one stream keep their order; streams of equal priority (a
collective beside direct messages, say) take turns, piece by piece, which is how TCP connections share a card. A
piece under way is not interrupted: its size is what a transport has in flight, and an urgent parcel waits that long.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from poseidon.sim.agenda import Agenda


@dataclass(slots=True)
class Parcel:
    """Bytes to carry, and whom to tell."""

    stream: str
    size_bytes: float
    seconds_per_byte: float
    done: Callable[[], None]
    priority: int = 0
    name: str = ""
    began_s: float = -1.0


class Lane:
    """A serial resource with priorities."""

    def __init__(
        self, agenda: Agenda, piece_bytes: float, on_parcel: Callable[[Parcel, float], None] | None = None
    ) -> None:
        self.sent_bytes = 0.0
        self.busy_s = 0.0
        self._agenda = agenda
        self._piece_bytes = piece_bytes
        self._on_parcel = on_parcel
        self._waiting: dict[str, list[tuple[int, int, Parcel]]] = {}
        self._turns: list[str] = []
        """Streams with something to carry, the one whose turn it is first."""
        self._count = 0
        self._is_busy = False

    def submit(self, parcel: Parcel) -> None:
        """Carry a parcel when its turn comes; ``parcel.done`` is called when its last byte has left."""
        queue = self._waiting.setdefault(parcel.stream, [])
        if parcel.stream not in self._turns:
            self._turns.append(parcel.stream)
        heapq.heappush(queue, (parcel.priority, self._count, parcel))
        self._count += 1
        if not self._is_busy:
            self._carry()

    def _carry(self) -> None:
        """Start the next piece, if there is one."""
        if not self._turns:
            self._is_busy = False
            return
        self._is_busy = True
        stream = min(self._turns, key=lambda name: self._waiting[name][0][0])
        queue = self._waiting[stream]
        parcel = queue[0][2]
        if parcel.began_s < 0:
            parcel.began_s = self._agenda.now
        piece = min(parcel.size_bytes, self._piece_bytes)
        seconds = piece * parcel.seconds_per_byte
        parcel.size_bytes -= piece
        self.sent_bytes += piece
        self.busy_s += seconds
        if parcel.size_bytes <= 0:
            heapq.heappop(queue)
        self._agenda.after(seconds, lambda: self._carried(stream, parcel))

    def _carried(self, stream: str, parcel: Parcel) -> None:
        # Behind the streams that came meanwhile.
        self._turns.remove(stream)
        if self._waiting[stream]:
            self._turns.append(stream)
        if parcel.size_bytes <= 0:
            if self._on_parcel is not None:
                self._on_parcel(parcel, self._agenda.now)
            parcel.done()
        self._carry()
