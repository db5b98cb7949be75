"""Data that are dealt to however many workers there are, and that know how far they are.

The batches of an epoch belong to the job, not to a worker: each worker takes its share of every batch. So a job that
goes on from a checkpoint, on as many workers or on others, sees the samples that it has not seen, each of them once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, Sampler, default_collate, get_worker_info

from poseidon.errors import ConfigError
from poseidon.job.elastic import this_job
from poseidon.job.tell import tell

T = TypeVar("T")
_VERSION = 1


class Position:
    """How far a job is in its data: whole epochs, and batches of the present one. Saved as part of a checkpoint.

    Loaders fetch ahead, so what counts is what :meth:`over` has handed out.
    """

    def __init__(self, batch_size: int, seed: int, rank: int | None, size: int | None) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(
                f"batch_size={batch_size!r}, expected a whole number of samples, for all workers together"
            )
        self.batch_size = batch_size
        """Samples in one step of the whole job."""
        self.epoch = 0
        """Epochs that are complete."""
        self.done = 0
        """Batches of this epoch that were handed out."""
        self._seed = seed
        self._is_placed = rank is not None
        """The place was given, and does not follow the job."""
        self._rank, self._size = place(rank, size)
        self._most = most_workers(self._size)
        self._check_size()
        self._is_counted = True
        self._is_over = False

    def over(self, loader: Iterable[T]) -> Iterator[T]:
        """Hand out the rest of this epoch from a loader that reads from here, and count it."""
        self._is_over = True
        self._take_place()
        self._tell_left()
        try:
            for batch in loader:
                self.done += 1
                yield batch
            self.epoch, self.done = self.epoch + 1, 0
        finally:
            self._is_over = False

    def _tell_left(self) -> None:
        """Tell the launcher how many steps are left of this epoch, if that is known."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position, with what it depends on."""
        if not self._is_counted:
            raise ConfigError(
                f"{type(self).__name__} does not know how far its loader is: iterate over sampler.over(loader) "
                "instead of loader"
            )
        return {"version": _VERSION, "epoch": self.epoch, "done": self.done, **self._terms()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; data that would be dealt otherwise than before are refused."""
        for name, mine in self._terms().items():
            if state.get(name) != mine:
                raise ConfigError(
                    f"{type(self).__name__} has {name}={mine!r}, but the position was saved with {state.get(name)!r}; "
                    "some samples would be seen twice or not at all"
                )
        self.epoch, self.done = int(state["epoch"]), int(state["done"])

    def _terms(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "seed": self._seed}

    def _begin(self) -> None:
        """Note that somebody reads from here, counted or not."""
        self._is_counted = self._is_over
        self._take_place()

    def _take_place(self) -> None:
        """Follow the job: in an elastic one, ranks and the number of workers change."""
        if not self._is_placed:
            self._rank, self._size = place(None, None)
            self._check_size()

    def _check_size(self) -> None:
        most = max(self._size, self._most)
        if self.batch_size < most:
            raise ConfigError(f"batch_size={self.batch_size} for {most} workers: each needs a sample of every batch")


class ElasticSampler(Position, Sampler[list[int]]):
    """Deals a dataset to the workers batch by batch; give it to a ``DataLoader`` as its ``batch_sampler``.

    ``batch_size`` counts the samples of one step of the whole job. Every worker gets its share of each batch, and in an
    epoch every sample comes once; ``drop_last`` leaves out a last batch that is not full. Iterate over
    ``sampler.over(loader)``, which counts what was handed out::

        sampler = poseidon.data.ElasticSampler(dataset, batch_size=256)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)
        for epoch in range(sampler.epoch, epochs):
            for batch in sampler.over(loader):
                ...

    Shares may differ by one sample. The mean over the workers is that of all samples if each multiplies its mean loss
    by :attr:`weight`.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        super().__init__(batch_size, seed, rank, size)
        self._length = len(dataset)
        self._shuffles = shuffle
        # The same batches for any number of workers that the job may have.
        self._cuts = cut_epoch(self._length, batch_size, self._most, drop_last)

    @property
    def weight(self) -> float:
        """How much this worker's mean counts in the batch handed out last: 1 where shares are equal."""
        first, last = itertools.pairwise(self._cuts), max(self.done - 1, 0)
        start, stop = next(itertools.islice(first, last, None))
        mine = share(start, stop, self._rank, self._size)
        return len(mine) * self._size / (stop - start)

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self._cuts) - 1

    def __iter__(self) -> Iterator[list[int]]:
        """Return this worker's share of each batch that is left of this epoch."""
        self._begin()
        order = None
        if self._shuffles:
            order = torch.randperm(self._length, generator=torch.Generator().manual_seed(self._seed + self.epoch))
        for start, stop in itertools.islice(itertools.pairwise(self._cuts), self.done, None):
            mine = share(start, stop, self._rank, self._size)
            yield [*mine] if order is None else order[mine.start : mine.stop].tolist()

    def _tell_left(self) -> None:
        if self._rank == 0:
            tell(steps_left=len(self) - self.done, left_of=f"epoch {self.epoch + 1}")

    def _terms(self) -> dict[str, Any]:
        return {**super()._terms(), "samples": self._length, "shuffle": self._shuffles}


class ElasticStream(Position, IterableDataset[Any]):
    """Deals a stream of samples to the workers batch by batch; give it to a ``DataLoader`` with ``batch_size=None``.

    Every worker reads the whole stream, and passes on its share of each batch, collated. Going on from a position reads
    up to it again, and a stream that comes otherwise each time cannot be continued. A last batch with fewer samples
    than workers is left out. Iterate over ``stream.over(loader)``.
    """

    def __init__(
        self,
        source: Iterable[Any],
        batch_size: int,
        *,
        collate: Callable[[list[Any]], Any] = default_collate,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        super().__init__(batch_size, 0, rank, size)
        self._source = source
        self._collate = collate

    def __iter__(self) -> Iterator[Any]:
        """Return this worker's share of each batch that is left."""
        helper = get_worker_info()
        if helper is None:
            self._begin()
        # Helpers take turns, as the loader does.
        turn, turns = (0, 1) if helper is None else (helper.id, helper.num_workers)
        samples = iter(self._source)
        for number in itertools.count():
            batch = list(itertools.islice(samples, self.batch_size))
            if len(batch) < self._most:
                return
            if number >= self.done and (number - self.done) % turns == turn:
                mine = share(0, len(batch), self._rank, self._size)
                yield self._collate(batch[mine.start : mine.stop])

    def over(self, loader: Iterable[T]) -> Iterator[T]:
        """Hand out the rest of the stream from a loader that reads from here, and count it."""
        self._is_counted = True  # helpers cannot say that they read
        if getattr(loader, "persistent_workers", False):
            raise ConfigError(
                "ElasticStream with persistent_workers=True: the loader's processes would keep the position and place "
                "that they began with; leave persistent_workers out"
            )
        return super().over(loader)


def share(start: int, stop: int, rank: int, size: int) -> range:
    """Return a worker's share of the samples from ``start`` to ``stop``; shares differ by one at most."""
    count = stop - start
    return range(start + rank * count // size, start + (rank + 1) * count // size)


def cut_epoch(length: int, batch_size: int, size: int, drop_last: bool) -> list[int]:
    """Return where the batches of an epoch begin and end.

    A last batch with fewer samples than workers goes with the one before.
    """
    cuts = [*range(0, length + 1, batch_size)]
    rest = length - cuts[-1]
    if rest and not drop_last:
        if rest >= size:
            cuts.append(length)
        elif len(cuts) > 1:
            cuts[-1] = length
    if len(cuts) < 2:
        raise ConfigError(
            f"{length} samples make no batch of {batch_size} for {size} workers"
            + ("; without drop_last there may be a smaller one" if drop_last else "")
        )
    return cuts


def most_workers(size: int) -> int:
    """Return how many workers the job may have, if it has ``size`` now."""
    job = this_job()
    return size if job is None else max(job.most, size)


def place(rank: int | None, size: int | None) -> tuple[int, int]:
    """Return the given place, or that of this process in the job."""
    if rank is not None and size is not None and not 0 <= rank < size:
        raise ConfigError(f"rank={rank} of size={size}: expected 0 <= rank < size")
    if (rank is None) != (size is None):
        raise ConfigError(f"rank={rank} and size={size}: give both or none")
    if rank is not None and size is not None:
        return rank, size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
