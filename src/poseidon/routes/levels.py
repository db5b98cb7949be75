"""Three levels: workers of one machine combine first, then each carries its share of the traffic between machines."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch import Tensor

from poseidon.routes.base import Exchange
from poseidon.team.team import CLOSE_S, Team

Between = Callable[[Tensor, Team, str], None]
"""Sums a tensor over this worker's counterparts on all machines, in place. Blocks."""


class Levels:
    """Sums inside the machine, then between machines, then shares inside: on a thread, one tensor at a time."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._neighbours = team.topology.neighbours(team.rank)
        self._inside = team.new_group(self._neighbours)
        self._inbox: queue.SimpleQueue[tuple[Tensor, str, Between, Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work_forever, name="poseidon-levels", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._inbox.put(None)
        self._thread.join(timeout=CLOSE_S)

    def share_of(self, size: int) -> int:
        """Return how many of ``size`` values each worker carries between machines."""
        return -(-size // len(self._neighbours))

    def start(self, flat: Tensor, name: str, between: Between) -> Future[None]:
        """Replace ``flat`` by its sum over all workers; all workers of a machine must call in the same order."""
        future: Future[None] = Future()
        self._inbox.put((flat, name, between, future))
        return future

    def _work_forever(self) -> None:
        while (job := self._inbox.get()) is not None:
            flat, name, between, future = job
            try:
                self._reduce(flat, name, between)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

    def _reduce(self, flat: Tensor, name: str, between: Between) -> None:
        members = len(self._neighbours)
        share = self.share_of(flat.numel())
        missing = share * members - flat.numel()
        padded = torch.nn.functional.pad(flat, (0, missing)) if missing else flat
        received = torch.empty_like(padded)
        self._team.wait(dist.all_to_all_single(received, padded, group=self._inside, async_op=True), name)
        mine = received.view(members, share).sum(0)
        between(mine, self._team, name)
        shares = [torch.empty_like(mine) for _ in range(members)]
        self._team.wait(dist.all_gather(shares, mine, group=self._inside, async_op=True), name)
        flat.copy_(torch.cat(shares)[: flat.numel()])


class LevelsExchange(Exchange):
    """One tensor's exchange through :class:`Levels`."""

    def __init__(self, team: Team, future: Future[None], name: str) -> None:
        self._team = team
        self._future = future
        self._name = name

    def finish(self, is_used: bool) -> None:  # noqa: ARG002, D102 - as in the contract
        self._team.result(self._future, self._name)
