"""The workers of one job as seen by one of them: who they are, where they run, and how to wait for them."""

from __future__ import annotations

import functools
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from poseidon import failpoints
from poseidon.errors import ConfigError, PoseidonError, WireError, describe
from poseidon.job import settings
from poseidon.job.attempts import within_epoch
from poseidon.job.closing import Stage, at_exit
from poseidon.job.cutting import TORCH
from poseidon.job.elastic import this_job
from poseidon.job.limits import time_limit, torch_limit
from poseidon.observe.traffic import Sent, Waiting
from poseidon.team.gathering import Entrance, Expecting, PendingGather, start_gather_bytes
from poseidon.team.life import BEAT_S
from poseidon.team.mail import Mail, Tag, open_mail, then
from poseidon.team.membership import Member, Membership, PeerLostError
from poseidon.team.topology import Topology
from poseidon.team.watch import Watch
from poseidon.wire.door import cut_connections
from poseidon.wire.mesh import SOON_S
from poseidon.wire.transport import Transport

T = TypeVar("T")

CLOSE_S = 2.0
"""How long to wait for a background thread that was asked to end; one that is stuck ends with the process."""

_CHANNELS: list[dist.ProcessGroup] = []
"""Every private group, kept until the process ends. If they are freed while the interpreter shuts down, gloo's threads
are torn down in an order that aborts the process; if they are destroyed earlier, the next group of the same workers
finds their stale addresses."""

_SERIAL: Counter[str] = Counter()
"""Numbers the teams of each group; equal on all its workers, because they make their teams in the same order."""

_EXCHANGE, _BROADCAST = (1 << 32) - 1, (1 << 32) - 2
"""Subjects of the messages of a team's own."""

_SMALL_BYTES = 64 << 10
"""Of a message that costs more to pass on than to send several times."""

_SOON, _LOOK = timedelta(seconds=SOON_S), timedelta(seconds=BEAT_S)

SETTLE_S = 0.1
"""How long gloo's threads have at exit to drop the tensors of the last operations."""


@functools.cache
def _settle_at_exit() -> None:
    """Wait a moment before the interpreter shuts down, after everything else is closed.

    A gloo thread that drops the last reference to a tensor enters the interpreter. If that is shutting down, C++ aborts
    the process, after a training run that succeeded.
    """
    at_exit(Stage.SETTLING, lambda: time.sleep(SETTLE_S))


def machine_name() -> str:
    """Return a name that workers on the same machine share, and only they.

    ``POSEIDON_MACHINE`` overrides it. The network namespace is part of it: containers have their own links, and what
    matters here is which workers share a network card.
    """
    given = settings.MACHINE.read()
    if given:
        return given
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net"):
        try:
            parts.append(str(Path(path).readlink()) if path.endswith("net") else Path(path).read_text().strip())
        except OSError:
            continue
    return "|".join(parts)


class Team:
    """A process group with names, places, deadlines and a private channel for control messages.

    Construction is collective: every worker of ``group`` must take part, in the same order relative to other teams.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float | None = None) -> None:
        failpoints.arm_as_asked(settings.FAILPOINTS.read(), dist.get_rank())
        job = this_job()
        if job is not None:
            job.at_end_of_epoch(cut_connections)
        whole = dist.group.WORLD if group is None else group
        assert whole is not None
        self._group: dist.ProcessGroup = whole
        self.timeout_s = time_limit(timeout_s)
        self.encrypts = False
        """Whether everything between the workers must be encrypted."""
        self._mail: Mail | None = None
        self._tags: Counter[int] = Counter()
        self._cancel_exit: Callable[[], None] = lambda: None
        # Known before anything blocks, so that the workers that arrive can name one that does not.
        self.membership = Membership.unnamed(dist.get_process_group_ranks(whole))
        self.rank = self.membership.rank_of(dist.get_rank())
        """Rank of this worker in the team."""
        self.size = self.membership.size
        """Number of workers in the team."""
        name = whole.group_name
        _SERIAL[name] += 1
        _settle_at_exit()
        self._introduce(f"poseidon/{name}/{_SERIAL[name]}/hello")

    def _introduce(self, prefix: str) -> None:
        """Meet the other workers, connect to them, and exchange names. Collective."""
        entrance = Entrance(self.rank, self.size, socket.gethostname())
        expecting = Expecting(self.membership, self.rank, self.timeout_s)
        greetings = entrance.meet(_default_store(), prefix, expecting)
        self.encrypts = entrance.greeting.encrypts
        try:
            self.mesh, self.secret = entrance.connect(greetings, self.timeout_s)
        except WireError as error:
            raise expecting.not_connected(greetings, error) from error
        self.watch = Watch(self.mesh, self.rank, self.membership, self.timeout_s)
        if self.encrypts:
            assert self.mail is not None  # opened while all workers are here
        names = self.gather_json({"host": socket.gethostname(), "machine": machine_name()})
        members = zip(self.membership.members, names, strict=True)
        self.watch.membership = self.membership = Membership(
            self.membership.epoch,
            tuple(Member(member.global_rank, each["host"], each["machine"]) for member, each in members),
        )

    @property
    def topology(self) -> Topology:
        """Which workers of the team share a machine."""
        return self.membership.topology

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, for collectives. In a job that encrypts there are none: gloo and NCCL cannot."""
        self._refuse_clear("a collective of torch.distributed")
        return self._group

    def _refuse_clear(self, what: str) -> None:
        if self.encrypts:
            raise ConfigError(
                f"rank {self.rank} would start {what}, which is not encrypted, in a job that must be "
                "(POSEIDON_WIRE_ENCRYPT); poseidon.DistributedDataParallel and poseidon.distribute, "
                "without communication hooks, and poseidon.ps are encrypted in full"
            )

    @property
    def is_nccl(self) -> bool:
        """Whether collectives reduce CUDA tensors with NCCL."""
        return not self.encrypts and torch.cuda.is_available() and "nccl" in str(dist.get_backend_config(self._group))

    @property
    def mail(self) -> Mail:
        """Messages between the workers. The first access connects them and is collective."""
        if self._mail is None:
            from poseidon.team.wiring import connect_wire

            def connect() -> Transport:
                transport = connect_wire(self, range(self.size), route="mail")
                transport.listen_lost(self.watch.lose)
                return transport

            self._mail = open_mail(
                connect,
                lambda: self.gather_ints([0], "the start of messages between workers"),
            )
            self._cancel_exit = at_exit(Stage.WATCHES, self._mail.close)
        return self._mail

    def meter(self, sent: Sent, waiting: Waiting | None = None) -> None:
        """Have whoever watches the job ask these methods what was sent, and what waits."""
        if self.watch.recorder is not None:
            self.watch.recorder.traffic.add(sent, waiting)

    def new_group(self, members: Sequence[int] | None = None) -> dist.ProcessGroup:
        """Make a gloo group of ``members`` (ranks in this team; default all). Collective among them."""
        self._refuse_clear("a group of gloo")
        ranks = [self.global_rank(rank) for rank in (range(self.size) if members is None else members)]
        try:
            with TORCH.noting():
                group: dist.ProcessGroup = within_epoch(
                    lambda: dist.new_group(
                        ranks,
                        timeout=timedelta(seconds=torch_limit(self.timeout_s)),
                        backend="gloo",
                        use_local_synchronization=True,
                    ),
                    "the start of the exchange channels",
                )
            _CHANNELS.append(group)
            return group
        except RuntimeError as error:
            raise self.watch.lost("the start of the exchange channels", None, error) from error

    def global_rank(self, rank: int) -> int:
        """Return the rank in the whole job of a member of this team."""
        return self.membership.members[rank].global_rank

    def wait(self, work: Any, what: str, peer: int | None = None) -> None:
        """Block until a gloo operation is done, or raise :class:`WorkerLostError` naming who is missing."""
        clock = self.watch.clock
        began = 0.0 if clock is None else clock.begin_wait(what)
        try:
            if _has_ended_within(work, _SOON):
                return
            with self.watch.waiting(what, peer) as waiting:
                while not _has_ended_within(work, _LOOK):
                    waiting.look()
        except PoseidonError:
            raise
        except RuntimeError as error:
            raise self.watch.lost(what, peer, error) from error
        finally:
            if clock is not None:
                clock.end_wait(what, began)

    def wait_for(self, work: Any, tensor: Tensor, what: str, peer: int | None = None) -> None:
        """Wait for a collective on ``tensor``; with NCCL only the CUDA stream waits, and the watch enforces the end."""
        if tensor.is_cuda and self.is_nccl:
            clock = self.watch.clock
            settle = None if clock is None else clock.settle
            began = clock.begin_wait(what) if clock is not None and settle is not None else 0.0
            work.wait()
            self.watch.guard(work, what)
            if clock is not None and settle is not None:
                settle()  # only so can it be told what was waited for
                clock.end_wait(what, began)
        else:
            self.wait(work, what, peer)

    def result(self, future: Future[T], what: str) -> T:
        """Return a future's value, raise its failure, or raise :class:`WorkerLostError` when there is no hope."""
        if not future.done():
            self._await(future, what)
        try:
            return future.result()
        except PeerLostError as error:
            raise self.watch.lost(what, error.rank, error) from error
        except PoseidonError:
            raise
        except BaseException as error:
            where = f"on rank {self.rank} at step {self.watch.step}"
            raise RuntimeError(f"the exchange of {what} failed {where}: {describe(error)}") from error

    def _await(self, future: Future[T], what: str) -> None:
        clock = self.watch.clock
        began = 0.0 if clock is None else clock.begin_wait(what)
        try:
            if _is_done_within(future, SOON_S):
                return
            with self.watch.waiting(what) as waiting:
                while not _is_done_within(future, BEAT_S):
                    waiting.look()
        finally:
            if clock is not None:
                clock.end_wait(what, began)

    def gather_ints(self, values: Sequence[int], what: str = "the roll call") -> list[list[int]]:
        """Return every worker's integers, by rank; all workers must give equally many."""
        return self.start_gather(values)(what)

    def start_gather(self, values: Sequence[int]) -> PendingGather:
        """Start to collect every worker's integers; call the result to wait for them."""
        return PendingGather(self, values)

    def gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        """Return every worker's bytes, by rank."""
        return start_gather_bytes(self, data)(what)

    def gather_json(self, value: Any) -> list[Any]:
        """Return every worker's plain data, by rank. It travels as text, never as pickled objects."""
        return [
            json.loads(data) for data in self.gather_bytes(json.dumps(value).encode(), "the workers' introductions")
        ]

    def exchange(self, data: memoryview, what: str, tag: Tag | None = None) -> list[bytearray]:
        """Return every worker's bytes, by rank, over the wire; all must give equally many. Collective.

        With a ``tag``, on a channel of the caller's own, several may be under way, in any order.
        """
        return self._exchange([data] * self.size, what, tag or self._next_tag(_EXCHANGE))

    def exchange_shares(self, data: memoryview, what: str) -> list[bytearray]:
        """Send each worker its share of ``data``, cut evenly; return all workers' shares for this one. Collective."""
        share = data.nbytes // self.size
        cut = [data[rank * share : (rank + 1) * share] for rank in range(self.size)]
        return self._exchange(cut, what, self._next_tag(_EXCHANGE))

    def _exchange(self, data: Sequence[memoryview], what: str, tag: Tag) -> list[bytearray]:
        """Send each worker its bytes, equally many; return what all have sent to this one, by rank."""
        parts = [bytearray(each.nbytes) for each in data]
        parts[self.rank][:] = data[self.rank]
        others = [rank for rank in range(self.size) if rank != self.rank]
        coming = [self.mail.expect(rank, tag, memoryview(parts[rank])) for rank in others]
        leaving = [self.mail.send(rank, tag, data[rank]) for rank in others]
        for arrival in coming:
            self.result(arrival, what)
        for send in leaving:
            self.result(send, what)
        return parts

    def start_broadcast(self, data: memoryview, source: int) -> list[Future[Any]]:
        """Fill ``data`` with that of ``source``, over the wire, once the futures are done. Collective.

        Each worker passes it on to the next: no link carries it twice, and messages that follow each other overlap.
        What takes no time on a link leaves for all at once.
        """
        if self.size == 1:
            return []
        tag = self._next_tag(_BROADCAST)
        place = (self.rank - source) % self.size
        if data.nbytes <= _SMALL_BYTES:
            others = [rank for rank in range(self.size) if rank != source]
            return [self.mail.expect(source, tag, data)] if place else [self.mail.send(to, tag, data) for to in others]
        before, after = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        if place == 0:
            return [self.mail.send(after, tag, data)]
        arrival = self.mail.expect(before, tag, data)
        if place == self.size - 1:
            return [arrival]
        return [arrival, then(arrival, lambda: self.mail.send(after, tag, data))]

    def _next_tag(self, subject: int) -> Tag:
        self._tags[subject] += 1
        return Tag(subject, self._tags[subject])

    def drop(self, error: BaseException) -> None:
        """Close everything at once, since the workers will be other ones."""
        self.close(error)
        self.mesh.close()

    def close(self, error: BaseException | None = None) -> None:
        """Stop the heartbeat and the messages; ``error``: why this worker fails. Private groups stay open."""
        if self._mail is not None:
            self._cancel_exit()
            self._mail.close()
        self.watch.close(error=error)


def forget_groups() -> None:
    """Drop all private groups and count teams from the beginning: the workers meet anew, in another store."""
    _CHANNELS.clear()
    _SERIAL.clear()


def _has_ended_within(work: Any, limit: timedelta) -> bool:
    """Return whether an operation of torch.distributed succeeds in time; raise its error if it fails."""
    try:
        work.wait(limit)
    except RuntimeError:
        if not work.is_completed():
            return False
        # It has failed; or it has ended well since the limit was reached, which only another wait can tell.
        work.wait(limit)
    return True


def _is_done_within(future: Future[Any], limit_s: float) -> bool:
    try:
        future.exception(limit_s)  # returns it, and raises only if there is nothing yet
    except futures.TimeoutError:  # not Python's own before 3.11
        return False
    return True


def _default_store() -> Any:
    return dist.distributed_c10d._get_default_store()
