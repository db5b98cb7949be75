"""The last complete step in memory, from which a worker goes on when others are lost in the middle of the next one.

Tensors are copied on their device, each step into the same memory.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from poseidon.checkpoints.plain import like_mapping, like_sequence, own_value
from poseidon.checkpoints.shards import Dealt, ShardCopy


@dataclass
class Kept:
    """Everything after one step."""

    step: int
    parts: dict[str, Any]
    """The states that are equal on all workers."""
    own: dict[str, Any]
    """This worker's own."""
    values: dict[str, Any]
    shards: list[ShardCopy] = field(default_factory=list)
    """What only some workers have: this one's shards, and replicas of others'..."""
    dealt: dict[int, Dealt] = field(default_factory=dict)
    """... for each model of which that is so."""


class StepMemory:
    """Keeps the states of the last complete step. What is lent stays as it is, and the next step gets other memory."""

    def __init__(self) -> None:
        self.kept: Kept | None = None
        self._lent: Kept | None = None
        self._spare: Kept | None = None
        """Room for the next step while something is lent."""
        self._lock = threading.Lock()

    def keep(
        self,
        step: int,
        parts: Mapping[str, Any],
        own: Mapping[str, Any],
        values: Mapping[str, Any],
        shards: Sequence[ShardCopy] = (),
        dealt: Mapping[int, Dealt] | None = None,
    ) -> None:
        """Copy these states, but not the shards; nothing in them may wait for other workers any more."""
        with self._lock:
            # None meanwhile: a copy that fails half-way must not be gone on from.
            before, self.kept = self.kept, None
            if before is not None and before is self._lent:
                before, self._spare = self._spare, None
            if before is None:
                before = Kept(step, {}, {}, {})
            states = copy_over(parts, before.parts), copy_over(own, before.own), copy_over(values, {})
            self.kept = Kept(step, *states, [*shards], dict(dealt or {}))

    def adopt(self, kept: Kept) -> None:
        """Keep these states as they are; nobody else may change them."""
        with self._lock:
            self.kept = kept

    def forget(self) -> None:
        """Keep no step any more."""
        with self._lock:
            self.kept = None

    def lend(self) -> Kept | None:
        """Return states that stay as they are until :meth:`take_back`, the same to all who ask. Any thread."""
        with self._lock:
            if self._lent is None:
                self._lent = self.kept
            return self._lent

    def make_room(self) -> None:
        """Make room for the next step, which what is lent leaves none, so that training need not. Any thread."""
        with self._lock:
            lent = self._lent
            if lent is None or lent is not self.kept or self._spare is not None:
                return
        # Copied, not only allocated: it is the first touch of memory that takes time.
        spare = Kept(lent.step, copy_over(lent.parts, None), copy_over(lent.own, None), {})
        with self._lock:
            if self._lent is lent is self.kept:
                self._spare = spare

    def take_back(self) -> None:
        """Let what was lent be overwritten, or freed."""
        with self._lock:
            self._lent = self._spare = None


def copy_over(value: Any, old: Any) -> Any:
    """Return a copy of plain data and tensors, in the memory of an ``old`` copy where that fits."""
    if isinstance(value, Tensor):
        value = value.detach()
        fits = (
            isinstance(old, Tensor)
            and (old.shape, old.dtype, old.device) == (value.shape, value.dtype, value.device)
            and old.stride() == value.stride()
        )
        return old.copy_(value) if fits else value.clone()
    if isinstance(value, Mapping):
        known = old if isinstance(old, Mapping) else {}
        return like_mapping(value, {key: copy_over(item, known.get(key)) for key, item in value.items()})
    if isinstance(value, list | tuple):
        place = old if isinstance(old, list | tuple) and len(old) == len(value) else [None] * len(value)
        items = [copy_over(item, was) for item, was in zip(value, place, strict=True)]
        return like_sequence(value, items)
    return own_value(value)
