"""DataLoaders: each worker gets its part of every training batch, and evaluation sees everything.

Each iteration decides whether a loader is read for training: with gradients off, with all trained models in eval mode,
or with nothing to train yet, every worker reads the whole of it.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, get_worker_info

from poseidon.auto.dealing import Dealer, Part
from poseidon.auto.engines import Engines
from poseidon.auto.step import ScriptStep
from poseidon.engine.outputs import tensors_in
from poseidon.following.naming import find_name, is_called_by_keras
from poseidon.following.options import AutoOptions
from poseidon.following.patches import Patches
from poseidon.following.script_report import ScriptReport
from poseidon.following.streams import ALIKE, APART, Streams, WorkerSeeds
from poseidon.team.team import Team

_EVALUATION_WORDS = ("val", "test", "eval", "dev")


class LoaderDeal:
    """How one loader is divided between the workers; lives as long as the loader."""

    def __init__(self, loader: DataLoader[Any], rank: int, size: int, options: AutoOptions) -> None:
        batch = loader.batch_size
        custom = batch is None and loader.batch_sampler is not None
        self.is_stream = isinstance(loader.dataset, IterableDataset)
        self.is_batched = loader.batch_sampler is not None
        self.divides = options.batch == "total" and self.is_batched
        self._is_sum = options.loss == "sum"
        self.batch: int | None = None if custom or not self.is_batched else batch
        self.dealer = Dealer(rank, size, self.divides, bool(loader.drop_last))
        self.is_dealt = False
        """Whether the current iteration is dealt out."""
        self.is_decided = False
        """Whether the loader was iterated before, so its purpose is known."""
        self.weights: deque[float] = deque()
        """Of the batches that are on their way, in their order."""

    def weigh(self, part: Part[Any]) -> float:
        """Return the factor of this worker's loss on a part."""
        return part.sum_weight if self._is_sum else part.mean_weight

    def local_batch(self) -> int:
        """Return how many samples of a full batch are this worker's."""
        assert self.batch is not None
        start, stop = self.dealer.bounds(self.batch)
        return stop - start if self.divides else self.batch


class DealtSampler:
    """Replaces a loader's sampler or batch sampler; passes everything on if the loader is read as a whole."""

    def __init__(self, original: Any, deal: LoaderDeal, streams: Streams) -> None:
        self._original = original
        self._deal = deal
        self._streams = streams

    def __iter__(self) -> Iterator[Any]:
        deal = self._deal
        weights = deal.weights
        drawn = self._draw()
        if not deal.is_dealt:
            yield from drawn
        elif deal.is_stream:
            for batch in drawn:
                yield batch[: max(1, deal.local_batch())] if deal.batch is not None else batch
        elif deal.is_batched:
            for part in deal.dealer.batches(drawn):
                weights.append(deal.weigh(part))
                yield part.items
        else:
            for part in deal.dealer.items(drawn):
                weights.append(deal.weigh(part))
                yield part.items[0]

    def __len__(self) -> int:
        count = len(self._original)
        return self._deal.dealer.count_batches(count) if self._deal.is_dealt else count

    def _draw(self) -> Iterator[Any]:
        """Draw from the script's sampler, with the random stream that all workers share."""
        with self._streams.using(ALIKE):
            source = iter(self._original)
        while True:
            with self._streams.using(ALIKE):
                try:
                    item = next(source)
                except StopIteration:
                    return
            yield item


class DealtStream(IterableDataset[Any]):
    """Replaces an iterable dataset: reads all of it and keeps this worker's part."""

    def __init__(self, original: Any, deal: LoaderDeal) -> None:
        self.__dict__.update(_original=original, _deal=deal)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._original, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __iter__(self) -> Iterator[Any]:
        deal: LoaderDeal = self._deal
        source: Iterable[Any] = self._original
        if not deal.is_dealt:
            yield from source
            return
        weights = deal.weights
        parts = deal.dealer.items(source) if deal.batch is None else deal.dealer.stream(source, deal.batch)
        for part in parts:
            # A loader process cannot tell us the weights; there a short end counts like a full batch.
            if get_worker_info() is None:
                weights.append(deal.weigh(part))
            yield from part.items


class Delivery:
    """Iterates over a loader for the script and records the weight of each batch."""

    def __init__(
        self, batches: Iterator[Any], deal: LoaderDeal, engines: Engines, step: ScriptStep, streams: Streams
    ) -> None:
        self._batches = batches
        self._engines = engines
        self._deal = deal
        self._step = step
        self._streams = streams
        self._is_dealt = deal.is_dealt
        self._weights = deal.weights

    def __iter__(self) -> Delivery:
        return self

    def __next__(self) -> Any:
        # A stream draws its order from the same generator as its samples, which must stay equal on all workers.
        stream = APART if self._is_dealt and not self._deal.is_stream else ALIKE
        try:
            with self._streams.using(stream):
                batch = next(self._batches)
        except StopIteration:
            self._step.weight = 1.0
            raise
        tensors = tensors_in(batch)
        self._step.weight = self._weights.popleft() if self._is_dealt and self._weights else 1.0
        self._step.samples = next((len(tensor) for tensor in tensors if tensor.ndim), 0)
        self._step.values = sum(tensor.numel() for tensor in tensors)
        self._step.is_shared = not self._is_dealt
        self._step.has_dealt |= self._is_dealt
        if self._is_dealt:
            self._engines.look_for_strangers()
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_batches"], name)


class Loaders:
    """Decides how each iteration of each loader is read."""

    def __init__(
        self,
        team: Team,
        options: AutoOptions,
        engines: Engines,
        step: ScriptStep,
        streams: Streams,
        report: ScriptReport,
    ) -> None:
        self._rank, self._size = team.rank, team.size
        self._options = options
        self._engines = engines
        self._step = step
        self._streams = streams
        self._report = report
        self._deals: weakref.WeakKeyDictionary[DataLoader[Any], LoaderDeal] = weakref.WeakKeyDictionary()

    def install(self, patches: Patches) -> None:
        """Install the hooks."""
        patches.wrap(DataLoader, "__iter__", self._iterate)
        patches.wrap(DataLoader, "__len__", self._count)

    def _iterate(self, original: Callable[..., Iterator[Any]], loader: DataLoader[Any]) -> Iterator[Any]:
        if is_called_by_keras():
            return original(loader)
        deal = self._deal_of(loader)
        name = find_name(loader) or "a loader"
        deal.is_dealt = self._is_for_training(loader, name)
        deal.is_decided = True
        deal.weights = deque()
        self._tell(loader, deal, name)
        with self._streams.using(ALIKE), _standing_in(loader, deal, self._streams, self._rank):
            batches = original(loader)
        if deal.is_dealt:
            self._streams.part()
        return Delivery(batches, deal, self._engines, self._step, self._streams)

    def _count(self, original: Callable[..., int], loader: DataLoader[Any]) -> int:
        count = original(loader)
        if is_called_by_keras():
            return count
        deal = self._deal_of(loader)
        is_dealt = deal.is_dealt if deal.is_decided else self._guess(loader)
        if not is_dealt:
            return count
        if deal.is_stream and deal.batch is not None:
            samples = len(loader.dataset)  # type: ignore[arg-type]
            block = deal.batch * (1 if deal.divides else self._size)
            return samples // block if deal.dealer.drop_last else -(-samples // block)
        return deal.dealer.count_batches(count)

    def _deal_of(self, loader: DataLoader[Any]) -> LoaderDeal:
        if loader not in self._deals:
            self._deals[loader] = LoaderDeal(loader, self._rank, self._size, self._options)
        return self._deals[loader]

    def _is_for_training(self, loader: DataLoader[Any], name: str) -> bool:
        if name in self._options.whole or not torch.is_grad_enabled():
            return False
        if name in self._options.deal:
            return True
        # Reading too much is only slow; reading too little is wrong. So a name that speaks of evaluation is believed.
        return not _sounds_like_evaluation(loader, name) and self._is_training()

    def _is_training(self) -> bool:
        roots = self._engines.roots
        if roots:
            return any(root.training for root in roots)
        return self._engines.has_optimizer or _is_anything_trainable()

    def _guess(self, loader: DataLoader[Any]) -> bool:
        """Guess whether a loader that was never iterated is for training, for a script that asks for its length."""
        name = find_name(loader) or ""
        if name in self._options.whole or not torch.is_grad_enabled():
            return False
        return name in self._options.deal or not _sounds_like_evaluation(loader, name)

    def _tell(self, loader: DataLoader[Any], deal: LoaderDeal, name: str) -> None:
        try:
            samples = len(loader.sampler) if not deal.is_stream else len(loader.dataset)  # type: ignore[arg-type]
        except TypeError:
            samples = None
        count = "" if samples is None else f"{samples:,} samples"
        if not deal.is_dealt:
            why = "as --whole says" if name in self._options.whole else "not for training"
            self._report.say(f"{name}: whole on every worker ({why}){', ' + count if count else ''}")
            return
        each = "" if samples is None else f", {count} -> about {samples // self._size:,} each"
        self._report.say(f"{name}: dealt out{each}, {self._say_batch(deal)}")
        if self._options.batch == "total" and not deal.divides:
            self._report.say(
                f"{name}: yields whole batches, which cannot be divided; each worker takes every one in turn"
            )

    def _say_batch(self, deal: LoaderDeal) -> str:
        if deal.batch is None:
            return "each of its batches divided" if deal.divides else "a batch of its own for each worker"
        total = deal.batch if deal.divides else deal.batch * self._size
        return f"batches of {deal.local_batch()} ({total} in all)"


class _standing_in:  # noqa: N801 - reads as a statement in `with`
    """Puts our sampler and dataset into a loader while an iterator is created from it."""

    def __init__(self, loader: DataLoader[Any], deal: LoaderDeal, streams: Streams, rank: int) -> None:
        self._fields = loader.__dict__
        field = "batch_sampler" if deal.is_batched else "sampler"
        self._ours: dict[str, Any] = {field: DealtSampler(self._fields[field], deal, streams)}
        if deal.is_stream:
            self._ours["dataset"] = DealtStream(loader.dataset, deal)
        else:
            self._ours["worker_init_fn"] = WorkerSeeds(rank if deal.is_dealt else 0, loader.worker_init_fn)
        self._before = {name: self._fields[name] for name in self._ours}

    def __enter__(self) -> None:
        # Not by assignment: a loader does not allow replacing its sampler.
        self._fields.update(self._ours)

    def __exit__(self, *_: object) -> None:
        self._fields.update(self._before)


def _sounds_like_evaluation(loader: DataLoader[Any], name: str) -> bool:
    is_in_order = isinstance(getattr(loader, "sampler", None), SequentialSampler)
    return is_in_order and any(word in name.lower() for word in _EVALUATION_WORDS)


def _is_anything_trainable() -> bool:
    return any(issubclass(type(found), Tensor) and found.is_leaf and found.requires_grad for found in gc.get_objects())
