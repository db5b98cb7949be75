"""Which records a worker reads: pure rules, and the one function that asks for this worker's rank.

There are two rules, both without communication between the workers:

* in order (``in_turns``): all workers step through the same endless sequence of records and each takes every size-th.
  The batches of one step together are the batch that a single worker with the total batch size would read;
* shuffled (``Share.rows``): each worker owns every size-th record permanently and shuffles its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch.distributed as dist

from poseidon.caffe import process
from poseidon.errors import ConfigError
from poseidon.job.world import World

T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """One worker's part of the records of a source."""

    rank: int = 0
    size: int = 1
    """Number of workers that divide the source; 1: this worker reads everything."""

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ConfigError(f"share {self.rank} of {self.size} does not exist; shares count from 0")

    def rows(self, count: int, first: int = 0) -> range:
        """Return which of ``count`` records, numbered from ``first`` in the whole source, belong to this share."""
        return range((self.rank - first) % self.size, count, self.size)


def in_turns(one_pass: Callable[[], Iterable[T]], share: Share) -> Iterator[T]:
    """Yield this worker's records of an endless sequence of passes over a source, in order.

    The passes follow each other without a gap, so if the length of a source is not a multiple of the number of workers,
    a worker gets different records in each pass; every record of a pass still goes to exactly one worker.
    """
    position = 0
    while True:
        start = position
        for record in one_pass():
            if position % share.size == share.rank:
                yield record
            position += 1
        if position == start:
            return


def endless(count: int, share: Share, random: np.random.Generator | None, origin: str) -> Iterator[int]:
    """Yield the numbers of this worker's records pass after pass: in order, or reshuffled for each pass."""
    if random is None:
        yield from in_turns(lambda: range(count), share)
        return
    own = share.rows(count)
    if not own:
        raise too_few(origin, count, share)
    while True:
        yield from random.permutation(own).tolist()


def too_few(origin: str, count: int, share: Share) -> ConfigError:
    """Return the error for a source that leaves a worker without records."""
    return ConfigError(
        f"{origin}: has {count} records for {share.size} workers, so worker {share.rank} gets none; "
        "use fewer workers, or leave out shuffle"
    )


@dataclass(frozen=True)
class DataSource:
    """The path that a worker reads, and its share of it."""

    path: str
    share: Share = Share()


def locate(path: str, shared_file_system: bool | None, is_training: bool, world: World) -> DataSource:
    """Return the path and share that a worker reads for a data layer's ``source``.

    ``shared_file_system`` false: worker k reads all of ``path_k``, written by ``poseidon partition-data``. True: all
    workers read ``path`` and divide it. None: like true while training (in tests every worker reads everything, as
    Caffe does), or like false if only ``path_k`` exists.
    """
    own = share_path(path, world.rank)
    if shared_file_system is False:
        if not Path(own).exists():
            raise ConfigError(
                f"worker {world.rank} reads {own} because shared_file_system is false, but it does not exist; write it "
                "with `poseidon partition-data`, or set shared_file_system: true where all workers see the same files"
            )
        return DataSource(own)
    if shared_file_system is None:
        if world.size > 1 and not Path(path).exists() and Path(own).exists():
            return DataSource(own)
        if not is_training:
            return DataSource(path)
    return DataSource(path, Share(world.rank, world.size))


def share_path(path: str, rank: int) -> str:
    """Return the path of a worker's own part of a source."""
    return f"{path.rstrip('/')}_{rank}"


def this_worker() -> World:
    """Return this worker's rank and size, from the process group if there is one, else the script or environment."""
    if dist.is_available() and dist.is_initialized():
        return World(rank=dist.get_rank(), size=dist.get_world_size())
    return World(rank=process.solver_rank(), size=process.solver_count())
