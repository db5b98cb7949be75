"""Networks that fork and join, written as data: the common part of GoogLeNet and Inception-V3.

A stack is a tuple of steps: a convolution, a pooling, or a fork into stacks whose outputs are concatenated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from poseidon.zoo.images import Images
from poseidon.zoo.network import Sizes


@dataclass(frozen=True)
class Conv:
    """A convolution without bias, batch normalisation and ReLU; ``channels`` is before scaling by width."""

    channels: int
    kernel: tuple[int, int] = (1, 1)
    stride: int = 1
    padded: bool = True
    """Whether zero padding keeps the input's size."""


@dataclass(frozen=True)
class MaxPool:
    """A maximum pooling."""

    kernel: int = 3
    stride: int = 2
    padding: int = 0
    ceil: bool = False


@dataclass(frozen=True)
class MeanPool:
    """A 3x3 average pooling that keeps the size."""


@dataclass(frozen=True)
class Fork:
    """Stacks that all read the same input; their outputs are concatenated in order."""

    branches: tuple[Stack, ...]


Step: TypeAlias = "Conv | MaxPool | MeanPool | Fork"
Stack: TypeAlias = "tuple[Step, ...]"


class Branches(nn.ModuleList):
    """Runs every branch on the same input and concatenates the outputs by channel."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the joined features."""
        return torch.cat([branch(x) for branch in self], dim=1)


def classifier(stack: Stack, sizes: Sizes) -> tuple[nn.Module, Images]:
    """Return the network of ``stack`` on images, a mean over space, dropout and one dense layer."""
    model, channels = grow(stack, 3, sizes)
    model.extend(
        [
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(sizes.dropout),
            nn.Linear(channels, sizes.classes),
        ]
    )
    return model, Images(3, sizes.image_size, sizes.classes)


def grow(stack: Iterable[Step], channels: int, sizes: Sizes) -> tuple[nn.Sequential, int]:
    """Return the modules of a stack that reads ``channels`` channels, and how many it writes."""
    model = nn.Sequential()
    for step in stack:
        if isinstance(step, Conv):
            outputs = sizes.scaled(step.channels)
            model.append(_convolution(step, channels, outputs))
            channels = outputs
        elif isinstance(step, Fork):
            grown = [grow(branch, channels, sizes) for branch in step.branches]
            model.append(Branches([branch for branch, _ in grown]))
            channels = sum(outputs for _, outputs in grown)
        elif isinstance(step, MaxPool):
            model.append(nn.MaxPool2d(step.kernel, step.stride, step.padding, ceil_mode=step.ceil))
        else:
            model.append(nn.AvgPool2d(3, stride=1, padding=1))
    return model, channels


def _convolution(step: Conv, inputs: int, outputs: int) -> nn.Module:
    height, width = step.kernel
    padding = (height // 2, width // 2) if step.padded else 0
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, step.kernel, step.stride, padding, bias=False),
        nn.BatchNorm2d(outputs, eps=0.001),
        nn.ReLU(inplace=True),
    )
