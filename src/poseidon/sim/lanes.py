"""One direction of a network card, or a link inside a machine: carries one piece at a time.

Freights with a lower priority number go first. Freights of one stream keep their order; streams of equal priority (such
as a collective beside direct messages) take turns, piece by piece, as TCP connections share a card. A piece under way
is not preempted: its size is what a transport has in flight, and an urgent freight waits that long.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from poseidon.sim.agenda import Agenda


@dataclass(slots=True)
class Freight:
    """Bytes to carry, and a callback for when they are done."""

    stream: str
    size_bytes: float
    seconds_per_byte: float
    done: Callable[[], None]
    priority: int = 0
    name: str = ""
    began_s: float = -1.0
    stall_s_per_byte: float = 0.0
    """Additional time for each byte while the host's cores compute."""
    work_s_per_byte: float = 0.0
    """Processor time that each byte costs the host."""


class Lane:
    """A serial resource with priorities."""

    def __init__(
        self,
        agenda: Agenda,
        piece_bytes: float,
        on_freight: Callable[[Freight, float], None] | None = None,
        on_work: Callable[[float], None] | None = None,
        is_crowded: Callable[[], bool] = lambda: False,
    ) -> None:
        self.sent_bytes = 0.0
        self.busy_s = 0.0
        self._agenda = agenda
        self._piece_bytes = piece_bytes
        self._on_freight = on_freight
        self._on_work = on_work
        self._is_crowded = is_crowded
        self._waiting: dict[str, list[tuple[int, int, Freight]]] = {}
        self._turns: list[str] = []
        """Streams with something to carry; the first is next."""
        self._count = 0
        self._is_busy = False

    def submit(self, freight: Freight) -> None:
        """Carry a freight when its turn comes; ``freight.done`` is called when its last byte has left."""
        queue = self._waiting.setdefault(freight.stream, [])
        if freight.stream not in self._turns:
            self._turns.append(freight.stream)
        heapq.heappush(queue, (freight.priority, self._count, freight))
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
        freight = queue[0][2]
        if freight.began_s < 0:
            freight.began_s = self._agenda.now
        piece = min(freight.size_bytes, self._piece_bytes)
        seconds = piece * freight.seconds_per_byte
        if freight.stall_s_per_byte > 0 and self._is_crowded():
            seconds += piece * freight.stall_s_per_byte
        freight.size_bytes -= piece
        self.sent_bytes += piece
        self.busy_s += seconds
        if self._on_work is not None and freight.work_s_per_byte > 0:
            self._on_work(piece * freight.work_s_per_byte)
        if freight.size_bytes <= 0:
            heapq.heappop(queue)
        self._agenda.after(seconds, lambda: self._carried(stream, freight))

    def _carried(self, stream: str, freight: Freight) -> None:
        # Behind the streams that arrived meanwhile.
        self._turns.remove(stream)
        if self._waiting[stream]:
            self._turns.append(stream)
        if freight.size_bytes <= 0:
            if self._on_freight is not None:
                self._on_freight(freight, self._agenda.now)
            freight.done()
        self._carry()
