"""AlexNet in one column: five convolutions, three fully connected layers that hold 96 % of the parameters."""

from __future__ import annotations

from torch import nn

from poseidon.zoo.images import Images
from poseidon.zoo.network import Sizes, Task


def alexnet(sizes: Sizes) -> tuple[nn.Module, Task]:
    """Return AlexNet in its later one-GPU form, without local response normalisation."""
    c1, c2, c3, c4, c5 = (sizes.scaled(channels) for channels in (64, 192, 384, 256, 256))
    hidden = sizes.scaled(4096)
    model = nn.Sequential(
        nn.Conv2d(3, c1, 11, stride=4, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(c1, c2, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(c2, c3, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(c3, c4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(c4, c5, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.AdaptiveAvgPool2d(6),
        nn.Flatten(),
        nn.Dropout(sizes.dropout),
        nn.Linear(c5 * 6 * 6, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(sizes.dropout),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, sizes.classes),
    )
    return model, Images(3, sizes.image_size, sizes.classes)
