"""The two small networks that ship with Caffe: LeNet for MNIST and the quick one for CIFAR-10.

Caffe rounds the output size of a pooling up, so ``ceil_mode`` is set throughout.
"""

from __future__ import annotations

import math

from torch import nn

from poseidon.zoo.images import Images
from poseidon.zoo.network import Sizes, Task


def lenet(sizes: Sizes) -> tuple[nn.Module, Task]:
    """Return LeNet: two convolutions without activation, two inner products with one ReLU between them."""
    first, second, hidden = sizes.scaled(20), sizes.scaled(50), sizes.scaled(500)
    side = _pooled(_pooled(sizes.image_size - 4, 2) - 4, 2)
    model = nn.Sequential(
        nn.Conv2d(1, first, 5),
        nn.MaxPool2d(2, 2, ceil_mode=True),
        nn.Conv2d(first, second, 5),
        nn.MaxPool2d(2, 2, ceil_mode=True),
        nn.Flatten(),
        nn.Linear(second * side * side, hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, sizes.classes),
    )
    return model, Images(1, sizes.image_size, sizes.classes)


def cifar10_quick(sizes: Sizes) -> tuple[nn.Module, Task]:
    """Return CIFAR-10 quick: three padded 5x5 convolutions, two inner products with nothing between."""
    narrow, wide = sizes.scaled(32), sizes.scaled(64)
    side = _pooled(_pooled(_pooled(sizes.image_size, 3), 3), 3)
    model = nn.Sequential(
        nn.Conv2d(3, narrow, 5, padding=2),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.ReLU(inplace=True),
        nn.Conv2d(narrow, narrow, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(3, 2, ceil_mode=True),
        nn.Conv2d(narrow, wide, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(3, 2, ceil_mode=True),
        nn.Flatten(),
        nn.Linear(wide * side * side, wide),
        nn.Linear(wide, sizes.classes),
    )
    return model, Images(3, sizes.image_size, sizes.classes)


def _pooled(side: int, kernel: int) -> int:
    """Return the side after a pooling of stride 2 that rounds up."""
    return math.ceil((side - kernel) / 2) + 1
