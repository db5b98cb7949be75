"""Scripts that accumulate gradients: with ``--accumulate`` their workers exchange once per step, not in every backward.

How many backwards a step has is learned from the first steps. The last of them is exchanged as usual, while it runs;
where a step has another number, the rest is exchanged when somebody asks for gradients: a clipping function, a
``GradScaler``, the optimizer. So it does not matter if the number changes, as at the end of an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from poseidon.engine.replicas import sum_of_bits

LEARNING_STEPS = 2
"""Every backward of these steps is exchanged; what happens between backwards then shows whether it must stay so."""

MOST_BACKWARDS = 1000
"""After so many without a step, nothing is learned any more: the script may step by itself."""

State = list[tuple[int, ...]]


class Group:
    """The backwards between two steps of an optimizer. Pure; the same on all workers."""

    def __init__(self, is_asked: bool) -> None:
        self.goes_each = False
        """Every backward is exchanged, for good."""
        self.is_pending = False
        """There are gradients of backwards that were not exchanged."""
        self._is_asked = is_asked
        self._count = 0
        self._steps = 0
        self._last = 0
        """Backwards of the last step."""
        self._usual = 0
        """Of most steps; 0 while they are learned."""

    @property
    def is_learning(self) -> bool:
        """Whether what the script does in this step decides if gradients may wait for the last backward."""
        return self._is_asked and not (self.goes_each or self._usual)

    def begins(self) -> bool:
        """Return whether the backward that begins now is exchanged."""
        return self.goes_each or not self._usual or self._count + 1 == self._usual

    def ended(self, is_exchanged: bool) -> None:
        """Count a backward that has reached the parameters."""
        self._count += 1
        self.is_pending = not is_exchanged
        if self._count > MOST_BACKWARDS and not self._usual:
            self.goes_each = True

    def flushed(self) -> None:
        """Note that what was pending has been exchanged."""
        self.is_pending = False

    def changed(self) -> bool:
        """Note that somebody has changed gradients, none of which is pending; return whether each is exchanged now."""
        self.goes_each = not self._usual
        self._count = 0
        return self.goes_each

    def stepped(self) -> int:
        """Note a step, which may be told twice; return how many backwards each has when that has just been learned."""
        count, self._count = self._count, 0
        if self.goes_each or not count:
            return 0
        self._steps += 1
        before = self._usual
        if self._steps == LEARNING_STEPS or (before and count == self._last):
            self._usual = count
        self._last = count
        if before or not self._usual:
            return 0
        self.goes_each = not self._is_asked
        return self._usual


def state_of(parameters: Sequence[Tensor], with_bits: bool = False) -> State:
    """Return what differs after somebody has changed parameters or their gradients.

    ``with_bits`` looks at all values, too: what is changed through ``.data`` keeps its version.
    """
    state: State = [
        (parameter._version, 0, 0)
        if (gradient := parameter.grad) is None
        else (parameter._version, id(gradient), gradient._version)
        for parameter in parameters
    ]
    if with_bits:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        values = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
        state.append((sum_of_bits(parameters), sum_of_bits(values)))
    return state
