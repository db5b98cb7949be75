"""Every worker's rows to every other worker, by direct messages between pairs.

Collectives need the same sizes and the same order on all workers; tagged messages need neither. So a worker may bring
any number of rows (an uneven last batch, a worker without input), and whatever is ready first leaves first. A header
with the number of rows goes to all workers first; then each message crosses to every other machine once
(``team/topology.py``).

Rows are opaque bytes here; the route defines their meaning.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from poseidon.errors import MismatchError
from poseidon.team.team import CLOSE_S, Team


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


@dataclass(frozen=True)
class Gathered:
    """What all workers brought for one unit."""

    rows: Tensor
    """All rows in rank order, as bytes in host memory."""
    counts: tuple[int, ...]
    """Rows per rank."""
    flags: tuple[int, ...]
    """Flag word per rank."""


@dataclass(eq=False)
class _Job:
    parcel: Parcel
    future: Future[Any] = field(default_factory=Future)
    sends: list[tuple[Any, Tensor, int]] = field(default_factory=list)
    """Operation, tensor to keep alive until it is done, and peer."""
    is_sent: threading.Event = field(default_factory=threading.Event)
    """Set when all sends have been queued (or have failed)."""
    send_error: Exception | None = None


class Pairs:
    """Moves parcels on background threads; :meth:`start` never blocks."""

    def __init__(self, team: Team, pin_memory: bool = False) -> None:
        self._team = team
        self._group = team.new_group()
        self._pin_memory = pin_memory
        self._outbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._under_way = 0
        self._lock = threading.Lock()
        self._add_thread(self._send_forever)

    def start(self, parcel: Parcel) -> Future[Any]:
        """Start exchanging; the future's value is a :class:`Gathered`, or what the parcel's ``land`` returns."""
        job = _Job(parcel)
        with self._lock:
            self._under_way += 1
            # One thread per parcel under way: workers may start them in different orders, and waiting for a peer's
            # parcel must not block relaying what that peer waits for.
            if self._under_way >= len(self._threads):
                self._add_thread(self._receive_forever)
        self._outbox.put(job)
        self._inbox.put(job)
        return job.future

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

    def _tag(self, unit: int, origin: int, is_header: bool) -> int:
        return (unit * self._team.size + origin) * 2 + is_header

    def _isend(self, tensor: Tensor, peer: int, tag: int) -> Any:
        return dist.isend(tensor, self._team.global_rank(peer), group=self._group, tag=tag)

    def _irecv(self, tensor: Tensor, peer: int, tag: int) -> Any:
        return dist.irecv(tensor, self._team.global_rank(peer), group=self._group, tag=tag)

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
        parcel, rank, size = job.parcel, self._team.rank, self._team.size
        if parcel.settle is not None:
            parcel.settle()
        header = _header(parcel)
        # Each worker starts with a different peer, so that not all send to rank 0 first.
        peers = [(rank + shift) % size for shift in range(1, size)]
        for peer in peers:
            job.sends.append((self._isend(header, peer, self._tag(parcel.unit, rank, True)), header, peer))
        if parcel.rows.numel():
            receivers = self._team.topology.receivers(rank, rank)
            for peer in (peer for peer in peers if peer in receivers):
                work = self._isend(parcel.rows, peer, self._tag(parcel.unit, rank, False))
                job.sends.append((work, parcel.rows, peer))

    def _receive_forever(self) -> None:
        while (job := self._inbox.get()) is not None:
            try:
                gathered = self._receive(job)
                value = gathered if job.parcel.land is None else job.parcel.land(gathered)
            except BaseException as error:
                job.future.set_exception(error)
            else:
                job.future.set_result(value)
            with self._lock:
                self._under_way -= 1

    def _receive(self, job: _Job) -> Gathered:
        parcel, rank, topology = job.parcel, self._team.rank, self._team.topology
        headers = self._receive_headers(parcel)
        counts = [header[0] for header in headers]
        width = next((width for count, width, _, _ in headers if count), parcel.rows.shape[1])
        matrix = torch.empty(sum(counts), width, dtype=torch.uint8, device="cpu", pin_memory=self._pin_memory)
        starts = [sum(counts[:origin]) for origin in range(len(counts))]
        places = [matrix[start : start + count] for start, count in zip(starts, counts, strict=True)]
        works = []
        for origin, place in enumerate(places):
            if origin != rank and place.numel():
                sender = topology.sender(origin, rank)
                works.append((origin, self._irecv(place, sender, self._tag(parcel.unit, origin, False)), sender))
        # The rows were sent, so the device has filled them.
        if not job.is_sent.wait(self._team.timeout_s):
            raise TimeoutError(f"{parcel.name} was not ready to be sent within {self._team.timeout_s:g} s")
        if parcel.rows.numel():
            places[rank].copy_(parcel.rows)
        sends = list(job.sends)
        for origin, work, sender in works:
            self._team.wait(work, parcel.name, sender)
            for peer in topology.receivers(origin, rank):
                sends.append((self._isend(places[origin], peer, self._tag(parcel.unit, origin, False)), matrix, peer))
        for work, _, peer in sends:
            self._team.wait(work, parcel.name, peer)
        if job.send_error is not None:
            raise job.send_error
        return Gathered(matrix, tuple(counts), tuple(header[2] for header in headers))

    def _receive_headers(self, parcel: Parcel) -> list[list[int]]:
        team = self._team
        headers = [_header(parcel) for _ in range(team.size)]
        works = [
            (peer, self._irecv(headers[peer], peer, self._tag(parcel.unit, peer, True)))
            for peer in range(team.size)
            if peer != team.rank
        ]
        for peer, work in works:
            team.wait(work, parcel.name, peer)
        found = [header.tolist() for header in headers]
        widths = {width for count, width, _, _ in found if count}
        for peer, (_, width, _, step) in enumerate(found):
            if (len(widths) > 1 and width != parcel.rows.shape[1]) or step != parcel.step:
                raise MismatchError(
                    f"{parcel.name}: rank {team.rank} brings rows of {parcel.rows.shape[1]} bytes, step {parcel.step}; "
                    f"rank {peer} rows of {width} bytes, step {step}; do all workers run the same code and autocast?"
                )
        return found


def _header(parcel: Parcel) -> Tensor:
    return torch.tensor([*parcel.rows.shape, parcel.flags, parcel.step], device="cpu")
