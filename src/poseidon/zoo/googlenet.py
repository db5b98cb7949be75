"""GoogLeNet (Inception-V1) with batch normalisation, without its two auxiliary heads.

The layout is the one in common use with PyTorch: the third branch of every block has a 3x3 kernel where the
paper has 5x5.
"""

from __future__ import annotations

from torch import nn

from poseidon.zoo.branching import Conv, Fork, MaxPool, Stack, classifier
from poseidon.zoo.network import Sizes, Task


def googlenet(sizes: Sizes) -> tuple[nn.Module, Task]:
    """Return GoogLeNet: nine blocks of four branches."""
    return classifier(_LAYERS, sizes)


def _block(plain: int, second: tuple[int, int], third: tuple[int, int], pooled: int) -> Fork:
    """Return a block from its branches' channels: 1x1; 1x1 then 3x3, twice over; pooling then 1x1."""
    return Fork(
        (
            (Conv(plain),),
            (Conv(second[0]), Conv(second[1], (3, 3))),
            (Conv(third[0]), Conv(third[1], (3, 3))),
            (MaxPool(3, stride=1, padding=1, ceil=True), Conv(pooled)),
        )
    )


_LAYERS: Stack = (
    Conv(64, (7, 7), stride=2),
    MaxPool(ceil=True),
    Conv(64),
    Conv(192, (3, 3)),
    MaxPool(ceil=True),
    _block(64, (96, 128), (16, 32), 32),
    _block(128, (128, 192), (32, 96), 64),
    MaxPool(ceil=True),
    _block(192, (96, 208), (16, 48), 64),
    _block(160, (112, 224), (24, 64), 64),
    _block(128, (128, 256), (24, 64), 64),
    _block(112, (144, 288), (32, 64), 64),
    _block(256, (160, 320), (32, 128), 128),
    MaxPool(2, ceil=True),
    _block(256, (160, 320), (32, 128), 128),
    _block(384, (192, 384), (48, 128), 128),
)
