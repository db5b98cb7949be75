"""Class and row numbers that are values of a blob, checked before they are used as indices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from poseidon.caffe.layers.base import Layer


def as_indices(layer: Layer, bottom_index: int, values: torch.Tensor, limit: int, what: str) -> torch.Tensor:
    """Return the values truncated to integers; any outside 0 to ``limit`` - 1 raises an error that names ``what``."""
    indices = values.long()
    if indices.numel():
        low, high = (int(bound) for bound in torch.aminmax(indices))
        if low < 0 or high >= limit:
            raise layer.error(
                f"{what} in {layer.param.bottom[bottom_index]!r} run from {low} to {high}, allowed are 0 to {limit - 1}"
            )
    return indices


def refuse_gradient(layer: Layer, propagate_down: Sequence[bool], bottom_index: int, what: str) -> None:
    """Raise if a gradient is requested for a bottom that cannot have one."""
    if bottom_index < len(propagate_down) and propagate_down[bottom_index]:
        raise layer.error(
            f"cannot backpropagate to the {what} in {layer.param.bottom[bottom_index]!r}; "
            f"set propagate_down: false for bottom {bottom_index}"
        )
