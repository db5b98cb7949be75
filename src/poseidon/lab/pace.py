"""Paced compute: layers that take a given time while the CPU stays free.

On a few cores, several machines' worth of real computation would starve the communication being measured. A paced
model keeps its arithmetic, so results can still be compared, but gets little of it (a small batch), and waits for the
rest of the time a real device would need.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from poseidon.errors import ConfigError, unknown_name


def paced(
    model: nn.Module, forward_ms: float, backward_ms: float, shares: Mapping[str, float] | None = None
) -> nn.Module:
    """Make one forward pass of a model take ``forward_ms`` and one backward pass ``backward_ms``; return the model.

    The time is divided over the modules that own parameters: equally, or by ``shares`` (module name -> weight; modules
    not named take none). Each waits for its share, less the CPU time spent since the last wait; a layer's gradients
    appear after its backward share, in the usual order. This works for models on the CPU, as long as the real work
    takes less than the given time. Call it once, before wrapping the model.
    """
    if forward_ms < 0 or backward_ms < 0:
        raise ConfigError(f"a pass takes 0 ms or more, not {forward_ms} forward and {backward_ms} backward")
    layers = {name: module for name, module in model.named_modules() if _owns_parameters(module)}
    if not layers:
        raise ConfigError("a model without parameters has no layers to pace")
    clock = _Clock()
    model.register_forward_pre_hook(lambda *_: clock.restart())
    for name, fraction in _fractions(list(layers), shares).items():
        _pace_layer(layers[name], clock, fraction * forward_ms / 1e3, fraction * backward_ms / 1e3)
    return model


class _Clock:
    """Waits for given times, less the CPU time of the thread in between."""

    def __init__(self) -> None:
        self._worked_from_s = 0.0
        self._ahead_s = 0.0

    def restart(self) -> None:
        """Ignore the CPU time so far; it belonged to something else, such as the optimizer."""
        self._worked_from_s = time.thread_time()
        self._ahead_s = 0.0

    def spend(self, seconds: float) -> None:
        """Let ``seconds`` pass; excess work is deducted from the next waits."""
        left_s = seconds - self._ahead_s - (time.thread_time() - self._worked_from_s)
        self._ahead_s = max(0.0, -left_s)
        if left_s > 0:
            time.sleep(left_s)
        self._worked_from_s = time.thread_time()


def _pace_layer(layer: nn.Module, clock: _Clock, forward_s: float, backward_s: float) -> None:
    def after_forward(_module: nn.Module, _inputs: Any, output: Any) -> None:
        clock.spend(forward_s)
        # A hook on the output fires when its gradient is known, just before the layer's own backward; unlike a
        # module's backward hook it allows in-place changes of the output afterwards, as by ReLU.
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda *_: clock.spend(backward_s))
                break

    layer.register_forward_hook(after_forward)


def _fractions(names: list[str], shares: Mapping[str, float] | None) -> dict[str, float]:
    if shares is None:
        return {name: 1.0 / len(names) for name in names}
    for name, weight in shares.items():
        if name not in names:
            raise unknown_name("layer in shares", name, names)
        if weight < 0:
            raise ConfigError(f"the share of layer {name!r} is {weight}; it must not be negative")
    total = sum(shares.values())
    if total == 0:
        raise ConfigError("the shares of all layers add up to 0; give at least one layer some time")
    return {name: shares.get(name, 0.0) / total for name in names}


def _owns_parameters(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
