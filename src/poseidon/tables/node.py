"""One rank of a job with tables, as a worker, a server, or both; handles the death of other ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from poseidon.errors import ConfigError, ServerError, WorkerLostError
from poseidon.job.limits import time_limit
from poseidon.tables.adoption import successor
from poseidon.tables.doubts import Doubts
from poseidon.tables.holder import Holder
from poseidon.tables.post import Post
from poseidon.tables.table_messages import TableFlag
from poseidon.tables.worker import Worker
from poseidon.wire.message import Header, Kind
from poseidon.wire.transport import Transport

_log = logging.getLogger(__name__)

_PARTING_S = 5.0
"""How long a rank that failed stays reachable, for the others to hear why."""
_LAST_WORDS_S = 0.5
"""How long what a rank has said on one connection may take longer than its end on another."""


class Node:
    """One rank's part in the tables of a job.

    ``servers`` are the ranks that hold rows (default: all), ``workers`` those that use them (default: all, or all other
    ranks if servers are named). After ``timeout_s`` a read gives up the ranks it waits for, if they are silent and not
    known to be busy.
    """

    def __init__(
        self,
        transport: Transport | None,
        *,
        servers: Sequence[int] | None = None,
        workers: Sequence[int] | None = None,
        timeout_s: float | None = None,
        is_busy: Callable[[int], bool] = lambda _: False,
        look: Callable[[], None] = lambda: None,
        is_started: bool = True,
    ) -> None:
        self._transport = transport
        self._post = Post(transport)
        ranks = range(self._post.size)
        self.servers = sorted(ranks if servers is None else servers)
        if workers is None:
            workers = [rank for rank in ranks if rank not in self.servers] if servers is not None else list(ranks)
        self.workers = sorted(workers)
        _check_ranks(self.servers, self.workers, self._post.size)
        self.rank = self._post.rank
        self.timeout_s = time_limit(timeout_s)
        self._is_busy = is_busy
        self._look = look
        """Reports the losses that can be known by now, through :meth:`lose_connection`."""
        self.losses: dict[int, int] = {}
        """The last known clocks of workers that died, or were given up: this one may be among them."""
        self._doubts = Doubts()
        self._departed: set[int] = set()
        """Ranks that will send nothing more."""
        self._holders = list(self.servers)
        """Ranks by place; changes when a server dies."""
        self.holder = Holder(self._post, self.workers, self.servers)
        self.worker = Worker(self._post, self._holders, self.timeout_s, self._doubt)
        self._post.listen_all(self._hear)
        self._post.listen(Kind.HELLO, self._receive_hello)
        self._post.listen(Kind.CLOCK, self._receive_clock)
        self._post.listen(Kind.STATE, self._receive_state)
        self._post.listen(Kind.LOST, self._receive_lost)
        self._post.listen(Kind.ERROR, self._receive_error)
        if is_started:
            self.start()

    def start(self) -> None:
        """Hear of lost connections, earlier ones included, and tell the others: not before they all listen."""
        if self._transport is not None:
            self._transport.listen_lost(self.lose_connection)

    @property
    def is_worker(self) -> bool:
        """Whether this rank uses the tables."""
        return self.rank in self.workers

    def leave(self) -> None:
        """Finish as a worker, and serve until all workers have finished; raise the failure that prevents it."""
        self._look()
        if self.is_worker and self._post.failure is None:
            self.worker.leave()
        self.serve()
        self._part()
        self._post.check()

    def abandon(self) -> None:
        """Leave in the middle of the work, and tell the others at once that this rank is lost."""
        if self._post.failure is not None and not self.holder.survives_loss:
            # The others cannot continue either, and must not take this rank for the cause.
            self._part()
            return
        self._announce_loss(self.rank, self.holder.clock_of(self.rank) if self.is_worker else 0)
        self._say_farewell()

    def _part(self) -> None:
        """Wait until no rank will send anything here: closing earlier could cut off messages in flight.

        After a failure too: a rank that finds this one's connection ended before it has heard of the cause would take
        this one for it.
        """
        others = set(range(self._post.size)) - {self.rank}

        def is_parted() -> bool:
            # The others send nothing to a rank that they gave up, not even a farewell.
            return self.rank in self.losses or others <= self._departed | self._post.gone

        with self._post.news:
            self._say_farewell()
            self._post.news.wait_for(lambda: self._post.failure is not None or is_parted(), self.timeout_s)
            if self._post.failure is not None:
                self._post.news.wait_for(is_parted, min(_PARTING_S, self.timeout_s))

    def _say_farewell(self) -> None:
        with self._post.news:
            for rank in range(self._post.size):
                self._post.send(rank, Kind.CLOCK, 0, 0, b"", TableFlag.LEAVE | TableFlag.LAST)
            self._post.close()

    def serve(self) -> None:
        """Serve until all workers have left or died, or the remaining ones were silent for too long."""
        with self._post.news:
            while self._hears_more():
                pass
            if not self._is_over():
                for silent in set(self.workers) - self.holder.left:
                    self._give_up(silent, f"rank {self.rank} heard nothing from it for {3 * self.timeout_s:g} s")

    def _hears_more(self) -> bool:
        """Wait for one more message; return whether to wait for another."""
        heard = self._post.received
        # A waiting worker complains long before that; without complaints nobody is left.
        patience_s = 3 * self.timeout_s
        is_news = self._post.news.wait_for(lambda: self._is_over() or self._post.received != heard, patience_s)
        is_awaited = is_news or any(self._is_busy(rank) for rank in set(self.workers) - self.holder.left)
        return is_awaited and not self._is_over()

    def _is_over(self) -> bool:
        return self.holder.is_done or self._post.failure is not None

    # Messages that concern both worker and server.

    def _hear(self, header: Header) -> None:
        if header.kind is not Kind.LOST or header.detail & TableFlag.ANSWER:
            # A rank that complains is alive, but two that wait for each other must not keep each other alive.
            self._doubts.hear(header.sender)

    def _receive_hello(self, header: Header, payload: memoryview) -> None:
        self.holder.open(header, payload)
        for lost, clock in self.losses.items():
            self._ends_without(f"worker {lost} is lost after clock {clock}, before every worker had opened its tables")

    def _receive_clock(self, header: Header, payload: memoryview) -> None:
        if header.detail & TableFlag.LAST:
            self._departed.add(header.sender)
        else:
            self.holder.clock(header, payload)

    def _receive_state(self, header: Header, payload: memoryview) -> None:
        if header.detail & TableFlag.ANSWER:
            self.worker.receive_state(header, payload)
        else:
            self.holder.state(header, payload)

    def _receive_error(self, header: Header, payload: memoryview) -> None:
        self._post.fail(
            ServerError(f"rank {header.sender} refused what worker {self.rank} sent: {str(payload, 'utf-8')}")
        )

    def _receive_lost(self, header: Header, payload: memoryview) -> None:
        """Handle the loss of a rank, a worker's complaint (no payload), or a server's reply to one."""
        if header.detail & TableFlag.ANSWER:
            return
        if payload.nbytes:
            lost, clock = np.frombuffer(payload, np.int64).tolist()
            if not (self.holder.survives_loss or lost in self._post.gone or self._is_over()):
                # This rank is about to end, and the others must hear of the cause before they notice that.
                self._announce_loss(lost, clock)
            self._lose(lost, f"reported by rank {header.sender}", clock)
            return
        self._post.send(header.sender, Kind.LOST, header.subject, header.clock, flags=TableFlag.ANSWER)
        for late in self.holder.awaited_by(header.subject, header.clock):
            if self._condemns(late, header.sender):
                waited = f"worker {header.sender} waited {self.timeout_s:g} s for it at clock {header.clock}"
                self._give_up(late, waited)

    def _announce_loss(self, lost: int, clock: int) -> None:
        for rank in range(self._post.size):
            if rank != self.rank:
                self._tell_loss(rank, lost, clock)

    def _tell_loss(self, rank: int, lost: int, clock: int) -> None:
        self._post.send(rank, Kind.LOST, 0, 0, np.array([lost, clock], np.int64).view(np.uint8))

    # Losses.

    def lose_connection(self, rank: int, why: str) -> None:
        """Do without a rank with which a connection has broken, of the tables or another one; any thread may call."""
        with self._post.news:
            self._departed.add(rank)
            if self._transport is not None and self._transport.is_to_blame:
                self._give_up_myself(why)
            else:
                self._give_up(rank, why)
            self._post.news.notify_all()

    def lose_other_connection(self, rank: int, why: str) -> None:
        """Do the same if that connection is not the tables': on theirs, its last words may still be under way.

        A rank that ends because of another one says so there first; whoever sees its end elsewhere would blame it.
        """
        with self._post.news:
            is_known = lambda: self._is_over() or rank in self._departed or rank in self._post.gone  # noqa: E731
            self._post.news.wait_for(is_known, _LAST_WORDS_S)
        self.lose_connection(rank, why)

    def _doubt(self, rank: int, why: str) -> None:
        if self._condemns(rank, self.rank):
            self._give_up(rank, f"worker {self.rank} waited {self.timeout_s:g} s: {why}")

    def _give_up_myself(self, why: str) -> None:
        """End because of a fault of this rank; the others must do without it, and not without whom it cannot hear."""
        if not self._is_over():
            clock = self.losses[self.rank] = self.holder.clock_of(self.rank) if self.is_worker else 0
            self._announce_loss(self.rank, clock)
            self._post.fail(WorkerLostError(f"worker {self.rank} is lost after clock {clock}, by its own fault: {why}"))

    def _condemns(self, late: int, by: int) -> bool:
        """Note that ``by`` waits for another rank; return whether to give that one up."""
        if self._is_busy(late):
            # It evaluates or writes a checkpoint, and sends nothing meanwhile.
            self._doubts.hear(late)
            return False
        return self._doubts.complain(late, by)

    def _give_up(self, rank: int, why: str) -> None:
        """Consider ``rank`` dead and tell all others; only servers know its last clock."""
        if rank == self.rank or rank in self._post.gone or self._is_over():
            return
        clock = self.holder.clock_of(rank) if rank in self.workers else 0
        self._announce_loss(rank, clock)
        self._lose(rank, why, clock)

    def _lose(self, rank: int, why: str, clock: int) -> None:
        if rank == self.rank:
            self.losses[rank] = clock
            self._post.fail(WorkerLostError(f"worker {rank} was given up by the others ({why}) and cannot continue"))
            return
        if rank in self.losses:
            self.losses[rank] = max(clock, self.losses[rank])
        is_needed = rank in self._holders or (rank in self.workers and rank not in self.holder.left)
        if rank in self._post.gone or self._is_over() or not is_needed:
            return
        # If it lives after all, it must not go on: whoever gave it up first may be the one that cannot reach it.
        self._tell_loss(rank, rank, clock)
        self._post.gone.add(rank)
        self.losses[rank] = clock
        text = f"worker {rank} is lost after clock {clock} ({why})"
        if self._ends_without(text):
            return
        _log.warning("rank %d: %s; the others continue without it", self.rank, text)
        if rank in self.workers:
            self.holder.lose(rank)
        self._replace_holder(rank)
        self._post.news.notify_all()

    def _ends_without(self, text: str) -> bool:
        """Fail because of a loss, if some table cannot do without the lost worker."""
        if self.holder.survives_loss:
            return False
        self._post.fail(
            WorkerLostError(f"{text}; under BSP the others cannot continue without it: restart from a snapshot")
        )
        return True

    def _replace_holder(self, lost: int) -> None:
        for place in [place for place, rank in enumerate(self._holders) if rank == lost]:
            heir = successor(self.servers, self._post.gone, place)
            if heir is None:
                self._post.fail(WorkerLostError(f"the last server, rank {lost}, is lost, and all rows with it"))
                return
            self._holders[place] = heir
            if self.is_worker and self.rank not in self.holder.left:
                self.worker.hand_over(place)


def _check_ranks(servers: Sequence[int], workers: Sequence[int], size: int) -> None:
    for what, ranks in (("servers", servers), ("workers", workers)):
        if not ranks or len(set(ranks)) != len(ranks) or not all(0 <= rank < size for rank in ranks):
            raise ConfigError(
                f"{what} are {list(ranks)}; expected at least one of the ranks 0 to {size - 1}, each once"
            )
