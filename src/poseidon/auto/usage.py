"""Which batches the script uses for what: forwards and backwards are attributed to the passes that gave the batches.

A batch is recognised by its tensors when they reach a module. Where they do not (a copy on another device, a script
that calls no module) its time decides. Loops that fetch batches ahead of their use, as Accelerate's loaders do, thus
get the weight of the batch they use, not of the last one fetched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from poseidon.auto.passes import BatchShare, LoaderPass, PassPurpose
from poseidon.auto.step import ScriptStep
from poseidon.engine.outputs import tensors_in
from poseidon.errors import UnsupportedError
from poseidon.following.patches import Patches
from poseidon.following.script_report import ScriptReport

_KEPT = 256
"""Batches that a script may fetch ahead of their use."""


@dataclass(eq=False)
class HandedBatch:
    """A batch that the script has and, as far as known, has not finished with."""

    source: LoaderPass
    share: BatchShare
    tensors: tuple[weakref.ref[Tensor], ...]
    samples: int
    values: int
    is_alive: Callable[[], bool]
    """Whether the iteration that gave it still exists."""
    is_found: bool = False
    """Whether a module has used it with gradients on since the last backward."""
    is_used: bool = False
    """Whether a backward has followed it."""
    is_read: bool = False
    """Whether a module has used it without gradients, though it may be a part of a training step."""

    @property
    def is_kept(self) -> bool:
        """Whether the script still has it."""
        return any(tensor() is not None for tensor in self.tensors)


class Usage:
    """Follows batches from the loaders to backward."""

    def __init__(self, step: ScriptStep, report: ScriptReport) -> None:
        self._step = step
        self._report = report
        self._handed: list[HandedBatch] = []
        self._latest: HandedBatch | None = None
        self._current: HandedBatch | None = None
        self._given: weakref.WeakKeyDictionary[LoaderPass, list[HandedBatch]] = weakref.WeakKeyDictionary()
        self._kept: list[HandedBatch] = []
        self._turn = 0
        """Which of the kept batches comes next, if they come in their order."""
        self._watching: RemovableHandle | None = None
        self._is_next_known = False
        """Whether a module has been called since the last backward."""
        self.has_trained = False
        """Whether any backward has followed a batch."""
        self.is_recognised = False
        """Whether a module was seen to use what the current backward is of."""
        self.before_pass: Callable[[], None] = lambda: None
        """Called before the script gets the first batch of a pass."""
        self._begun: weakref.WeakSet[LoaderPass] = weakref.WeakSet()

    @property
    def is_forked(self) -> bool:
        """Whether the script itself has started this process."""
        return self._step.is_forked

    def install(self, patches: Patches) -> None:
        """Undo with the other patches."""
        patches.on_undo(self._stop_watching)

    def hand(self, source: LoaderPass, share: BatchShare, batch: Any, is_alive: Callable[[], bool]) -> None:
        """Note that the script gets a batch."""
        if source not in self._begun:
            self._begun.add(source)
            self.before_pass()
        tensors = tensors_in(batch)
        samples = next((len(tensor) for tensor in tensors if tensor.ndim), 0)
        values = sum(tensor.numel() for tensor in tensors)
        handed = HandedBatch(source, share, tuple(map(weakref.ref, tensors)), samples, values, is_alive)
        if samples == 1 and share.is_dealt and share.portion is not None and share.portion.samples > 1:
            self._report.say(
                "a loader joins the samples of a batch into one row: where they see each other in it (attention "
                "without a mask), --batch total is not exact"
            )
        self._put_away(source)
        if any(one.source is source and one.is_read and not one.is_used for one in self._handed):
            source.read()  # and no backward followed
            self._put_away(source)
        if torch.is_grad_enabled():
            self._handed.append(handed)
        self._latest = handed
        self._hold(handed)
        if share.is_dealt:
            given = self._given.setdefault(source, [])
            given.append(handed)
            if len(given) > _KEPT:
                given[:] = [one for one in given if one.is_kept]
        self._watch()

    def end(self, source: LoaderPass) -> bool:
        """Note that a pass is over, and forget what it gave and was used; return whether all of it was."""
        self._put_away(source)
        # Batches that outlive their pass come again: itertools.cycle keeps them, each with its own weight.
        kept = [one for one in self._given.pop(source, []) if one.is_kept]
        self._kept = [*(one for one in self._kept if one.is_kept), *(kept if len(kept) > 1 else ())]
        self._turn = 0
        if self._current is not None and self._current.source is source and self._current.is_used:
            self._current = None
            self._step.forget()
        return not any(handed.source is source for handed in self._handed)

    def begin_backward(self) -> None:
        """Note which passes are for training, and set the step's weight."""
        found = [handed for handed in self._handed if handed.is_found]
        waiting = [handed for handed in self._handed if not handed.is_used and handed.is_alive()]
        used = found or self._oldest(waiting)
        self.is_recognised = bool(found)
        self._is_next_known = False
        self._refuse_collected(used)
        for handed in used:
            handed.is_used = True
            self._train(handed)
        for handed in waiting:
            # Nothing else tells about a second loader whose batches reach no module themselves.
            if handed.source.purpose is PassPurpose.OPEN and handed.source.is_dealt:
                self._train(handed)
        if used:
            self._hold(used[-1])
            if len({handed.share.weight for handed in used}) > 1:
                self._report.say(
                    "batches of different weight meet in one backward; the last one's weight counts, so the mean is "
                    "not exact where a batch does not divide evenly"
                )
        for handed in self._handed:
            handed.is_found = False
        self._watch()

    # Inside.

    def _refuse_collected(self, used: Sequence[HandedBatch]) -> None:
        """Raise if a script trains on batches that it took out of a loader before anything was known of their use."""
        batches = used or ([self._latest] if self._latest is not None and not self.has_trained else [])
        for handed in batches:
            name = handed.source.name
            if handed.source.is_collected:
                raise UnsupportedError(
                    f"{name} was read to its end before the first of its batches was used, and now a backward follows: "
                    "each worker got its own part first and the others' behind it, so that they would train on all "
                    f"samples, in orders of their own. Loop over {name} where you train, or run with --whole {name}, "
                    "which gives every worker all batches in the script's order (same result, nothing is divided)"
                )

    def _find_again(self, tensors: Sequence[Tensor]) -> HandedBatch | None:
        """Find a batch that outlived its pass: by its tensors or, if these are copies, the next of as many samples."""
        again = _recognise(tensors, self._kept)
        is_waiting = any(not one.is_used for one in self._handed)
        if again is not None or self._is_next_known or is_waiting or not torch.is_grad_enabled():
            return again
        sizes = {len(tensor) for tensor in tensors if tensor.ndim}
        count = len(self._kept)
        for place in (place % count for place in range(self._turn, self._turn + count)):
            if self._kept[place].is_kept and self._kept[place].samples in sizes:
                self._turn = place + 1
                return self._kept[place]
        return None

    def _oldest(self, waiting: Sequence[HandedBatch]) -> list[HandedBatch]:
        """Choose what a backward belongs to if no module was seen to use a batch."""
        if not waiting:
            return []
        known = [handed for handed in waiting if handed.source.purpose is PassPurpose.TRAINING]
        last = (known or waiting)[-1]
        return [handed for handed in waiting if handed.source is last.source][:1]

    def _train(self, handed: HandedBatch) -> None:
        if handed.source.purpose is not PassPurpose.TRAINING:
            handed.source.train()
            if not handed.source.is_dealt:
                self._report.say(
                    "training on a stream that every worker's loader processes read as a whole saves no work; "
                    "--deal NAME deals it out"
                )
        self.has_trained = True

    def _hold(self, handed: HandedBatch) -> None:
        self._current = handed
        step, share = self._step, handed.share
        step.weight = share.weight
        step.samples, step.values = handed.samples, handed.values
        step.is_shared = share.is_common and not share.is_dealt
        step.has_dealt |= share.is_dealt
        step.is_dealt = share.is_dealt
        step.portion = share.portion

    def _is_within_step(self, used: HandedBatch) -> bool:
        """Whether a batch used without gradients may be a part of the training step at hand, as a teacher's is.

        It may, if it is the pass's only one since the last backward, and another loader's batch waits for a backward.
        """
        waiting = [one for one in self._handed if not one.is_used and one.is_alive()]
        mine = [one for one in waiting if one.source is used.source]
        return used.source.is_dealt and mine == [used] and len(waiting) > 1

    def _put_away(self, source: LoaderPass) -> None:
        """Forget the batches of a pass that were used, and those before them."""
        if source.purpose is PassPurpose.READING:
            self._handed = [one for one in self._handed if one.source is not source]
            return
        places = [place for place, one in enumerate(self._handed) if one.source is source and one.is_used]
        last = places[-1] if places else -1
        kept = [
            one
            for place, one in enumerate(self._handed)
            if (one.source is not source or place > last) and (one.is_found or one.is_alive())
        ]
        self._handed = kept[-_KEPT:]

    def _watch(self) -> None:
        """Look at the modules' inputs while it is open what a batch is for, or which one is in use."""
        is_open = any(one.source.purpose is PassPurpose.OPEN for one in self._handed)
        is_wanted = is_open or len(self._handed) > 1 or bool(self._kept)
        if is_wanted and self._watching is None:
            self._watching = register_module_forward_pre_hook(self._before_forward)
        elif self._watching is not None and not is_wanted:
            self._stop_watching()

    def _stop_watching(self) -> None:
        if self._watching is not None:
            self._watching.remove()
            self._watching = None

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or self._latest is None or self._step.is_forked:
            return
        tensors = tensors_in(args)
        handed = _recognise(tensors, self._handed)
        if handed is None and self._kept and (again := self._find_again(tensors)) is not None:
            self._handed = [one for one in self._handed if not one.is_used]
            handed = replace(again, is_used=False, is_found=False)
            self._handed.append(handed)
            self._hold(handed)
        self._is_next_known = True
        if not torch.is_grad_enabled():
            used = handed or self._latest
            used.is_read = self._is_within_step(used)
            if not used.is_read:
                used.source.read()
        elif handed is not None:
            handed.is_found = True
            if handed.source.purpose is PassPurpose.OPEN and module.training:
                handed.source.lean()


def _recognise(tensors: Sequence[Tensor], batches: Sequence[HandedBatch]) -> HandedBatch | None:
    """Find the batch that one of the tensors, or what it is a view of, came with."""
    for tensor in tensors:
        for handed in batches:
            if any(known() is tensor for known in handed.tensors):
                return handed
    starts = {_start(tensor) for tensor in tensors} - {0}
    for handed in batches:
        if any(_start(known()) in starts for known in handed.tensors):
            return handed
    return None


def _start(tensor: Tensor | None) -> int:
    """Return where a tensor's data begins, or 0 if it has none."""
    if tensor is None or type(tensor) not in (Tensor, nn.Parameter):
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # torch.func's wrappers have no data of their own
        return 0
