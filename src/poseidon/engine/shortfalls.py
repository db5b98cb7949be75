"""Parameters that got fewer gradients than they should, and errors about them in the words of torch's class.

People look these sentences up, and programs match them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from poseidon.engine.step import Step
from poseidon.errors import UnsupportedError

_BEGINNING = "Expected to have finished reduction in the prior iteration before starting a new one."


class Shortfalls:
    """Collects, from one forward to the next, the parameters that got no gradient in any backward, by number.

    ``names`` are those of all parameters.
    """

    def __init__(self, rank: int, names: Sequence[str]) -> None:
        self._rank = rank
        self._names = names
        self.forgotten: frozenset[int] | None = None
        """None: no backward yet."""

    def note(self, forgotten: Collection[int]) -> None:
        """Note which parameters got none in a backward; outputs of one forward may have a backward each."""
        self.forgotten = frozenset(forgotten) if self.forgotten is None else self.forgotten & frozenset(forgotten)

    def take_error(self, is_static: bool, step: int) -> UnsupportedError:
        """Return the error for what was noted, which is forgotten with it."""
        short, self.forgotten = self.forgotten or frozenset(), None
        if is_static:
            return UnsupportedError(
                f"{self._changed(short)}\nIn step {step}, {len(short)} parameter(s) got fewer gradients than in the "
                "first; remove static_graph"
            )
        return UnsupportedError(
            f"{_BEGINNING} {len(short)} parameter(s) got no gradient in step {step}. Either some outputs of forward() "
            "have no part in the loss: make sure that all `forward` function outputs participate in calculating loss. "
            "Or parameters are unused on purpose: say so by passing the keyword argument "
            "`find_unused_parameters=True`, or freeze them with requires_grad_(False) before wrapping.\n"
            f"{self._listed(short)}\n(torch's class names them only if you set the environment variable "
            "TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL)"
        )

    def interrupted(self, step: Step, is_static: bool) -> UnsupportedError:
        """Return the error for a forward after a backward that an error has ended in its middle."""
        text = (
            f"rank {self._rank}: backward {step.number} was interrupted by an error, so the replicas may differ; "
            "restart from a checkpoint"
        )
        return UnsupportedError(f"{self._changed(step.unfinished)}\n{text}" if is_static else text)

    def _changed(self, short: Collection[int]) -> str:
        return (
            f"{_BEGINNING} This error indicates that your training graph has changed in this iteration, e.g., one "
            "parameter is used in first iteration, but then got unused in the second iteration. this is not compatible "
            f"with static_graph set to True.\n{self._listed(short)}"
        )

    def _listed(self, short: Collection[int]) -> str:
        numbers = sorted(short)
        return (
            f"Parameter indices which did not receive grad for rank {self._rank}: {' '.join(map(str, numbers))}\n"
            f"Parameters which did not receive grad for rank {self._rank}: "
            f"{', '.join(self._names[number] for number in numbers)}"
        )
