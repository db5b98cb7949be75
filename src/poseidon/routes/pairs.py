"""Every worker's rows to every other worker, by direct messages over the wire (``wire/``).

Collectives need the same sizes and the same order on all workers; messages need neither. So a worker may bring any
number of rows, and whatever is ready first leaves first: nobody asks whether the receivers are. Each message crosses to
every other machine once (``team/topology.py``).

The parcels of small units share a shipment (``planning/shipments.py``): one message per peer, which leaves with the
last of them. Rows are opaque bytes here; the route defines their meaning.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from poseidon import failpoints
from poseidon.errors import describe
from poseidon.planning.cluster import Link
from poseidon.routes.parcels import Gathered, Opened, Parcel, join_opened, open_message, write_message
from poseidon.team.membership import PeerLostError
from poseidon.team.team import CLOSE_S, Team
from poseidon.team.wiring import connect_wire
from poseidon.wire.message import Header, Kind

_Key = tuple[int, int]
"""Step, and first unit of the shipment."""


@dataclass(eq=False)
class _Shipment:
    """Parcels that leave together, and what has come from the others, perhaps before this worker was ready."""

    parcels: Sequence[Parcel] = ()
    futures: Sequence[Future[Any]] = ()
    messages: dict[int, Tensor] = field(default_factory=dict)
    """By rank: whole, not opened yet."""
    opened: dict[int, Opened] = field(default_factory=dict)
    """By rank."""
    arrived: set[int] = field(default_factory=set)
    """Ranks whose messages are whole, opened or not."""
    pieces: dict[int, dict[int, memoryview]] = field(default_factory=dict)
    """By rank: the pieces of a long message, by their number."""
    lengths: dict[int, int] = field(default_factory=dict)
    """By rank: of how many pieces, once known."""

    def add(self, origin: int, piece: int, is_last: bool, payload: memoryview) -> None:
        """Take a piece of a message."""
        pieces = self.pieces.setdefault(origin, {})
        pieces[piece] = payload
        if is_last:
            self.lengths[origin] = piece + 1
        if len(pieces) == self.lengths.get(origin):
            parts = [_as_tensor(pieces[number]) for number in range(len(pieces))]
            self.messages[origin] = parts[0] if len(parts) == 1 else torch.cat(parts)
            self.arrived.add(origin)
            del self.pieces[origin]


class Pairs:
    """Moves parcels on the wire's threads; :meth:`start` never blocks. Construction is collective."""

    def __init__(self, team: Team, link: Link, pin_memory: bool = False) -> None:
        self._team = team
        self._pin_memory = pin_memory
        self._waiting: dict[tuple[int, tuple[int, ...]], dict[int, tuple[Parcel, Future[Any]]]] = {}
        """By step and shipment: parcels that wait for the others, by unit."""
        self._shipments: dict[_Key, _Shipment] = {}
        """Those under way, and those of which only others' messages are here."""
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._sent: Counter[str] = Counter()
        self._transport = connect_wire(team, range(team.size), link=link)
        self._piece_bytes = self._transport.settings.max_message_bytes
        self._transport.listen(Kind.PARCELS, self._hear)
        self._transport.listen_left(self._needs)
        self._transport.listen_lost(lambda peer, why: self._fail(PeerLostError(peer, why)))
        # Nobody may send before all listen.
        team.gather_ints([0], "the connections between workers")
        self._chores: queue.SimpleQueue[_Shipment | Callable[[], None] | None] = queue.SimpleQueue()
        self._helper = threading.Thread(target=self._help, name="poseidon-pairs", daemon=True)
        self._helper.start()
        team.meter(self.sent_by_route)

    def start(self, parcel: Parcel, future: Future[Any] | None = None) -> Future[Any]:
        """Start exchanging; the future's value is a :class:`Gathered`, or what the parcel's ``land`` returns."""
        future = Future() if future is None else future
        if not parcel.shipment:
            self._start([parcel], [future])
            return future
        key = (parcel.step, parcel.shipment)
        with self._lock:
            waiting = self._waiting.setdefault(key, {})
            waiting[parcel.unit] = (parcel, future)
            if len(waiting) < len(parcel.shipment):
                return future
            del self._waiting[key]
        parcels, futures = zip(*(waiting[unit] for unit in parcel.shipment), strict=True)
        self._start(parcels, futures)
        return future

    def sent_by_route(self) -> dict[str, int]:
        """Return the bytes sent so far, by what they are; and those passed on inside this machine."""
        with self._lock:
            return dict(self._sent)

    def call_later(self, work: Callable[[], None]) -> None:
        """Call a function that may wait, and start parcels, on another thread; its error ends the exchange."""
        self._chores.put(work)

    def close(self) -> None:
        """Send what is queued, and stop the threads."""
        self._chores.put(None)
        self._helper.join(CLOSE_S)
        self._transport.close()

    def _start(self, parcels: Sequence[Parcel], futures: Sequence[Future[Any]]) -> None:
        with self._lock:
            failure = self._failure
            shipment = self._shipments.setdefault(_key(parcels), _Shipment())
            shipment.parcels, shipment.futures = parcels, futures
        if failure is not None:
            self._fail(failure)
            return
        has_chores = any(parcel.settle is not None or parcel.meanwhile is not None for parcel in parcels)
        if all(parcel.settle is None for parcel in parcels):
            self._send(shipment)
        if has_chores:
            self._chores.put(shipment)

    def _help(self) -> None:
        """Wait for devices, and prepare for what is under way."""
        while (chore := self._chores.get()) is not None:
            try:
                if failpoints.ARMED:
                    failpoints.hit("pairs.help")
                if isinstance(chore, _Shipment):
                    self._attend(chore)
                else:
                    chore()
            except BaseException as error:
                self._fail(error)
            del chore  # what it refers to must not live until the next one comes

    def _attend(self, shipment: _Shipment) -> None:
        if any(parcel.settle is not None for parcel in shipment.parcels):
            for parcel in shipment.parcels:
                if parcel.settle is not None:
                    parcel.settle()
            self._send(shipment)
        for parcel in shipment.parcels:
            if parcel.meanwhile is not None:
                parcel.meanwhile()

    def _send(self, shipment: _Shipment) -> None:
        """Send this worker's message to all who get it from here."""
        rank, size = self._team.rank, self._team.size
        message = write_message(shipment.parcels)
        data = message.numpy()
        pieces = [data[start : start + self._piece_bytes] for start in range(0, len(data), self._piece_bytes)]
        receivers = self._team.topology.receivers(rank, rank)
        # Each worker starts with a different peer, so that not all send to rank 0 first.
        peers = [peer for peer in ((rank + shift) % size for shift in range(1, size)) if peer in receivers]
        step, number = _key(shipment.parcels)
        for place, piece in enumerate(pieces):
            header = Header(
                Kind.PARCELS, rank, number, place * size + rank, step, len(piece), int(place == len(pieces) - 1)
            )
            self._transport.send_all(peers, header, piece)
        with self._lock:
            self._sent[shipment.parcels[0].form] += len(data) * len(peers)
            shipment.messages[rank] = message
        self._land_if_whole((step, number))
        self._transport.check_left()

    def _needs(self, peer: int) -> bool:
        """Return whether a message is missing that only ``peer`` sends."""
        if self._team.rank not in self._team.topology.receivers(peer, peer):
            return False
        with self._lock:
            return any(each.parcels and peer not in each.arrived for each in self._shipments.values())

    def _hear(self, header: Header, payload: memoryview) -> None:
        """Take a message of another worker, and pass it on to those who get it from here."""
        rank, size = self._team.rank, self._team.size
        piece, origin = divmod(header.number, size)
        others = self._team.topology.receivers(origin, rank)
        self._transport.send_all(others, header._replace(sender=rank), payload)
        key = (header.clock, header.subject)
        with self._lock:
            self._sent["passed on"] += len(payload) * len(others)
            if self._failure is not None:
                return
            shipment = self._shipments.setdefault(key, _Shipment())
            shipment.add(origin, piece, bool(header.detail), payload)
        self._land_if_whole(key)

    def _land_if_whole(self, key: _Key) -> None:
        """Deliver a shipment if all its messages are here; until then, open those whose rows are to be staged."""
        with self._lock:
            shipment = self._shipments.get(key)
            if shipment is None or not shipment.parcels:
                return
            is_whole = len(shipment.messages) + len(shipment.opened) == self._team.size
            if not is_whole and all(parcel.stage is None for parcel in shipment.parcels):
                return
            messages, shipment.messages = shipment.messages, {}
        rank, size, parcels = self._team.rank, self._team.size, shipment.parcels
        try:
            fresh = {peer: open_message(message, parcels, rank, peer) for peer, message in messages.items()}
        except BaseException as error:
            with self._lock:
                is_mine = self._shipments.pop(key, None) is not None
            if is_mine:
                _end(shipment.futures, error)
            return
        with self._lock:
            opened = shipment.opened
            opened.update(fresh)
            if len(opened) < size or self._shipments.pop(key, None) is None:
                return
        try:
            everything = join_opened([opened[peer] for peer in range(size)], parcels, rank, self._pin_memory)
        except BaseException as error:
            _end(shipment.futures, error)
            return
        for parcel, future, gathered in zip(parcels, shipment.futures, everything, strict=True):
            _deliver(parcel, future, gathered)

    def _fail(self, error: BaseException) -> None:
        """End everything under way, and everything to come; the first error stays. The others hear of it."""
        self._transport.give_up(describe(error))
        with self._lock:
            error = self._failure = self._failure or error
            shipments, self._shipments = self._shipments, {}
            waiting, self._waiting = self._waiting, {}
        futures = [future for shipment in shipments.values() for future in shipment.futures]
        futures += [future for parcels in waiting.values() for _, future in parcels.values()]
        _end(futures, error)


def _end(futures: Sequence[Future[Any]], error: BaseException) -> None:
    for future in futures:
        future.set_exception(error)


def _as_tensor(payload: memoryview) -> Tensor:
    return torch.frombuffer(bytearray(payload) if payload.readonly else payload, dtype=torch.uint8)


def _key(parcels: Sequence[Parcel]) -> _Key:
    return parcels[0].step, parcels[0].unit


def _deliver(parcel: Parcel, future: Future[Any], gathered: Gathered) -> None:
    try:
        value = gathered if parcel.land is None else parcel.land(gathered)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(value)
