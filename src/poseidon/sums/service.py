"""A shard behind a transport: contributions come in as PUSH, finished sums go out to all workers as RESULT."""

from __future__ import annotations

import threading
from collections.abc import Callable

from poseidon.errors import PoseidonError
from poseidon.sums.shard import Shard
from poseidon.sums.turns import in_turn
from poseidon.wire.formats import Array
from poseidon.wire.message import Header, Kind
from poseidon.wire.transport import Transport

OnResult = Callable[[int, int, int, Array], None]
"""Receives unit, chunk, clock and the finished sum, which it must have copied when it returns."""


class ShardService:
    """Lets the workers of a job use the :class:`Shard` of this rank.

    Where this rank is a worker itself, its contributions come by :meth:`contribute` and its results go to
    ``on_result``, so neither crosses the wire; both run on the caller's thread, which may be the transport's. Elsewhere
    a worker listens to RESULT. ``priority`` gives a unit's rank in the queue, lowest first; the number of the unit
    itself unless told, which is the order in which the next forward needs them.

    ``on_error`` hears of contributions the shard refused. They come from a worker that is out of step, and its sums
    will never finish: end the job.
    """

    def __init__(
        self,
        transport: Transport,
        shard: Shard,
        *,
        on_error: Callable[[PoseidonError], None],
        on_result: OnResult | None = None,
        priority: Callable[[int], int] = int,
    ) -> None:
        self._transport = transport
        self._shard = shard
        self._on_error = on_error
        self._on_result = on_result
        self._priority = priority
        rank, size = transport.rank, transport.size
        others = in_turn(shard.workers, rank, size)
        self._receivers = [worker for worker in others if worker != rank or on_result is None]
        transport.listen(Kind.PUSH, self._receive)

    def contribute(self, unit: int, chunk: int, clock: int, values: Array) -> None:
        """Add this rank's own values; they must not change until the sum is finished."""
        result = self._shard.add(unit, chunk, clock, self._transport.rank, values)
        if result is not None:
            self._deliver(unit, chunk, clock, result)

    def _receive(self, header: Header, payload: memoryview) -> None:
        try:
            result = self._shard.add_bytes(header.unit, header.chunk, header.clock, header.sender, payload)
        except PoseidonError as error:
            self._on_error(error)
            return
        if result is not None:
            self._deliver(header.unit, header.chunk, header.clock, result)

    def _deliver(self, unit: int, chunk: int, clock: int, result: Array) -> None:
        header = Header(Kind.RESULT, self._transport.rank, unit, chunk, clock, result.nbytes)
        lent = _Countdown(len(self._receivers) + 1, lambda: self._shard.release(result))
        for worker in self._receivers:
            self._transport.send(worker, header, result, priority=self._priority(unit), on_sent=lent.count)
        if self._on_result is not None:
            self._on_result(unit, chunk, clock, result)
        lent.count()


class _Countdown:
    """Calls ``then`` once it was counted ``times`` times, from whatever threads."""

    def __init__(self, times: int, then: Callable[[], None]) -> None:
        self._left = times
        self._then = then
        self._lock = threading.Lock()

    def count(self) -> None:
        with self._lock:
            self._left -= 1
            is_over = self._left == 0
        if is_over:
            self._then()
