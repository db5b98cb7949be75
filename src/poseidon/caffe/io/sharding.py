"""Which records a worker reads: pure rules, and the one function that asks for this worker's rank.

The workers take batch after batch of one endless sequence of records in turns, without communication. So the batches
of one step together are, in the order of the workers, the batch that a single worker with the total batch size would
read. In order, a worker reads its ranges and nothing between them; shuffled, all workers know the same random order of
each pass, by a common seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from poseidon.caffe import process
from poseidon.caffe.io.draws import permuted
from poseidon.errors import ConfigError
from poseidon.job.world import World


@dataclass(frozen=True)
class Share:
    """One worker's part of the records of a source."""

    rank: int = 0
    size: int = 1
    """Number of workers that divide the source; 1: this worker reads everything."""

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ConfigError(f"share {self.rank} of {self.size} does not exist; shares count from 0")

    def position(self, number: int, batch: int) -> int:
        """Return where this worker's sample ``number`` is in the endless sequence that all workers read in turns."""
        turn, row = divmod(number, batch)
        return (turn * self.size + self.rank) * batch + row

    def owns(self, positions: NDArray[np.int64], batch: int) -> NDArray[np.bool_]:
        """Return which places of that sequence are this worker's."""
        mine: NDArray[np.bool_] = positions // batch % self.size == self.rank
        return mine


class Numbered(NamedTuple):
    """A record of a source whose records are known by number."""

    number: int
    """The place in the endless sequence, different for each pass over the source."""
    record: int
    """Which record of the source it is."""


def endless(
    count: int, share: Share, batch: int, seed: int | None, first: int = 0, skip: int = 0
) -> Iterator[Numbered]:
    """Yield this worker's records from its sample ``first`` on, pass after pass: in order, or shuffled by a seed.

    The workers together leave out the first ``skip`` records of the sequence, as one worker alone would.
    """
    order, shuffled = None, -1
    for number in itertools.count(first):
        position = skip + share.position(number, batch)
        turn, record = divmod(position, count)
        if seed is not None:
            if order is None or turn != shuffled:
                order, shuffled = permuted(count, seed, turn), turn
            record = int(order[record])
        yield Numbered(position, record)


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
