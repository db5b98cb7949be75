"""DataLoaders: each worker gets its part of every training batch, and evaluation sees everything.

Each iteration is a pass (``passes.py``), which begins with a guess and goes on by what its batches are used for
(``usage.py``). After a training pass the workers compare which samples each of them saw.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, SequentialSampler

from poseidon.auto.deals import DealtSampler, DealtStream, LoaderDeal, Place
from poseidon.auto.engines import Engines
from poseidon.auto.losses import END, PASS, SameLoss
from poseidon.auto.owners import living_leaves
from poseidon.auto.passes import LoaderPass, PassPurpose, find_miscount
from poseidon.auto.usage import Usage
from poseidon.errors import MismatchError
from poseidon.following.naming import find_name, find_place, is_called_by_keras, is_fetched_ahead
from poseidon.following.options import AutoOptions
from poseidon.following.patches import Patches
from poseidon.following.script_report import ScriptReport
from poseidon.following.streams import ALIKE, APART, Streams, WorkerSeeds
from poseidon.team.team import Team

_EVALUATION_WORDS = ("val", "test", "eval", "dev")


class Delivery:
    """Iterates over a loader for the script and follows each batch to its use."""

    def __init__(self, loaders: Loaders, loader: DataLoader[Any], deal: LoaderDeal, now: LoaderPass) -> None:
        self._loaders = loaders
        self._loader = loader
        self._deal = deal
        self._pass = now
        self._has_parted = now.is_dealt
        self._batches = loaders.open_batches(loader, deal)

    @property
    def is_under_way(self) -> bool:
        """Whether the script may still ask for batches."""
        return not self._pass.is_over and self._deal.now is self._pass

    def __iter__(self) -> Delivery:
        return self

    def __next__(self) -> Any:
        try:
            batch = self._fetch()
        except StopIteration:
            if self._pass.purpose is PassPurpose.OPEN and is_fetched_ahead():
                self._pass.lean()
            if not self._reads_on():
                self._loaders.end(self._deal, self._pass)
                raise
            batch = self._fetch()
        self._loaders.hand_over(self._deal, self._pass, batch, weakref.ref(self))
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_batches"], name)

    def _fetch(self) -> Any:
        self._has_parted |= self._pass.is_dealt
        # A stream draws its order from the same generator as its samples, which must stay equal on all workers.
        stream = APART if self._has_parted and not self._deal.is_stream else ALIKE
        with self._loaders.streams.using(stream):
            return next(self._batches)

    def _reads_on(self) -> bool:
        """Turn to what the other workers got, if the pass was not for training; return whether there is any."""
        if self._deal.now is not self._pass:
            return False
        self._deal.rests = self._pass.take_rests()
        if self._deal.rests:
            self._batches = self._loaders.open_batches(self._loader, self._deal)
        return bool(self._deal.rests)


class Loaders:
    """Begins each pass over each loader, and compares the workers' samples after it."""

    def __init__(
        self,
        team: Team,
        options: AutoOptions,
        engines: Engines,
        usage: Usage,
        streams: Streams,
        report: ScriptReport,
        same_loss: SameLoss | None = None,
    ) -> None:
        self._team = team
        self._same_loss = same_loss
        self._rank, self._size = team.rank, team.size
        self._options = options
        self._engines = engines
        self._usage = usage
        self.streams = streams
        self._report = report
        self._open: Callable[[DataLoader[Any]], Iterator[Any]] = DataLoader.__iter__
        self._deals: weakref.WeakKeyDictionary[DataLoader[Any], LoaderDeal] = weakref.WeakKeyDictionary()
        self._unsettled: list[LoaderDeal] = []
        self._thread = threading.get_ident()
        """The script's own thread."""
        self._deliveries: weakref.WeakSet[Delivery] = weakref.WeakSet()

    def install(self, patches: Patches) -> None:
        """Install the hooks."""
        patches.wrap(DataLoader, "__iter__", self._iterate)
        patches.wrap(DataLoader, "__len__", self._count)
        self.streams.before_seeding = self._before_seeding

    def conclude(self) -> None:
        """Compare the passes that the script did not finish. Collective."""
        if self._same_loss is not None:
            self._same_loss.announce(END)
        for deal in self._unsettled:
            self._compare(deal)
        self._unsettled.clear()

    # For a delivery.

    def open_batches(self, loader: DataLoader[Any], deal: LoaderDeal) -> Iterator[Any]:
        """Make torch's own iterator over what the current pass gives this worker."""
        is_more = bool(deal.rests)
        deal.drop_stale_processes(loader)
        with _unchanged(loader.generator if is_more else None), _standing_in(loader, deal, self.streams, self._rank):
            if is_more:
                with self.streams.untouched():
                    return self._open(loader)
            with self.streams.using(ALIKE):
                return self._open(loader)

    def hand_over(self, deal: LoaderDeal, now: LoaderPass, batch: Any, delivery: weakref.ref[Delivery]) -> None:
        """Note that the script gets a batch."""
        share = deal.weigh(now.hand_over(), batch)
        if share.is_dealt:
            self.streams.part()
            self._engines.look_for_strangers()
        self._usage.hand(now, share, batch, lambda: delivery() is not None or now.is_over)
        if now.purpose is not PassPurpose.OPEN:
            self._tell(deal, now)

    def end(self, deal: LoaderDeal, now: LoaderPass) -> None:
        """Note that a pass is over. Collective if it was for training."""
        now.is_over = True
        if self._usage.end(now):
            # Between passes scripts decide, and build their next model: all workers draw the same, as one would.
            self.streams.rejoin()
        if deal.now is not now:
            return  # the script has begun another pass over the same loader
        # A thread that fetches ahead is not where the script is: the workers compare when the next pass begins.
        if now.purpose is PassPurpose.TRAINING and threading.get_ident() == self._thread:
            self._compare(deal)
        self._tell(deal, now)

    # Inside.

    def _iterate(self, original: Callable[..., Iterator[Any]], loader: DataLoader[Any]) -> Iterator[Any]:
        if is_called_by_keras() or self._usage.is_forked:
            return original(loader)
        self._open = original
        deal = self._deal_of(loader)
        self._compare(deal)
        name, place = find_name(loader) or "a loader", find_place()
        deals = self._guess(loader, deal, name, place)
        now = deal.begin(deals, name, place)
        if deal not in self._unsettled:
            self._unsettled.append(deal)
        if deals:
            self.streams.part()
        elif name in self._options.whole or not torch.is_grad_enabled():
            now.read()
        if deal.is_apart:
            self._tell(deal, now)
        delivery = Delivery(self, loader, deal, now)
        self._deliveries.add(delivery)
        return delivery

    def _before_seeding(self) -> None:
        """Rejoin the random streams if the script seeds after leaving its passes early: it begins something new."""
        gc.collect()  # an unreachable iterator may already be freed on one worker and not yet on another
        if not any(delivery.is_under_way for delivery in self._deliveries):
            self.streams.rejoin()

    def _compare(self, deal: LoaderDeal) -> None:
        """Compare which samples the workers saw in the last pass. Collective if it was for training."""
        now = deal.now
        if now is None or deal.is_compared:
            return
        deal.is_compared = True
        deal.remember()
        if now.is_unused and now.is_glance:
            self._report.say(
                f"{deal.name}: a batch was looked at, and no backward followed: each worker saw only its part of it "
                f"(--whole {deal.name} gives everybody all of it, and divides nothing)"
            )
        elif now.is_unused:
            raise MismatchError(
                f"{deal.name} was dealt out, and no backward followed: each worker used only its part of the samples. "
                f"If it is not for training, run with --whole {deal.name}"
            )
        if now.purpose is PassPurpose.TRAINING and not deal.is_apart:
            if self._same_loss is not None:
                self._same_loss.announce(PASS)
            rows = self._team.gather_ints([self.streams.mark(), *now.account()], f"the samples seen in {deal.name}")
            if (miscount := find_miscount([account for _, *account in rows])) is not None:
                raise MismatchError(f"{deal.name}: {miscount}")
            if len({mark for mark, *_ in rows}) > 1:
                self._go_on_alike()

    def _go_on_alike(self) -> None:
        """Draw from now on what worker 0 draws: the script drew more often on some workers. Collective."""
        self._report.say(
            "the script drew more random numbers (random, numpy) on some workers than on others, one for each of its "
            "own tokens, say: all go on with worker 0's"
            + (", so --batch total is not exact here" if self._options.batch == "total" else "")
        )
        self.streams.go_on_from(self._team.gather_bytes(self.streams.alike_as_bytes(), "worker 0's random numbers")[0])

    def _count(self, original: Callable[..., int], loader: DataLoader[Any]) -> int:
        count = original(loader)
        if is_called_by_keras() or self._usage.is_forked:
            return count
        deal = self._deal_of(loader)
        if deal.now is not None:
            is_dealt = deal.now.is_dealt if deal.now.purpose is not PassPurpose.READING else deal.has_trained
        else:
            is_dealt = self._guess(loader, deal, find_name(loader) or "", ())
        if not is_dealt:
            return count
        if deal.is_stream and deal.batch is not None:
            samples = len(loader.dataset)  # type: ignore[arg-type]
            block = deal.batch * (1 if deal.divides else self._size)
            return samples // block if deal.drop_last else -(-samples // block)
        return deal.dealer.count_batches(count)

    def _deal_of(self, loader: DataLoader[Any]) -> LoaderDeal:
        if loader not in self._deals:
            self._deals[loader] = LoaderDeal(loader, self._rank, self._size, self._options)
        return self._deals[loader]

    def _guess(self, loader: DataLoader[Any], deal: LoaderDeal, name: str, place: Place) -> bool:
        """Guess whether the batches of a pass will be trained on. A wrong guess costs time, or order, not samples."""
        if name in self._options.whole or not torch.is_grad_enabled():
            return False
        before = deal.recall(place)
        if before is not None:
            return before
        roots = self._engines.roots
        is_evaluating = bool(roots) and not any(root.training for root in roots)
        if name in self._options.deal:
            return not is_evaluating or not self._usage.has_trained or deal.has_trained
        is_in_order = deal.is_stream or _is_in_order(loader)
        if is_in_order and _sounds_like_evaluation(name):
            return False
        if place and not roots and not self._engines.has_optimizer and next(living_leaves(), None) is None:
            return False
        # Models from a library may be in eval mode until the first step.
        return not is_evaluating or (not is_in_order and not self._usage.has_trained)

    def _tell(self, deal: LoaderDeal, now: LoaderPass) -> None:
        try:
            samples = len(deal.count_source)  # type: ignore[arg-type]
        except TypeError:
            samples = None
        name = deal.name
        count = "" if samples is None else f"{samples:,} samples"
        if now.purpose is not PassPurpose.TRAINING and not now.is_dealt:
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


class _unchanged:  # noqa: N801 - reads as a statement in `with`
    """Restores a generator, if there is one, to its state at the beginning."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self._generator = generator
        self._state = None if generator is None else generator.get_state()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if self._generator is not None and self._state is not None:
            self._generator.set_state(self._state)


class _standing_in:  # noqa: N801 - reads as a statement in `with`
    """Puts our sampler and dataset into a loader while an iterator is created from it."""

    def __init__(self, loader: DataLoader[Any], deal: LoaderDeal, streams: Streams, rank: int) -> None:
        self._fields = loader.__dict__
        field = "batch_sampler" if deal.is_batched else "sampler"
        self._ours: dict[str, Any] = {field: DealtSampler(self._fields[field], loader.dataset, deal, streams)}
        if deal.is_stream:
            self._ours["dataset"] = DealtStream(loader.dataset, deal)
        else:
            self._ours["worker_init_fn"] = WorkerSeeds(
                rank if deal.now is not None and deal.now.is_dealt else 0, loader.worker_init_fn
            )
        self._before = {name: self._fields[name] for name in self._ours}

    def __enter__(self) -> None:
        # Not by assignment: a loader does not allow replacing its sampler.
        self._fields.update(self._ours)

    def __exit__(self, *_: object) -> None:
        self._fields.update(self._before)


def _is_in_order(loader: DataLoader[Any]) -> bool:
    """Whether a loader does not shuffle, as far as can be seen; a batch sampler has its own sampler, or none."""
    by_batches = loader.batch_sampler
    return isinstance(loader.sampler if by_batches is None else getattr(by_batches, "sampler", None), SequentialSampler)


def _sounds_like_evaluation(name: str) -> bool:
    return any(word in name.lower() for word in _EVALUATION_WORDS)
