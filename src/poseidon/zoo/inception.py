"""Inception-V3 without its auxiliary head: 48 layers, many branches, few dense parameters."""

from __future__ import annotations

from torch import nn

from poseidon.zoo.branching import Conv, Fork, MaxPool, MeanPool, Stack, classifier
from poseidon.zoo.network import Sizes, Task

_ROW, _COLUMN = (1, 7), (7, 1)
"""The two factors of a 7x7 kernel."""


def inception_v3(sizes: Sizes) -> tuple[nn.Module, Task]:
    """Return Inception-V3; images need at least 75 pixels."""
    return classifier(_LAYERS, sizes)


def _fine(pooled: int) -> Fork:
    """Return a block at 35x35; only the channels after the pooling differ between the three of them."""
    return Fork(
        (
            (Conv(64),),
            (Conv(48), Conv(64, (5, 5))),
            (Conv(64), Conv(96, (3, 3)), Conv(96, (3, 3))),
            (MeanPool(), Conv(pooled)),
        )
    )


def _middle(inner: int) -> Fork:
    """Return a block at 17x17 whose 7x7 convolutions have ``inner`` channels between their factors."""
    return Fork(
        (
            (Conv(192),),
            (Conv(inner), Conv(inner, _ROW), Conv(192, _COLUMN)),
            (Conv(inner), Conv(inner, _COLUMN), Conv(inner, _ROW), Conv(inner, _COLUMN), Conv(192, _ROW)),
            (MeanPool(), Conv(192)),
        )
    )


_TO_MIDDLE = Fork(
    (
        (Conv(384, (3, 3), stride=2, padded=False),),
        (Conv(64), Conv(96, (3, 3)), Conv(96, (3, 3), stride=2, padded=False)),
        (MaxPool(),),
    )
)

_TO_COARSE = Fork(
    (
        (Conv(192), Conv(320, (3, 3), stride=2, padded=False)),
        (Conv(192), Conv(192, _ROW), Conv(192, _COLUMN), Conv(192, (3, 3), stride=2, padded=False)),
        (MaxPool(),),
    )
)

_FORK = Fork(((Conv(384, (1, 3)),), (Conv(384, (3, 1)),)))

_COARSE = Fork(
    (
        (Conv(320),),
        (Conv(384), _FORK),
        (Conv(448), Conv(384, (3, 3)), _FORK),
        (MeanPool(), Conv(192)),
    )
)

_LAYERS: Stack = (
    Conv(32, (3, 3), stride=2, padded=False),
    Conv(32, (3, 3), padded=False),
    Conv(64, (3, 3)),
    MaxPool(),
    Conv(80),
    Conv(192, (3, 3), padded=False),
    MaxPool(),
    _fine(32),
    _fine(64),
    _fine(64),
    _TO_MIDDLE,
    _middle(128),
    _middle(160),
    _middle(160),
    _middle(192),
    _TO_COARSE,
    _COARSE,
    _COARSE,
)
