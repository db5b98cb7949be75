"""Steps that a worker takes on its own gradients: local steps, and those of bounded staleness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from poseidon.engine.optimizers import clip, parameters_of, plain_step, unscale
from poseidon.errors import UnsupportedError

_AMP = "_step_supports_amp_scaling"
"""Attribute of optimizers that a GradScaler lets decide whether to take a step."""


class OwnSteps:
    """Takes the steps of one optimizer, clipped if asked to, from :meth:`take_over` on.

    A step that a GradScaler skips is counted by whoever calls :meth:`step`: each worker's scaler finds infinite
    gradients in its own steps, and workers that count differently would wait for each other.
    """

    def __init__(self, optimizer: Optimizer, max_grad_norm: float | None) -> None:
        self._optimizer: Any = optimizer
        self._plain = type(optimizer)
        self._max_grad_norm = max_grad_norm
        self._knows_amp = False
        self._is_stepping = False
        self._own = frozenset(map(id, parameters_of(optimizer)))

    def take_over(self) -> Callable[[], None]:
        """Have a GradScaler call ``step()`` also where it finds infinite gradients; return what undoes it.

        From now on no other optimizer may step these parameters: nobody would exchange what it does.
        """
        attributes = self._optimizer.__dict__
        before = attributes.get(_AMP)
        self._knows_amp = bool(getattr(self._optimizer, _AMP, False))
        attributes[_AMP] = True
        handle = register_optimizer_step_pre_hook(self._refuse_others)

        def undo() -> None:
            handle.remove()
            if before is None:
                attributes.pop(_AMP, None)
            else:
                attributes[_AMP] = before

        return undo

    def step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take a step; ``parameters`` are those whose gradients are clipped together."""
        optimizer = self._optimizer
        if self._max_grad_norm is not None:
            clip(optimizer, parameters, self._max_grad_norm)
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and not self._knows_amp:
            unscale(optimizer)
            optimizer.found_inf = None
            if found_inf.item():
                return
        self._is_stepping = True
        try:
            plain_step(self._plain)(optimizer)
        finally:
            self._is_stepping = False

    def _refuse_others(self, optimizer: Optimizer, *_: object) -> None:
        # An optimizer of one's own may step others inside.
        if optimizer is self._optimizer or self._is_stepping:
            return
        if any(id(parameter) in self._own for parameter in parameters_of(optimizer)):
            raise UnsupportedError(
                f"{type(optimizer).__name__}.step() for parameters whose steps the distributed "
                f"{self._plain.__name__} takes: each worker would train alone, as only steps of that one are "
                "exchanged. Call its step(), or pass the other optimizer to poseidon.distribute instead"
            )
