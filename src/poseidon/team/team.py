"""The workers of one job as one of them sees them: who they are, where they are, and how to wait for them."""

from __future__ import annotations

import atexit
import functools
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from poseidon.errors import PoseidonError
from poseidon.team.topology import Topology
from poseidon.team.watch import Watch

T = TypeVar("T")

CLOSE_S = 2.0
"""How long to wait for a background thread that was asked to end; one that is stuck ends with the process."""

_CHANNELS: list[dist.ProcessGroup] = []
"""Every private group, kept until the process ends. Freed at the interpreter's end, gloo's threads are torn down in an
order that aborts the process; destroyed earlier, the next group of the same workers would meet its stale addresses."""

_SERIAL: Counter[str] = Counter()
"""Numbers the teams of each group; equal on all its workers, because they are made in the same order everywhere."""


SETTLE_S = 0.1
"""How long gloo's threads are given at the end to drop the tensors of the last operations."""


@functools.cache
def _settle_at_exit() -> None:
    """Wait a moment before the interpreter is torn down, once everything else has been closed.

    A gloo thread that drops the last reference to a tensor has to enter the interpreter; if that is going away, C++
    ends the process with an abort, after a training that went well.
    """
    atexit.register(time.sleep, SETTLE_S)


def machine_name() -> str:
    """Return a name that workers on the same machine share and workers elsewhere do not.

    ``POSEIDON_MACHINE`` overrides it. The network namespace is part of it: containers have links of their own, and what
    matters here is which workers share a network card.
    """
    given = os.environ.get("POSEIDON_MACHINE")
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

    Making one is collective: every worker of ``group`` must do it, in the same order relative to other teams.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self.group = dist.group.WORLD if group is None else group
        assert self.group is not None
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self.timeout_s = timeout_s
        self._deadline = timedelta(seconds=timeout_s)
        self._ranks = dist.get_process_group_ranks(self.group)
        self.host = socket.gethostname()
        # Named before anything blocks, so that a worker that never arrives can be named by those that did.
        hosts = [f"host of rank {rank}" for rank in range(self.size)]
        name = self.group.group_name
        _SERIAL[name] += 1
        _settle_at_exit()
        self.watch = Watch(_store(), f"poseidon/{name}/{_SERIAL[name]}", self.rank, hosts, timeout_s)
        self.control = self.new_group()
        identity = self.gather_json({"host": self.host, "machine": machine_name()})
        hosts[:] = [worker["host"] for worker in identity]
        self.topology = Topology.from_names([worker["machine"] for worker in identity])

    @property
    def is_nccl(self) -> bool:
        """Whether the group reduces CUDA tensors with NCCL."""
        return torch.cuda.is_available() and "nccl" in str(dist.get_backend_config(self.group))

    def new_group(self, members: Sequence[int] | None = None) -> dist.ProcessGroup:
        """Make a gloo group of ``members`` (ranks in this team; default all), collectively among them."""
        ranks = self._ranks if members is None else [self._ranks[member] for member in members]
        try:
            group: dist.ProcessGroup = dist.new_group(
                ranks, timeout=self._deadline, backend="gloo", use_local_synchronization=True
            )
            _CHANNELS.append(group)
            return group
        except RuntimeError as error:
            raise self.watch.lost("the start of the exchange channels", None, error) from error

    def global_rank(self, rank: int) -> int:
        """Return the rank in the whole job of a member of this team."""
        return self._ranks[rank]

    def wait(self, work: Any, what: str, peer: int | None = None) -> None:
        """Block until a gloo operation is done, or raise :class:`WorkerLostError` naming who is missing."""
        try:
            work.wait(self._deadline)
        except RuntimeError as error:
            raise self.watch.lost(what, peer, error) from error

    def wait_for(self, work: Any, tensor: Tensor, what: str, peer: int | None = None) -> None:
        """Wait for a collective on ``tensor``; with NCCL only the CUDA stream waits, and the watch sees to the end."""
        if tensor.is_cuda and self.is_nccl:
            work.wait()
            self.watch.guard(work, what)
        else:
            self.wait(work, what, peer)

    def result(self, future: Future[T], what: str, grace_s: float = 15.0) -> T:
        """Return a future's value, raise its failure, or raise :class:`WorkerLostError` after the deadline.

        ``grace_s`` is added to the deadline where the other thread has the same one and knows more.
        """
        try:
            return future.result(self.timeout_s + grace_s)
        except PeerLostError as error:
            raise self.watch.lost(what, error.rank, error) from error
        except PoseidonError:
            raise
        except BaseException as error:
            if not future.done():
                raise self.watch.lost(what, None, TimeoutError(f"no answer within {self.timeout_s:g} s")) from None
            raise RuntimeError(f"the exchange of {what} failed on rank {self.rank}") from error

    def gather_ints(self, values: Sequence[int], what: str = "the roll call") -> list[list[int]]:
        """Return every worker's integers, by rank; all workers must give equally many."""
        return self.start_gather(values)(what)

    def start_gather(self, values: Sequence[int]) -> PendingGather:
        """Begin to collect every worker's integers; call the result to wait for them."""
        return PendingGather(self, values)

    def gather_json(self, value: Any) -> list[Any]:
        """Return every worker's plain data, by rank. Text travels, never pickled objects."""
        data = json.dumps(value).encode()
        sizes = [row[0] for row in self.gather_ints([len(data)], "everybody's greeting")]
        mine = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        everybody = [torch.empty_like(mine) for _ in range(self.size)]
        self.wait(dist.all_gather(everybody, mine, group=self.control, async_op=True), "everybody's greeting")
        pairs = zip(everybody, sizes, strict=True)
        return [json.loads(bytes(theirs[:size].tolist())) for theirs, size in pairs]

    def close(self) -> None:
        """Stop the heartbeat. The private channels stay open: see :data:`_CHANNELS`."""
        self.watch.close()


class PendingGather:
    """Integers on their way from every worker to every worker."""

    def __init__(self, team: Team, values: Sequence[int]) -> None:
        self._team = team
        mine = torch.tensor(list(values), dtype=torch.int64, device="cpu")
        self._everybody = [torch.empty_like(mine) for _ in range(team.size)]
        self._work = dist.all_gather(self._everybody, mine, group=team.control, async_op=True)

    def __call__(self, what: str) -> list[list[int]]:
        """Wait for and return the integers, by rank."""
        self._team.wait(self._work, what)
        return [row.tolist() for row in self._everybody]


class PeerLostError(PoseidonError):
    """A worker's connection ended; whoever waits for a future hears of it as ``WorkerLostError``."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(why)
        self.rank = rank


def _store() -> Any:
    store = dist.distributed_c10d._get_default_store()
    # A client of our own: the shared one is locked while another thread waits in it, and would silence the heartbeat.
    return store.clone() if hasattr(store, "clone") else store
