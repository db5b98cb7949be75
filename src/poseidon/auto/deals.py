"""How one DataLoader is divided: what stands in for its sampler, or its stream, and gives this worker its part.

``loaders.py`` begins each pass over a loader, and follows its batches to the script.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info

from poseidon.auto.dealing import Dealer, cut
from poseidon.auto.passes import BatchShare, LoaderPass, PassPurpose
from poseidon.engine.outputs import tensors_in
from poseidon.following.options import AutoOptions
from poseidon.following.streams import ALIKE, Streams

Place = tuple[tuple[str, int], ...]


class LoaderDeal:
    """How one loader is divided between the workers; lives as long as the loader."""

    def __init__(self, loader: DataLoader[Any], rank: int, size: int, options: AutoOptions) -> None:
        self.is_stream = isinstance(loader.dataset, IterableDataset)
        self.is_batched = loader.batch_sampler is not None
        # A sampler of batches for a dataset that takes lists of indices.
        self.has_lists = not self.is_batched and isinstance(loader.sampler, BatchSampler)
        self.divides = options.batch == "total" and (self.is_batched or self.has_lists)
        self.batch: int | None = loader.batch_size if self.is_batched else None
        self.drop_last = bool(loader.drop_last)
        self.is_apart = self.is_stream and loader.num_workers > 0
        """Whether processes of the loader read a stream, and deal by themselves."""
        self.dealer = Dealer(rank, size, self.divides, self.drop_last)
        self._is_sum = options.loss == "sum"
        self.now: LoaderPass | None = None
        """The current pass, or the last one."""
        self.count_source = loader.dataset if self.is_stream else loader.sampler
        """Whose length is the number of samples, where it has one."""
        self.name = "a loader"
        self.place: Place = ()
        self.is_compared = True
        """Whether the workers have compared the pass."""
        self.rests: list[BatchShare] = []
        """What is still to be read of the pass, instead of what the sampler draws."""
        self.samples: deque[Any] = deque()
        """Samples of a stream that were drawn and come next."""
        self._purposes: dict[Place, bool] = {}
        self._is_dealt_there: bool | None = None
        """Whether the loader's processes deal, where these read a stream."""

    def begin(self, deals: bool, name: str, place: Place) -> LoaderPass:
        """Start a pass."""
        self.name, self.place = name, place
        self.is_compared = False
        self.rests = []
        self.samples.clear()
        self.now = LoaderPass(
            self.dealer,
            deals,
            is_batched=self.is_batched or self.has_lists,
            is_sum=self._is_sum,
            is_frozen=self.is_apart,
            key=(lambda pair: pair[0]) if self.is_stream else None,
            name=name,
        )
        return self.now

    def drop_stale_processes(self, loader: DataLoader[Any]) -> None:
        """Let a loader start new processes if those that it keeps (``persistent_workers``) read a stream otherwise."""
        if not (self.is_apart and self.now is not None):
            return
        if self._is_dealt_there not in (None, self.now.is_dealt):
            loader._iterator = None
        self._is_dealt_there = self.now.is_dealt

    def remember(self) -> None:
        """Remember what the current pass turned out to be for."""
        if self.now is not None and self.now.purpose is not PassPurpose.OPEN:
            self._purposes[self.place] = self.now.purpose is PassPurpose.TRAINING

    def recall(self, place: Place) -> bool | None:
        """Return whether a pass that began at a place of the script was for training; None if none began there."""
        return self._purposes.get(place)

    @property
    def has_trained(self) -> bool:
        """Whether any pass was for training."""
        return any(self._purposes.values())

    def local_batch(self) -> int:
        """Return how many samples of a full batch are this worker's."""
        assert self.batch is not None
        start, stop = self.dealer.bounds(self.batch)
        return stop - start if self.divides else self.batch

    def weigh(self, share: BatchShare, batch: Any) -> BatchShare:
        """Weigh a full batch that a loader process has cut, which cannot say what it is of the script's batch."""
        if not (share.is_dealt and self.is_apart and self.divides and self.batch):
            return share
        samples = next((len(tensor) for tensor in tensors_in(batch) if tensor.ndim), 0)
        is_full = samples == self.local_batch()
        return replace(share, weight=samples * self.dealer.size / self.batch) if is_full else share


class DealtSampler:
    """Replaces a loader's sampler or batch sampler and draws what the current pass gives this worker."""

    def __init__(self, original: Any, dataset: Any, deal: LoaderDeal, streams: Streams) -> None:
        self._original = original
        self._dataset = dataset
        self._deal = deal
        self._streams = streams

    def __iter__(self) -> Iterator[Any]:
        deal = self._deal
        assert deal.now is not None
        if deal.is_apart:
            return (self._cut(batch) for batch in self._original)
        if deal.rests:
            return map(self._requested, deal.rests)
        # A sampler may draw its whole order here, before torch draws the loader's own seed, or when it is first asked.
        return self._draw(deal.now, None if deal.is_stream else iter(self._original))

    def _cut(self, batch: Any) -> Any:
        deal = self._deal
        assert deal.now is not None
        return batch[: max(1, deal.local_batch())] if deal.now.is_dealt and deal.batch is not None else batch

    def _draw(self, now: LoaderPass, drawn: Iterator[Any] | None) -> Iterator[Any]:
        # Of this pass, also when the script has begun another one over the same loader meanwhile.
        with self._streams.using(ALIKE):
            now.begin(self._batches(drawn))
        while True:
            with self._streams.using(ALIKE):  # the random stream that all workers share
                try:
                    share = now.draw()
                except StopIteration:
                    return
            yield self._requested(share)

    def __len__(self) -> int:
        count = len(self._original)
        is_dealt = self._deal.now is not None and self._deal.now.is_dealt
        return self._deal.dealer.count_batches(count) if is_dealt else count

    def _batches(self, drawn: Iterator[Any] | None) -> Iterator[Any]:
        deal = self._deal
        if drawn is None:
            numbered = enumerate(self._dataset)
            return (
                iter([item] for item in numbered) if deal.batch is None else cut(numbered, deal.batch, deal.drop_last)
            )
        return drawn if deal.is_batched or deal.has_lists else ([item] for item in drawn)

    def _requested(self, share: BatchShare) -> Any:
        """Return what the loader shall fetch."""
        deal = self._deal
        if deal.is_stream:
            deal.samples.extend(sample for _, sample in share.items)
            return [None] * len(share.items) if deal.batch is not None else None
        return share.items if deal.is_batched or deal.has_lists else share.items[0]


class DealtStream(IterableDataset[Any]):
    """Replaces an iterable dataset: yields what the sampler has drawn; in a loader process, it deals by itself."""

    def __init__(self, original: Any, deal: LoaderDeal) -> None:
        self.__dict__.update(_original=original, _deal=deal, _is_dealt=deal.now is not None and deal.now.is_dealt)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._original, name, value)

    def __getstate__(self) -> dict[str, Any]:
        # The pass stays behind: it holds iterators, and a process could not follow it anyway.
        deal: LoaderDeal = self._deal
        return {"_original": self._original, "_is_dealt": self._is_dealt, "_terms": (deal.dealer, deal.batch)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is None:
            waiting = self._deal.samples
            while waiting:
                yield waiting.popleft()
            return
        if not self._is_dealt:
            yield from self._original
            return
        dealer, batch = self.__dict__.get("_terms") or (self._deal.dealer, self._deal.batch)
        if batch is None:
            parts = dealer.items([item] for item in self._original)
        else:
            parts = dealer.batches(cut(self._original, batch, dealer.drop_last))
        # A loader process cannot report weights; a short end counts like a full batch.
        for part in parts:
            yield from part.items
