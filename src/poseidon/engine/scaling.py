"""Under ``join()``: means over the workers that still have input, made from means over all; and those without it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from poseidon.engine.step import Verdict
from poseidon.planning.route import Delivery
from poseidon.routes.base import LiveUnit

Gradients = dict[nn.Parameter, Tensor]


def copy_gradients(parameters: Sequence[nn.Parameter]) -> Gradients:
    """Return what gradients are before a backward."""
    return {p: p.grad.detach().clone() for p in parameters if p.grad is not None}


def scale_to_active(
    units: Sequence[LiveUnit],
    deliveries: Sequence[Delivery],
    number_of: Mapping[nn.Parameter, int],
    verdict: Verdict,
    before: Gradients,
) -> None:
    """Multiply what a backward has brought; ``before`` is what gradients were when it began."""
    factor = len(verdict.calls) / verdict.active
    for unit in units:
        for parameter in unit.parameters:
            if parameter.grad is None or not verdict.is_used(number_of[parameter]):
                continue
            # A short form was added to the mean that was here; a full gradient had that in it.
            old = None if deliveries[unit.index] == "gradients" else before.get(parameter)
            if old is None:
                parameter.grad.mul_(factor)
            else:
                parameter.grad.sub_(old).mul_(factor).add_(old)


@contextlib.contextmanager
def gradients_aside(parameters: Sequence[nn.Parameter], clones: bool) -> Iterator[None]:
    """Take all gradients away, and put them back; ``clones``: somebody may write to the memory of those in place."""
    kept = [parameter.grad for parameter in parameters]
    if clones:
        kept = [None if gradient is None else gradient.clone() for gradient in kept]
    for parameter in parameters:
        parameter.grad = None
    yield
    for parameter, gradient in zip(parameters, kept, strict=True):
        parameter.grad = gradient
