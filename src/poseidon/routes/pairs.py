"""Every worker's rows to every other worker, by direct messages between pairs.

Collectives need the same sizes and the same order on all workers; tagged messages (``team/mail.py``) need neither. So a
worker may bring any number of rows (an uneven last batch, a worker without input), and whatever is ready first leaves
first. A header with the number of rows goes to all workers first; then each message crosses to every other machine once
(``team/topology.py``).

The parcels of small units share a shipment (``planning/shipments.py``): one header and one message per peer, which
leave with the last of them.

Rows are opaque bytes here; the route defines their meaning.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from poseidon.errors import MismatchError
from poseidon.team.mail import Tag
from poseidon.team.team import CLOSE_S, Team

Array = npt.NDArray[np.int64]
_MOST_CHANNELS, _MOST_UNITS = 1 << 12, 1 << 20
"""They share the 32 bits of a tag's subject."""


@dataclass(frozen=True)
class Parcel:
    """What this worker brings for one unit."""

    unit: int
    """Number of the unit, equal on all workers."""
    name: str
    step: int
    rows: Tensor
    """Bytes, two-dimensional, contiguous, in host memory; read-only until everything has arrived."""
    flags: int = 0
    """One word defined by the route, delivered with the rows."""
    settle: Callable[[], None] | None = None
    """Called on another thread before ``rows`` is read; waits until the device has filled it."""
    land: Callable[[Gathered], Any] | None = None
    """Called on another thread with the result; its return value replaces the :class:`Gathered` in the future."""
    shipment: tuple[int, ...] = ()
    """Units whose parcels leave together with this one, itself included, in one order on all workers; empty: alone."""
    meanwhile: Callable[[], None] | None = None
    """Called on another thread while the rows travel: a time to prepare for the result."""


@dataclass(frozen=True)
class Gathered:
    """What all workers brought for one unit."""

    rows: Tensor
    """All rows in rank order, as bytes in host memory."""
    counts: tuple[int, ...]
    """Rows per rank."""
    flags: tuple[int, ...]
    """Flag word per rank."""

    def parts(self) -> list[Tensor]:
        """Return each rank's rows."""
        return list(self.rows.split(self.counts))

    def sizes(self) -> list[int]:
        """Return how many bytes each rank brought."""
        return [count * self.rows.shape[1] for count in self.counts]


@dataclass(eq=False)
class _Job:
    """Parcels that leave together."""

    parcels: Sequence[Parcel]
    futures: Sequence[Future[Any]]
    sends: list[Future[None]] = field(default_factory=list)
    is_sent: threading.Event = field(default_factory=threading.Event)
    """Set when all sends have been queued (or have failed)."""
    payload: Tensor | None = None
    """The rows of all parcels, once sent."""
    send_error: Exception | None = None

    @property
    def number(self) -> int:
        """Distinguishes it from all others under way, equally on all workers."""
        return self.parcels[0].unit

    @property
    def step(self) -> int:
        """The step it belongs to."""
        return self.parcels[0].step

    @property
    def name(self) -> str:
        """For errors."""
        first, last = self.parcels[0].name, self.parcels[-1].name
        return first if first == last else f"{first} ... {last}"

    def header(self) -> Array:
        """Return four words per parcel."""
        return np.array([(*p.rows.shape, p.flags, p.step) for p in self.parcels], np.int64)

    def join(self) -> Tensor:
        """Return the rows of all parcels as one tensor of bytes."""
        if len(self.parcels) == 1:
            return self.parcels[0].rows
        return torch.cat([parcel.rows.view(-1) for parcel in self.parcels])


class Pairs:
    """Moves parcels on background threads; :meth:`start` never blocks."""

    def __init__(self, team: Team, pin_memory: bool = False) -> None:
        self._team = team
        self._mail = team.mail
        self._channel = team.mail.new_channel()
        self._pin_memory = pin_memory
        self._outbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._waiting: dict[tuple[int, tuple[int, ...]], dict[int, tuple[Parcel, Future[Any]]]] = {}
        """By step and shipment: parcels that wait for the others, by unit."""
        self._under_way = 0
        self._lock = threading.Lock()
        self._add_thread(self._send_forever)

    def start(self, parcel: Parcel) -> Future[Any]:
        """Start exchanging; the future's value is a :class:`Gathered`, or what the parcel's ``land`` returns."""
        future: Future[Any] = Future()
        if not parcel.shipment:
            self._start(_Job([parcel], [future]))
            return future
        key = (parcel.step, parcel.shipment)
        with self._lock:
            waiting = self._waiting.setdefault(key, {})
            waiting[parcel.unit] = (parcel, future)
            if len(waiting) < len(parcel.shipment):
                return future
            del self._waiting[key]
        parcels, futures = zip(*(waiting[unit] for unit in parcel.shipment), strict=True)
        self._start(_Job(parcels, futures))
        return future

    def _start(self, job: _Job) -> None:
        with self._lock:
            self._under_way += 1
            # One thread per job under way: workers may start them in different orders, and waiting for a peer's
            # parcels must not block relaying what that peer waits for.
            if self._under_way >= len(self._threads):
                self._add_thread(self._receive_forever)
        self._outbox.put(job)
        self._inbox.put(job)

    def _add_thread(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name="poseidon-pairs", daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Stop the threads once their work is done."""
        self._outbox.put(None)
        for _ in self._threads[1:]:
            self._inbox.put(None)
        deadline = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))

    def _tag(self, job: _Job, origin: int, is_header: bool) -> Tag:
        assert job.number < _MOST_UNITS
        return Tag(self._channel % _MOST_CHANNELS * _MOST_UNITS + job.number, job.step << 17 | origin << 1 | is_header)

    def _send_forever(self) -> None:
        while (job := self._outbox.get()) is not None:
            try:
                self._send(job)
            except Exception as error:
                # If the connection is gone, the receiving side fails too and can name the missing worker.
                job.send_error = error
            finally:
                job.is_sent.set()

    def _send(self, job: _Job) -> None:
        rank, size = self._team.rank, self._team.size
        for parcel in job.parcels:
            if parcel.settle is not None:
                parcel.settle()
        header = job.header()
        payload = job.payload = job.join()
        # Each worker starts with a different peer, so that not all send to rank 0 first.
        peers = [(rank + shift) % size for shift in range(1, size)]
        for peer in peers:
            job.sends.append(self._mail.send(peer, self._tag(job, rank, True), _words(header)))
        if payload.numel():
            receivers, tag, data = (
                self._team.topology.receivers(rank, rank),
                self._tag(job, rank, False),
                _bytes(payload),
            )
            job.sends += [self._mail.send(peer, tag, data) for peer in peers if peer in receivers]

    def _receive_forever(self) -> None:
        while (job := self._inbox.get()) is not None:
            try:
                everything = self._receive(job)
            except BaseException as error:
                for future in job.futures:
                    future.set_exception(error)
            else:
                for parcel, future, gathered in zip(job.parcels, job.futures, everything, strict=True):
                    _deliver(parcel, future, gathered)
            with self._lock:
                self._under_way -= 1

    def _receive(self, job: _Job) -> list[Gathered]:
        rank, topology = self._team.rank, self._team.topology
        headers = self._receive_headers(job)
        gathered = [self._make_room(parcel, words) for parcel, words in zip(job.parcels, headers, strict=True)]
        # A lone parcel is received where it is needed; several are sorted when they are here.
        messages = gathered[0].parts() if len(gathered) == 1 else _room_for_messages(gathered)
        coming = []
        for origin, message in enumerate(messages):
            if origin != rank and message.numel():
                sender = topology.sender(origin, rank)
                coming.append((origin, self._mail.expect(sender, self._tag(job, origin, False), _bytes(message))))
        # The rows were sent, so the device has filled them.
        if not job.is_sent.wait(self._team.timeout_s):
            raise TimeoutError(f"{job.name} was not ready to be sent within {self._team.timeout_s:g} s")
        if job.payload is not None and job.payload.numel():
            messages[rank].copy_(job.payload)
        for parcel in job.parcels:
            if parcel.meanwhile is not None:
                parcel.meanwhile()
        sends = list(job.sends)
        for origin, arrival in coming:
            data = self._team.result(arrival, job.name, grace_s=0)
            tag = self._tag(job, origin, False)
            sends += [self._mail.send(peer, tag, data) for peer in topology.receivers(origin, rank)]
        for send in sends:
            self._team.result(send, job.name, grace_s=0)
        if job.send_error is not None:
            raise job.send_error
        if len(gathered) > 1:
            _sort(messages, gathered)
        return gathered

    def _receive_headers(self, job: _Job) -> list[list[list[int]]]:
        """Return the words of every parcel from every worker, checked."""
        team = self._team
        received = [job.header() for _ in range(team.size)]
        coming = [
            self._mail.expect(peer, self._tag(job, peer, True), _words(received[peer]))
            for peer in range(team.size)
            if peer != team.rank
        ]
        for header in coming:
            team.result(header, job.name, grace_s=0)
        by_parcel = [list(words) for words in zip(*(header.tolist() for header in received), strict=True)]
        for parcel, words in zip(job.parcels, by_parcel, strict=True):
            self._check(parcel, words)
        return by_parcel

    def _check(self, parcel: Parcel, by_rank: Sequence[Sequence[int]]) -> None:
        widths = {width for count, width, _, _ in by_rank if count}
        for peer, (_, width, _, step) in enumerate(by_rank):
            if (len(widths) > 1 and width != parcel.rows.shape[1]) or step != parcel.step:
                raise MismatchError(
                    f"{parcel.name}: rank {self._team.rank} brings rows of {parcel.rows.shape[1]} bytes, step "
                    f"{parcel.step}; rank {peer} rows of {width} bytes, step {step}; do all workers run the same code "
                    "and autocast?"
                )

    def _make_room(self, parcel: Parcel, by_rank: Sequence[Sequence[int]]) -> Gathered:
        counts, _, flags, _ = zip(*by_rank, strict=True)
        width = next((width for count, width, _, _ in by_rank if count), parcel.rows.shape[1])
        rows = torch.empty(sum(counts), width, dtype=torch.uint8, device="cpu", pin_memory=self._pin_memory)
        return Gathered(rows, counts, flags)


def _words(header: Array) -> memoryview:
    return header.data.cast("B")


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).numpy().data


def _room_for_messages(gathered: Sequence[Gathered]) -> list[Tensor]:
    """Return memory for one message from every rank, with the rows of all parcels."""
    sizes = [sum(sizes) for sizes in _by_rank(gathered)]
    return list(torch.empty(sum(sizes), dtype=torch.uint8, device="cpu").split(sizes))


def _sort(messages: Sequence[Tensor], gathered: Sequence[Gathered]) -> None:
    """Copy the rows of every parcel to their places, given the message of every rank."""
    pieces = zip(
        *(message.split(sizes) for message, sizes in zip(messages, _by_rank(gathered), strict=True)), strict=True
    )
    for each, of_parcel in zip(gathered, pieces, strict=True):
        torch.cat(of_parcel, out=each.rows.view(-1))


def _by_rank(gathered: Sequence[Gathered]) -> list[list[int]]:
    """Return the bytes of every parcel in the message of every rank."""
    return [list(sizes) for sizes in zip(*(each.sizes() for each in gathered), strict=True)]


def _deliver(parcel: Parcel, future: Future[Any], gathered: Gathered) -> None:
    try:
        value = gathered if parcel.land is None else parcel.land(gathered)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(value)
