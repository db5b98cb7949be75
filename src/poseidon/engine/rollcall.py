"""The roll call: what every worker announces when a backward begins, so that nobody waits for data that never comes.

It travels during backward and is read at the end, when a worker that is out of step is named. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poseidon.errors import MismatchError


@dataclass(frozen=True)
class RollCall:
    """One worker's answer."""

    step: int
    is_dense: bool
    """Every unit takes the first route that accepts it: gradients were accumulated, or no plan exists yet."""
    batch: int
    """Number of values in this step's inputs, as a measure of batch size."""
    is_joined: bool = False
    """This worker has run out of input and takes part only so that the others can proceed."""
    digest: int = 0
    """A sum of the bits of some parameters, equal on equal replicas; 0: none in this step (``replicas.py``)."""
    changes: int = 0
    """How often parameters changed since the last backward."""
    asks: bool = False
    """This worker wants all parameters compared."""
    taken: int = 0
    """A sum of the steps that this worker took: after which backwards, with which options (``taken.py``)."""

    def words(self) -> list[int]:
        """Encode for the wire."""
        flags = int(self.is_dense) | int(self.is_joined) << 1 | int(self.asks) << 2
        return [self.step, flags, self.batch, self.digest, self.changes, self.taken]

    @classmethod
    def from_words(cls, words: Sequence[int]) -> RollCall:
        """Decode what :meth:`words` returned on another worker."""
        step, flags, batch, digest, changes, taken = words
        return cls(step, bool(flags & 1), batch, bool(flags & 2), digest, changes, bool(flags & 4), taken)

    def check(self, other: RollCall, rank: int, other_rank: int) -> None:
        """Raise :class:`MismatchError` if the two workers are about to exchange different things."""
        if self.step != other.step:
            raise MismatchError(
                f"rank {rank} is in backward {self.step}, rank {other_rank} in backward {other.step}: some worker "
                "skipped or repeated one; give all workers the same number of batches, or use join()"
            )
        if self.is_dense != other.is_dense and not (self.is_joined or other.is_joined):
            raise MismatchError(
                f"rank {rank} {self._says()} before backward {self.step}, rank {other_rank} {other._says()}: "
                "use no_sync() on all workers or on none"
            )
        if self.taken != other.taken and not (self.is_joined or other.is_joined):
            raise MismatchError(
                f"the optimizers of rank {rank} and rank {other_rank} took different steps before backward "
                f"{self.step}: one more often, with other options, or on gradients to which a backward without an "
                "exchange had added others. Call step() on all workers or on none, give them the same learning rates "
                "(a scheduler that follows a loss must see the mean over all workers), and let no backward under "
                "no_sync() follow the last one before a step"
            )

    def _says(self) -> str:
        return "had gradients from no_sync()" if self.is_dense else "had none from no_sync()"


_BITS = 62
"""Flags per word of 64 bits: the sign stays out of it."""


def pack_flags(flags: Sequence[bool]) -> list[int]:
    """Encode flags for the wire, many in a word."""
    parts = [flags[start : start + _BITS] for start in range(0, len(flags), _BITS)]
    return [sum(flag << place for place, flag in enumerate(part)) for part in parts]


def unpack_flags(words: Sequence[int], count: int) -> tuple[bool, ...]:
    """Decode ``count`` flags that :func:`pack_flags` encoded."""
    return tuple(bool(words[place // _BITS] >> place % _BITS & 1) for place in range(count))
