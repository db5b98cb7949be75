"""One booked slot: which of its sums are missing, and the rolls of the chunks owned here. Pure."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from poseidon.errors import ServerError
from poseidon.sums.arithmetic import Adder
from poseidon.sums.messages import all_sizes
from poseidon.sums.slots import Slot
from poseidon.sums.turns import PartRoll, TouchedRoll


class SlotLedger:
    """A slot as one rank of ``size`` sees it; call it under a lock."""

    def __init__(self, slot: Slot, adder: Adder, rank: int, size: int) -> None:
        self.slot = slot
        self.adder = adder
        owned = [chunk for chunk in slot.chunks if chunk.owner == rank]
        self.rolls = {chunk.index: PartRoll(chunk, slot.count_parts(size), adder.together) for chunk in owned}
        self.touched = {chunk.index: TouchedRoll(chunk, size) for chunk in owned if slot.width}
        self.sizes = all_sizes(slot.chunks, adder.layouts)
        """What every message is checked against, so made beforehand."""
        self.step = -1
        self.future: Future[Any]
        """Of the step under way."""
        self._missing: set[int] = set()
        """Chunks whose sums are not here."""

    @property
    def is_in_use(self) -> bool:
        """Whether a sum is under way here, or begun by another rank."""
        is_begun = any(roll.is_open for roll in self.rolls.values()) or any(
            roll.is_open for roll in self.touched.values()
        )
        return bool(self._missing) or is_begun

    def begin(self, step: int) -> Future[Any]:
        """Await the sums of ``step``."""
        if self._missing:
            raise ServerError(f"slot {self.slot.number} cannot start step {step}: step {self.step} is under way")
        self.step = step
        self.future = Future()
        self._missing = {chunk.index for chunk in self.slot.chunks}
        return self.future

    def awaits(self, index: int, step: int) -> bool:
        """Return whether the sum of a chunk is missing."""
        return index in self._missing and step == self.step

    def needs(self, rank: int) -> bool:
        """Return whether a part or a sum of another rank is missing."""
        return (
            any(self.slot.chunks[index].owner == rank for index in self._missing)
            or any(roll.lacks(rank) for roll in self.rolls.values())
            or any(roll.lacks(rank) for roll in self.touched.values())
        )

    def enter(self, index: int) -> bool:
        """Note that a sum is here; return whether it was the last one."""
        if index not in self._missing:  # the step was abandoned meanwhile
            return False
        self._missing.remove(index)
        return not self._missing

    def abandon(self) -> bool:
        """Await nothing more; return whether anything was awaited."""
        was_under_way = bool(self._missing)
        self._missing = set()
        return was_under_way
