"""Samplers and streams that deal a job's batches to its workers, and know how far they are.

The batches of an epoch belong to the job, not to a worker: each worker takes its share of every batch. So a job that
goes on from a checkpoint, on as many workers or on others, sees the samples that it has not seen, each of them once.
"""

from __future__ import annotations

import contextlib
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, Sampler, default_collate, default_convert, get_worker_info
from torch.utils.data._utils import worker

from poseidon.data.balancing import Balancer
from poseidon.data.shares import cut
from poseidon.errors import ConfigError
from poseidon.job import settings
from poseidon.job.elastic import this_job
from poseidon.job.tell import tell

T = TypeVar("T")
_VERSION = 1


class Position:
    """How far a job is in its data: whole epochs, and batches and samples of the present one. Part of a checkpoint.

    Loaders fetch ahead, so what counts is what :meth:`over` has handed out.
    """

    counts_for_all = True
    """The place is that of the job's step, also where the workers' weights drift apart."""

    def __init__(self, batch_size: int, seed: int, rank: int | None, size: int | None, fixed: str | None) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(
                f"batch_size={batch_size!r}, expected a whole number of samples, for all workers together"
            )
        if fixed is not None and fixed not in settings.BATCHES:
            raise ConfigError(f"fixed_batch={fixed!r}, expected {' or '.join(map(repr, settings.BATCHES))}")
        self.batch_size = batch_size
        """Samples in one step of the whole job; with ``fixed_batch="per-worker"``, of one worker."""
        self.fixed_batch = fixed or settings.FIXED_BATCH.read()
        """What ``batch_size`` counts and stays the same when workers come and go."""
        self.epoch = 0
        """Epochs that are complete."""
        self.done = 0
        """Batches of this epoch that were handed out."""
        self._seen = 0
        """Samples in these."""
        self._seed = seed
        self._is_placed = rank is not None
        """The place was given, and does not follow the job."""
        self._rank, self._size = place(rank, size)
        self._most = most_workers(self._size)
        self._check_size()
        self._is_counted = True
        self._is_over = False

    @property
    def _is_per_worker(self) -> bool:
        return self.fixed_batch == settings.PER_WORKER

    @property
    def _total(self) -> int:
        """Samples of a full batch of the whole job, with the workers that there are now."""
        return self.batch_size * (self._size if self._is_per_worker else 1)

    def over(self, loader: Iterable[T]) -> Iterator[T]:
        """Hand out the rest of this epoch from a loader that reads from here, and count it."""
        self._is_over = True
        self._take_place()
        self._tell_left()
        self._begin_pass()
        before = torch.get_rng_state() if self.done else None
        iterator = iter(loader)
        if before is not None:  # a loader draws when it begins, which an uninterrupted epoch has done already
            torch.set_rng_state(before)
        try:
            for given in iterator:
                yield self._hand_out(given)
                self._end_batch()
            self._begin_epoch()
        finally:
            self._is_over = False

    def _tell_left(self) -> None:
        """Tell the launcher how many steps are left of this epoch, if that is known."""

    def _begin_epoch(self) -> None:
        self.epoch, self.done, self._seen = self.epoch + 1, 0, 0

    def _begin_pass(self) -> None:
        """Prepare for handing out batches."""

    @abstractmethod
    def _hand_out(self, given: Any) -> Any:
        """Count one batch that the loader has given, and return it."""

    def _end_batch(self) -> None:
        """Note that a batch was used."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position, with what it depends on."""
        self._check_counted("state_dict()")
        return {"version": _VERSION, "epoch": self.epoch, "done": self.done, "seen": self._seen, **self._terms()}

    def _check_counted(self, what: str) -> None:
        if not self._is_counted:
            raise ConfigError(
                f"{what}: {type(self).__name__} does not know how far its loader is: iterate over "
                "sampler.over(loader) instead of loader"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; data that would be dealt otherwise than before are refused."""
        for name, mine in self._terms().items():
            # Positions of earlier versions do not say what was fixed.
            saved = state.get(name, settings.TOTAL if name == "fixed_batch" else None)
            if saved != mine:
                raise ConfigError(
                    f"{type(self).__name__} has {name}={mine!r}, but the position was saved with {saved!r}; "
                    "some samples would be seen twice or not at all"
                )
        self.epoch, self.done = int(state["epoch"]), int(state["done"])
        self._seen = int(state.get("seen", self.done * self.batch_size))

    def _terms(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "fixed_batch": self.fixed_batch, "seed": self._seed}

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
        if not self._is_per_worker and self.batch_size < most:
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

    Shares differ by one sample at most. With ``balance`` (default: as ``poseidon run --balance`` says) they follow the
    workers' measured speeds, and none has more than its own ``balance_max`` samples. The mean over the workers is that
    of all samples if each multiplies its mean loss by :attr:`weight`.

    With ``fixed_batch="per-worker"`` (default: as ``poseidon run --fixed-batch`` says), ``batch_size`` counts the
    samples of one worker, and the job's batch grows and shrinks with the number of workers.
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
        balance: bool | None = None,
        balance_max: int | None = None,
        fixed_batch: str | None = None,
    ) -> None:
        super().__init__(batch_size, seed, rank, size, fixed_batch)
        self._length = len(dataset)
        self._shuffles = shuffle
        self._drops_last = drop_last
        self._balancer = self._find_balancer(balance, balance_max)
        self._weight = 1.0
        self._is_weighted = False
        """Whether the program has asked for it since."""
        self._used = 0, 0
        """Samples of the batch handed out last: this worker's, and all."""
        self._recut()

    def _find_balancer(self, balance: bool | None, most: int | None) -> Balancer | None:
        most = settings.BALANCE_MAX.read() if most is None else most
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise ConfigError(f"balance_max={most!r}, expected a whole number of samples above 0")
        is_asked = settings.BALANCE.read() if balance is None else balance
        if not is_asked or (self._is_placed and balance is None):
            return None
        if self._is_placed:
            raise ConfigError(
                "balance=True with rank= and size=: workers balance their places in the job; leave them out"
            )
        if self._is_per_worker:
            raise ConfigError(
                'balance with fixed_batch="per-worker": one lets shares follow speed, the other keeps them; choose one'
            )
        return Balancer(most)

    @property
    def weight(self) -> float:
        """How much this worker's mean counts in the batch handed out last: 1 where shares are equal."""
        self._check_counted("weight")
        self._is_weighted = True
        return self._weight

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self._first + len(self._cuts) - 1

    def __iter__(self) -> Iterator[list[int]]:
        """Return this worker's share of each batch that is left of this epoch."""
        self._begin()
        order = None
        if self._shuffles:
            order = torch.randperm(
                self._length, generator=torch.Generator().manual_seed(self._seed + self.epoch), device="cpu"
            )
        balancer = self._balancer if self._is_counted else None
        first = 0 if balancer is None else balancer.handed
        for number, (start, stop) in enumerate(itertools.pairwise(self._cuts[self.done - self._first :]), first):
            # A worker without a share goes through the motions with the batch's first sample, whose weight is 0.
            mine = self._share(start, stop, balancer, number) or range(start, start + 1)
            yield [*mine] if order is None else order[mine.start : mine.stop].tolist()

    def _tell_left(self) -> None:
        if self._rank == 0:
            tell(steps_left=len(self) - self.done, left_of=f"epoch {self.epoch + 1}")

    def _share(self, start: int, stop: int, balancer: Balancer | None, number: int) -> range:
        if balancer is None:
            return share(start, stop, self._rank, self._size)
        return cut(start, balancer.shares(number, stop - start), self._rank)

    def _begin_pass(self) -> None:
        if self._balancer is not None:
            epoch = cut_epoch(self._length, self.batch_size, self._most, self._drops_last)
            self._balancer.begin(self.batch_size, max(stop - start for start, stop in itertools.pairwise(epoch)))

    def _hand_out(self, given: Any) -> Any:
        place = self.done - self._first
        if place + 1 >= len(self._cuts):
            raise ConfigError(
                f"the loader has more than the {len(self)} batches of an epoch: is it DataLoader(dataset, "
                "batch_sampler=sampler), with this sampler?"
            )
        start, stop = self._cuts[place], self._cuts[place + 1]
        mine = self._share(start, stop, self._balancer, 0 if self._balancer is None else self._balancer.handed)
        self._weight = len(mine) * self._size / (stop - start)
        self._used, self._is_weighted = (len(mine), stop - start), False
        self.done, self._seen = self.done + 1, stop
        if self._balancer is not None:
            self._balancer.handed += 1
        return given

    def _end_batch(self) -> None:
        if self._balancer is not None:
            samples, total = self._used
            self._balancer.end_lap(samples, total == self.batch_size, self._is_weighted)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; data that would be dealt otherwise than before are refused."""
        super().load_state_dict(state)
        if "seen" not in state:  # as earlier versions have saved it
            self._seen = cut_epoch(self._length, self.batch_size, self._most, self._drops_last)[self.done]
        self._recut()

    def _take_place(self) -> None:
        before = self._size
        super()._take_place()
        if self._is_per_worker and self._size != before:
            self._recut()

    def _begin_epoch(self) -> None:
        super()._begin_epoch()
        if self._first:
            self._recut()

    def _recut(self) -> None:
        """Cut what is left of the epoch into batches."""
        self._first = self.done
        # No less is ever left than one sample for each worker that the job may have.
        self._cuts = cut_epoch(self._length, self._total, self._most, self._drops_last, self._seen)

    def _terms(self) -> dict[str, Any]:
        return {**super()._terms(), "samples": self._length, "shuffle": self._shuffles}


class ElasticStream(Position, IterableDataset[Any]):
    """Deals a stream of samples to the workers batch by batch; give it to a ``DataLoader`` with ``batch_size=None``.

    Every worker reads the whole stream, and passes on its share of each batch, collated. Going on from a position reads
    up to it again, and a stream that comes otherwise each time cannot be continued. A last batch with fewer samples
    than workers is left out. Iterate over ``stream.over(loader)``. ``batch_size``, ``fixed_batch`` and :attr:`weight`
    are those of :class:`ElasticSampler`; shares differ by one sample at most, whatever the workers' speeds.
    """

    def __init__(
        self,
        source: Iterable[Any],
        batch_size: int,
        *,
        collate: Callable[[list[Any]], Any] = default_collate,
        rank: int | None = None,
        size: int | None = None,
        fixed_batch: str | None = None,
    ) -> None:
        super().__init__(batch_size, 0, rank, size, fixed_batch)
        if isinstance(source, Iterator):
            raise ConfigError(
                f"ElasticStream reads its source anew in each epoch, and when workers come or go, but a "
                f"{type(source).__name__} can be read once only; give it an object whose __iter__ begins anew"
            )
        self._source = source
        self._collate = collate
        self._tells_size = False
        """Whether a batch comes with the number of samples that all workers have of it."""
        self._weight: float | None = 1.0

    @property
    def weight(self) -> float:
        """How much this worker's mean counts in the batch handed out last: 1 where shares are equal."""
        if self._weight is None:
            raise ConfigError(
                "ElasticStream.weight: how large a batch is comes with it only from DataLoader(stream, "
                "batch_size=None) itself, without a collate_fn: give stream.over() that loader, and change its "
                "batches afterwards; or give the stream collate="
            )
        return self._weight

    def __iter__(self) -> Iterator[Any]:
        """Return this worker's share of each batch that is left."""
        helper = get_worker_info()
        if helper is None:
            self._begin()
        # Helpers take turns, as the loader does.
        turn, turns = (0, 1) if helper is None else (helper.id, helper.num_workers)
        source = self._source if helper is None else _read_as_whole(self._source)
        samples = itertools.islice(source, self._seen, None)
        for number in itertools.count():
            batch = list(itertools.islice(samples, self._total))
            if len(batch) < self._most:
                return
            if number % turns == turn:
                mine = share(0, len(batch), self._rank, self._size)
                dealt = self._collate(batch[mine.start : mine.stop])
                yield (len(batch), dealt) if self._is_over and self._tells_size else dealt

    def _hand_out(self, given: Any) -> Any:
        count, batch = given if self._tells_size else (self._total, given)
        mine = share(0, count, self._rank, self._size)
        self._weight = len(mine) * self._size / count if self._tells_size else None
        self.done, self._seen = self.done + 1, self._seen + self._total
        return batch

    def over(self, loader: Iterable[T]) -> Iterator[T]:
        """Hand out the rest of the stream from a loader that reads from here, and count it."""
        self._is_counted = True  # helpers cannot say that they read
        if getattr(loader, "persistent_workers", False):
            raise ConfigError(
                "ElasticStream with persistent_workers=True: the loader's processes would keep the position and place "
                "that they began with; leave persistent_workers out"
            )
        # Only where nobody comes between, who would not expect it.
        is_plain = isinstance(loader, DataLoader) and loader.collate_fn is default_convert
        self._tells_size = loader is self or (is_plain and getattr(loader, "dataset", None) is self)
        return super().over(loader)


def share(start: int, stop: int, rank: int, size: int) -> range:
    """Return a worker's share of the samples from ``start`` to ``stop``; shares differ by one at most."""
    count = stop - start
    return range(start + rank * count // size, start + (rank + 1) * count // size)


def cut_epoch(length: int, batch_size: int, size: int, drop_last: bool, start: int = 0) -> list[int]:
    """Return where the batches of an epoch begin and end, from ``start`` on.

    A last batch with fewer samples than workers goes with the one before, if that is not handed out yet.
    """
    cuts = [*range(start, length + 1, batch_size)]
    if not cuts:  # saved by a job that had more workers, whose last batch was larger
        return [start]
    rest = length - cuts[-1]
    if rest and not drop_last:
        if rest >= size or (start and len(cuts) == 1):
            cuts.append(length)
        elif len(cuts) > 1:
            cuts[-1] = length
    if len(cuts) < 2 and not start:
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


def _read_as_whole(source: Iterable[Any]) -> Iterator[Any]:
    """Iterate over a source that shall not know whether a loader's helper process reads it.

    Many take every n-th sample there, by ``get_worker_info()``; but every helper cuts whole batches and passes on some.
    """
    with _unhelped():
        iterator = iter(source)
    while True:
        with _unhelped():
            try:
                sample = next(iterator)
            except StopIteration:
                return
        yield sample


@contextlib.contextmanager
def _unhelped() -> Iterator[None]:
    helper, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = helper
