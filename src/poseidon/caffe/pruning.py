"""Which layers need a backward pass, and for which bottoms (pure; works on numbers and names only)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class LayerNeeds:
    """The needs of one layer, from the forward walk; :func:`prune` corrects them on the walk back."""

    tops: Sequence[str]
    bottoms: Sequence[str]
    has_loss: Sequence[bool]
    """For each top, whether it carries a loss weight."""
    needs_backward: bool
    bottom_needs: list[bool]


def prune(layers: Sequence[LayerNeeds]) -> None:
    """Drop, in place, backward work that reaches no loss or that ``propagate_down: false`` cuts off."""
    under_loss: set[str] = set()
    cut_off: set[str] = set()
    for layer in reversed(layers):
        contributes = any(loss or top in under_loss for top, loss in zip(layer.tops, layer.has_loss, strict=True))
        if layer.needs_backward and all(top in cut_off for top in layer.tops):
            layer.needs_backward = False
            layer.bottom_needs = [False] * len(layer.bottom_needs)
        if not contributes:
            layer.needs_backward = False
        for index, bottom in enumerate(layer.bottoms):
            if contributes:
                under_loss.add(bottom)
            else:
                layer.bottom_needs[index] = False
            if not layer.bottom_needs[index]:
                cut_off.add(bottom)
