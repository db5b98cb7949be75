"""How gradients become updates: one rule per solver type, on many tensors at once.

A rule turns gradients into the amounts that are subtracted from the parameters, in place, and keeps one or two
histories per parameter. What all rules share (clipping, ``iter_size``, weight decay) happens first, in ``updater.py``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from poseidon.caffe.schema import SolverParameter
from poseidon.errors import ConfigError

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class ParameterBatch:
    """Parameters with the same multipliers, updated together."""

    diffs: Tensors
    """Gradients, which become updates."""
    histories: list[Tensors]
    """As many lists as the rule keeps histories, each in the order of ``diffs``."""
    rate: float
    iteration: int


class Rule(ABC):
    """The rule of one solver type; ``param`` holds its settings."""

    histories: ClassVar[int] = 1
    """How many histories it keeps per parameter."""

    def __init__(self, param: SolverParameter) -> None:
        self.param = param
        self.momentum: float = param.momentum
        self.delta: float = param.delta

    @abstractmethod
    def apply(self, batch: ParameterBatch) -> None:
        """Turn the batch's gradients into updates."""

    def _refuse_momentum(self, name: str) -> None:
        if self.momentum:
            raise ConfigError(f"momentum is {self.momentum:g}, but {name} uses none; remove it from the solver")


class SGD(Rule):
    """Stochastic gradient descent with momentum."""

    def apply(self, batch: ParameterBatch) -> None:
        """Add the gradients to the decayed history; the history is the update."""
        diffs, (history,) = batch.diffs, batch.histories
        torch._foreach_mul_(history, self.momentum)
        torch._foreach_add_(history, diffs, alpha=batch.rate)
        torch._foreach_copy_(diffs, history)


class Nesterov(Rule):
    """Nesterov's accelerated gradient."""

    def apply(self, batch: ParameterBatch) -> None:
        """Update by the momentum looked ahead one step."""
        diffs, (history,) = batch.diffs, batch.histories
        torch._foreach_mul_(diffs, batch.rate)
        torch._foreach_mul_(history, self.momentum)
        torch._foreach_add_(history, diffs)
        # (1 + m) h' - m h with h' = m h + g is the same as m h' + g, and needs no copy of h.
        torch._foreach_add_(diffs, history, alpha=self.momentum)


class AdaGrad(Rule):
    """Rates that shrink with the sum of all squared gradients."""

    def __init__(self, param: SolverParameter) -> None:
        super().__init__(param)
        self._refuse_momentum("AdaGrad")

    def apply(self, batch: ParameterBatch) -> None:
        """Divide by the root of the sum of squares."""
        diffs, (squares,) = batch.diffs, batch.histories
        torch._foreach_addcmul_(squares, diffs, diffs, value=1.0)
        _divide_by_root(diffs, squares, self.delta)
        torch._foreach_mul_(diffs, batch.rate)


class RMSProp(Rule):
    """Rates that follow a moving average of squared gradients."""

    def __init__(self, param: SolverParameter) -> None:
        super().__init__(param)
        self._refuse_momentum("RMSProp")
        self._decay: float = param.rms_decay
        if not 0 <= self._decay < 1:
            raise ConfigError(f"rms_decay is {self._decay:g}; RMSProp needs one from 0 to below 1")

    def apply(self, batch: ParameterBatch) -> None:
        """Divide by the root of the moving average."""
        diffs, (squares,) = batch.diffs, batch.histories
        _average_squares(squares, diffs, self._decay)
        _divide_by_root(diffs, squares, self.delta)
        torch._foreach_mul_(diffs, batch.rate)


class AdaDelta(Rule):
    """Updates in the units of the parameters, from averages of squared gradients and squared updates."""

    histories = 2

    def apply(self, batch: ParameterBatch) -> None:
        """Scale by the ratio of the two roots."""
        diffs, (squares, squared_updates) = batch.diffs, batch.histories
        _average_squares(squares, diffs, self.momentum)
        ratio = torch._foreach_add(squared_updates, self.delta)
        torch._foreach_div_(ratio, torch._foreach_add(squares, self.delta))
        torch._foreach_sqrt_(ratio)
        torch._foreach_mul_(diffs, ratio)
        _average_squares(squared_updates, diffs, self.momentum)
        torch._foreach_mul_(diffs, batch.rate)


class Adam(Rule):
    """First and second moments, corrected for their start at zero."""

    histories = 2

    def apply(self, batch: ParameterBatch) -> None:
        """Divide the first moment by the root of the second."""
        diffs, (first, second) = batch.diffs, batch.histories
        beta1, beta2 = self.momentum, self.param.momentum2
        torch._foreach_mul_(first, beta1)
        torch._foreach_add_(first, diffs, alpha=1 - beta1)
        _average_squares(second, diffs, beta2)
        torch._foreach_copy_(diffs, first)
        _divide_by_root(diffs, second, self.delta)
        time = batch.iteration + 1
        torch._foreach_mul_(diffs, batch.rate * math.sqrt(1 - beta2**time) / (1 - beta1**time))


RULES: dict[str, type[Rule]] = {rule.__name__: rule for rule in (SGD, Nesterov, AdaGrad, RMSProp, AdaDelta, Adam)}
"""The rules by ``type`` in a solver's prototxt."""


def _average_squares(averages: Tensors, values: Tensors, decay: float) -> None:
    torch._foreach_mul_(averages, decay)
    torch._foreach_addcmul_(averages, values, values, value=1 - decay)


def _divide_by_root(values: Tensors, squares: Tensors, delta: float) -> None:
    roots = torch._foreach_sqrt(squares)
    torch._foreach_add_(roots, delta)
    torch._foreach_div_(values, roots)
