"""The roll call: what every worker says at the beginning of a backward, so that nobody waits for what will not come.

It travels while backward goes on and is read at the end. A worker that is out of step is named then. Pure.
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
    """Every unit takes the first route it can, because gradients were accumulated or nothing is planned yet."""
    batch: int
    """Values in the inputs of this step, which stand for the size of the batch."""
    is_joined: bool = False
    """This worker has run out of input and only takes part so that the others can go on."""
    used: tuple[bool, ...] = ()
    """By parameter: whether it will get a gradient here. Empty where every parameter must."""

    def words(self) -> list[int]:
        """Return what travels."""
        return [self.step, int(self.is_dense), self.batch, int(self.is_joined), *map(int, self.used)]

    @classmethod
    def from_words(cls, words: Sequence[int]) -> RollCall:
        """Read what arrived."""
        step, is_dense, batch, is_joined, *used = words
        return cls(step, bool(is_dense), batch, bool(is_joined), tuple(map(bool, used)))

    def check(self, other: RollCall, rank: int, other_rank: int) -> None:
        """Raise :class:`MismatchError` if the two workers are about to exchange different things."""
        if self.step != other.step:
            raise MismatchError(
                f"rank {rank} is in backward {self.step}, rank {other_rank} in backward {other.step}: some worker "
                "skipped or repeated one; give all workers equally many batches, or use join()"
            )
        if self.is_dense != other.is_dense and not (self.is_joined or other.is_joined):
            raise MismatchError(
                f"rank {rank} {self._says()} before backward {self.step}, rank {other_rank} {other._says()}: "
                "use no_sync() on all workers alike"
            )

    def _says(self) -> str:
        return "had gradients from no_sync()" if self.is_dense else "had none from no_sync()"
