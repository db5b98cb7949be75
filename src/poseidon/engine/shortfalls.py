"""Parameters that got fewer gradients than they should, and errors about them in the words of torch's class.

People look these sentences up, and programs match them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from poseidon.errors import UnsupportedError

_BEGINNING = "Expected to have finished reduction in the prior iteration before starting a new one."


class Shortfalls:
    """Collects, from one forward to the next, the parameters that got no gradient in any backward, by number."""

    def __init__(self) -> None:
        self.forgotten: frozenset[int] | None = None
        """None: no backward yet."""

    def note(self, forgotten: Collection[int]) -> None:
        """Note which parameters got none in a backward; outputs of one forward may have a backward each."""
        self.forgotten = frozenset(forgotten) if self.forgotten is None else self.forgotten & frozenset(forgotten)

    def take_error(self, names: Sequence[str], is_static: bool, rank: int, step: int) -> UnsupportedError:
        """Return the error for what was noted, which is forgotten with it; ``names`` are those of all parameters."""
        forgotten, self.forgotten = self.forgotten or (), None
        make = _changed_error if is_static else _forgotten_error
        return make({number: names[number] for number in forgotten}, rank, step)


def _forgotten_error(names: Mapping[int, str], rank: int, step: int) -> UnsupportedError:
    """Return the error for parameters, by number, that got no gradient in a step."""
    return UnsupportedError(
        f"{_BEGINNING} {len(names)} parameter(s) got no gradient in step {step}. Either some outputs of forward() "
        "have no part in the loss: make sure that all `forward` function outputs participate in calculating loss. "
        "Or parameters are unused on purpose: say so by passing the keyword argument "
        "`find_unused_parameters=True`, or freeze them with requires_grad_(False) before wrapping.\n"
        f"{_shortfall(names, rank)}"
    )


def _changed_error(names: Mapping[int, str], rank: int, step: int) -> UnsupportedError:
    """Return the error for parameters of a static graph that got fewer gradients than in the first step."""
    return UnsupportedError(
        f"{_BEGINNING} This error "
        "indicates that your training graph has changed in this iteration, e.g., one parameter is used in first "
        "iteration, but then got unused in the second iteration. this is not compatible with static_graph set to "
        f"True. In step {step}, {len(names)} parameter(s) got fewer gradients than in the first; "
        f"remove static_graph.\n{_shortfall(names, rank)}"
    )


def _shortfall(names: Mapping[int, str], rank: int) -> str:
    numbers = sorted(names)
    return (
        f"Parameters which did not receive grad for rank {rank}: {', '.join(names[number] for number in numbers)}. "
        f"Parameter indices which did not receive grad for rank {rank}: {' '.join(map(str, numbers))}"
    )
