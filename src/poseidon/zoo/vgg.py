"""VGG with 19 layers, without batch normalisation: most parameters sit in three fully connected layers."""

from __future__ import annotations

from torch import nn

from poseidon.zoo.images import Images
from poseidon.zoo.network import Sizes, Task

_STAGES = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))
"""Channels and number of 3x3 convolutions between two poolings."""


def vgg19(sizes: Sizes) -> tuple[nn.Module, Task]:
    """Return VGG19; with 21841 classes it is the network for ImageNet-22K."""
    model = nn.Sequential()
    channels = 3
    for size, depth in _STAGES:
        for _ in range(depth):
            model.append(nn.Conv2d(channels, sizes.scaled(size), 3, padding=1))
            model.append(nn.ReLU(inplace=True))
            channels = sizes.scaled(size)
        model.append(nn.MaxPool2d(2, 2))
    model.extend([nn.AdaptiveAvgPool2d(7), nn.Flatten(), *_classifier(channels * 7 * 7, sizes)])
    _initialise(model)
    return model, Images(3, sizes.image_size, sizes.classes)


def _classifier(inputs: int, sizes: Sizes) -> list[nn.Module]:
    hidden = sizes.scaled(4096)
    return [
        nn.Linear(inputs, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(sizes.dropout),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(sizes.dropout),
        nn.Linear(hidden, sizes.classes),
    ]


def _initialise(model: nn.Sequential) -> None:
    """Draw weights that keep the signal's scale through 16 convolutions; torch's defaults would let it vanish."""
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
