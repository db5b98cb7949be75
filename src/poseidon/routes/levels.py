"""Three levels: workers of one machine combine first, then each carries its share of the traffic between machines.

Inside a machine values go through memory that its workers share (``team/board.py``); through gloo where there is none.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from poseidon import failpoints
from poseidon.routes.base import Exchange
from poseidon.routes.local import add_parts
from poseidon.team.board import Board, Rounds, open_board
from poseidon.team.team import CLOSE_S, Team

Between = Callable[[Tensor, Team, str], None]
"""Finishes a sum over this worker's counterparts on all machines, in place. Blocks."""

ROUND_BYTES = 2 << 20
"""Written by each worker in a round inside its machine: much for the time that a round takes, little for caches."""


def open_level_board(team: Team) -> Board | None:
    """Return a board for :class:`Levels`, None where workers cannot share memory. Collective."""
    return open_board(team, 2 * ROUND_BYTES)


class Levels:
    """Sums inside the machine, then between machines, then shares inside: on a thread, one tensor at a time."""

    def __init__(self, team: Team, board: Board | None) -> None:
        self._team = team
        self._neighbours = team.topology.neighbours(team.rank)
        self._board = board
        self._rounds = None if board is None else Rounds(board)
        self._inside = team.new_group(self._neighbours) if board is None else None
        self._inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work_forever, name="poseidon-levels", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._inbox.put(None)
        self._thread.join(timeout=CLOSE_S)
        if self._board is not None:
            self._board.close()

    def share_of(self, size: int) -> int:
        """Return how many of ``size`` values each worker carries between machines."""
        return -(-size // len(self._neighbours))

    def start(self, flat: Tensor, name: str, between: Between) -> Future[None]:
        """Replace ``flat`` by its sum over all workers; all workers of a machine must call in the same order."""
        return self._put(_Job(flat, name, between))

    def start_mean(self, flat: Tensor, name: str) -> Future[None]:
        """Replace ``flat`` by its mean over the workers of this machine, the only one; needs a board."""
        return self._put(_Job(flat, name, None))

    def _put(self, job: _Job) -> Future[None]:
        self._inbox.put(job)
        return job.future

    def _work_forever(self) -> None:
        while (job := self._inbox.get()) is not None:
            try:
                if failpoints.ARMED:
                    failpoints.hit("levels.sum")
                self._reduce(job)
            except BaseException as error:
                job.future.set_exception(error)
            else:
                job.future.set_result(None)

    def _reduce(self, job: _Job) -> None:
        flat, name, rounds = job.flat, job.name, self._rounds
        if job.between is None:
            assert rounds is not None
            _average(rounds, flat, self._neighbours.index(self._team.rank), name)
            return
        mine = self._combine(flat, name) if rounds is None else self._combine_on_board(rounds, flat, name)
        job.between(mine, self._team, name)
        if rounds is None:
            self._share(mine, flat, name)
        else:
            self._share_on_board(rounds, mine, flat, name)

    def _combine(self, flat: Tensor, name: str) -> Tensor:
        """Return this worker's share of the sum over the machine."""
        members = len(self._neighbours)
        share = self.share_of(flat.numel())
        missing = share * members - flat.numel()
        padded = torch.nn.functional.pad(flat, (0, missing)) if missing else flat
        received = torch.empty_like(padded)
        self._team.wait(dist.all_to_all_single(received, padded, group=self._inside, async_op=True), name)
        return received.view(members, share).sum(0)

    def _share(self, mine: Tensor, flat: Tensor, name: str) -> None:
        """Replace ``flat`` by all workers' shares."""
        shares = [torch.empty_like(mine) for _ in self._neighbours]
        self._team.wait(dist.all_gather(shares, mine, group=self._inside, async_op=True), name)
        flat.copy_(torch.cat(shares)[: flat.numel()])

    def _combine_on_board(self, rounds: Rounds, flat: Tensor, name: str) -> Tensor:
        members, share = len(self._neighbours), self.share_of(flat.numel())
        place, shares = self._neighbours.index(self._team.rank), flat.split(share)
        total = flat.new_zeros(share)
        step = rounds.room_bytes // (members * flat.element_size())
        for start in range(0, share, step):
            count = min(step, share - start)
            own = rounds.mine(members * count, flat.dtype).split(count)
            for into, values in zip(own, shares, strict=False):  # there may be fewer values than workers
                part = values[start : start + count]
                into[: part.numel()] = part
            parts = rounds.meet(members * count, flat.dtype, name)
            # Beyond the end of the last share lies what an earlier round left.
            some = min(count, shares[place].numel() - start) if place < len(shares) else 0
            if some > 0:
                begin = place * count
                add_parts([part[begin : begin + some] for part in parts], total[start : start + some], 1)
        return total

    def _share_on_board(self, rounds: Rounds, mine: Tensor, flat: Tensor, name: str) -> None:
        share, step = mine.numel(), rounds.room_bytes // mine.element_size()
        shares = flat.split(share)
        for start in range(0, share, step):
            count = min(step, share - start)
            rounds.mine(count, mine.dtype).copy_(mine[start : start + count])
            for into, values in zip(shares, rounds.meet(count, mine.dtype, name), strict=False):
                part = into[start : start + count]
                part.copy_(values[: part.numel()])


def _average(rounds: Rounds, flat: Tensor, place: int, name: str) -> None:
    """Replace ``flat`` by its mean over the machine, segment by segment."""
    for segment in flat.split(rounds.room_bytes // flat.element_size()):
        count, dtype = segment.numel(), segment.dtype
        rounds.mine(count, dtype).copy_(segment)
        parts = rounds.meet(count, dtype, name)
        if len(parts) == 2:  # to add both takes no longer than to add a half and to copy the other
            add_parts(parts, segment, 2)
            continue
        share = -(-count // len(parts))
        begin, end = (min(position * share, count) for position in (place, place + 1))
        if begin < end:
            mine = [part[begin:end] for part in parts]
            add_parts(mine, rounds.mine(end - begin, dtype), len(parts))
        for into, mean in zip(segment.split(share), rounds.meet(share, dtype, name), strict=False):
            into.copy_(mean[: into.numel()])


@dataclass(frozen=True, eq=False)
class _Job:
    flat: Tensor
    name: str
    between: Between | None
    """None: there is one machine, and the sum becomes a mean."""
    future: Future[None] = field(default_factory=Future)


class LevelsExchange(Exchange):
    """One tensor's exchange through :class:`Levels`."""

    def __init__(self, team: Team, future: Future[None], name: str) -> None:
        self._team = team
        self._future = future
        self._name = name

    def finish(self, is_used: bool) -> None:  # noqa: ARG002, D102 - as in the contract
        self._team.result(self._future, self._name)
