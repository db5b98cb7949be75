"""A wire for tests without sockets or threads: the test decides when messages arrive and in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from poseidon.errors import WireError
from poseidon.wire.message import Header, check_payload, pack, unpack
from poseidon.wire.transport import Transport


@dataclass(frozen=True)
class InFlightMessage:
    """One message in flight."""

    peer: int
    header: Header
    payload: memoryview
    priority: int
    number: int
    """Position in the order of all sends on the network."""
    on_sent: Callable[[], None] | None = field(default=None, compare=False)


Scheduler = Callable[[Sequence[InFlightMessage]], int]
"""Returns the index of the message that arrives next; there is at least one."""


def first_urgent(parcels: Sequence[InFlightMessage]) -> int:
    """Choose the lowest priority value, and among equal ones the one sent first."""
    return min(range(len(parcels)), key=lambda index: (parcels[index].priority, parcels[index].number))


class MemoryNetwork:
    """The messages in flight between the transports of one test."""

    def __init__(self, scheduler: Scheduler = first_urgent) -> None:
        self.transports: list[MemoryTransport] = []
        self.parcels: list[InFlightMessage] = []
        self._scheduler = scheduler
        self._numbers = count()

    def put(
        self, peer: int, header: Header, payload: memoryview, priority: int, on_sent: Callable[[], None] | None
    ) -> None:
        """Put a message in flight."""
        self.parcels.append(InFlightMessage(peer, header, payload, priority, next(self._numbers), on_sent))

    def step(self) -> bool:
        """Let one message arrive; return False if none is in flight."""
        if not self.parcels:
            return False
        parcel = self.parcels.pop(self._scheduler(self.parcels))
        # Read the payload now, as a socket would: one that changed before on_sent arrives changed.
        payload = bytes(parcel.payload)
        if parcel.on_sent is not None:
            parcel.on_sent()
        self.transports[parcel.peer].arrive(pack(parcel.header), payload)
        return True

    def pump(self, limit: int | None = None) -> int:
        """Let messages arrive until none is left, or ``limit`` have; return how many did."""
        arrived = 0
        while (limit is None or arrived < limit) and self.step():
            arrived += 1
        return arrived


class MemoryTransport(Transport):
    """One rank of a ``MemoryNetwork``; see ``make_memory_network``."""

    def __init__(self, rank: int, size: int, network: MemoryNetwork) -> None:
        super().__init__(rank, size)
        self.network = network
        self._closed = False

    def _check_sendable(self, peer: int, header: Header) -> None:
        if self._closed:
            raise WireError(f"rank {self.rank} cannot send {header.kind.name} to rank {peer}: its transport is closed")

    def _send(
        self,
        peers: Sequence[int],
        header: Header,
        payload: memoryview,
        priority: int,
        on_sent: Callable[[], None] | None,
    ) -> None:
        for peer in peers:
            self.network.put(peer, header, payload, priority, on_sent)

    def arrive(self, head: bytes, payload: bytes) -> None:
        """Pass a message to its handler, unless this rank is closed or lost."""
        if self._closed:
            return
        header = unpack(head, len(payload))
        check_payload(header, payload)
        view, place = memoryview(payload), self._place(header)
        if place is not None:
            place[:] = view
            view = place
        self.stats.count_received(len(payload))
        # Unlike a transport with threads, this shows the test what the handler raises.
        self._handlers[header.kind](header, view)

    def close(self) -> None:
        """Stop receiving; messages already sent still arrive when pumped."""
        self._closed = True

    def die(self, why: str = "killed by the test") -> None:
        """Vanish without a goodbye: messages from and to this rank are dropped, and the others notice."""
        self._closed = True
        parcels = self.network.parcels
        parcels[:] = [parcel for parcel in parcels if self.rank not in (parcel.peer, parcel.header.sender)]
        for transport in self.network.transports:
            if not transport._closed:
                transport._tell_lost(self.rank, why)


def make_memory_network(size: int, scheduler: Scheduler | None = None) -> list[MemoryTransport]:
    """Return connected transports for ranks 0..size-1; ``transports[0].network.pump()`` moves their messages."""
    network = MemoryNetwork(scheduler or first_urgent)
    network.transports = [MemoryTransport(rank, size, network) for rank in range(size)]
    return network.transports
