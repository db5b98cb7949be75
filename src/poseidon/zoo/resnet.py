"""Residual networks for ImageNet with 18, 50 and 152 layers; the stride of a bottleneck sits in its 3x3."""

from __future__ import annotations

from torch import Tensor, nn

from poseidon.zoo.images import Images
from poseidon.zoo.network import Sizes, Task

_CHANNELS = (64, 128, 256, 512)
_EXPANSION = 4
"""A bottleneck's output has this many times its inner channels."""
_FIRST_GAIN = 0.1
"""Initial scale of what a block adds to its shortcut. At 1.0 the gradients of 50 blocks grow until
rounding decides their digits on small batches; at 0.0 a block's own layers would start without gradient."""


class Residual(nn.Module):
    """ReLU of ``body(x)`` plus the shortcut, which is ``x`` itself where the sizes allow it."""

    def __init__(self, body: nn.Sequential, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = body
        nn.init.constant_(body[-1].get_parameter("weight"), _FIRST_GAIN)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(*_conv_norm(inputs, outputs, 1, stride))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of ``outputs`` channels, smaller by ``stride``."""
        features: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return features


def resnet18(sizes: Sizes) -> tuple[nn.Module, Task]:
    """Return ResNet-18: eight basic blocks."""
    return _resnet((2, 2, 2, 2), sizes, bottleneck=False)


def resnet50(sizes: Sizes) -> tuple[nn.Module, Task]:
    """Return ResNet-50: sixteen bottlenecks."""
    return _resnet((3, 4, 6, 3), sizes, bottleneck=True)


def resnet152(sizes: Sizes) -> tuple[nn.Module, Task]:
    """Return ResNet-152: fifty bottlenecks."""
    return _resnet((3, 8, 36, 3), sizes, bottleneck=True)


def _resnet(depths: tuple[int, ...], sizes: Sizes, *, bottleneck: bool) -> tuple[nn.Module, Task]:
    block = _bottleneck if bottleneck else _basic
    channels = sizes.scaled(_CHANNELS[0])
    model = nn.Sequential(
        *_conv_norm(3, channels, 7, stride=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, padding=1),
    )
    for stage, (size, depth) in enumerate(zip(_CHANNELS, depths, strict=True)):
        inner = sizes.scaled(size)
        outputs = inner * _EXPANSION if bottleneck else inner
        for index in range(depth):
            stride = 2 if stage > 0 and index == 0 else 1
            model.append(Residual(block(channels, inner, stride), channels, outputs, stride))
            channels = outputs
    model.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, sizes.classes)])
    return model, Images(3, sizes.image_size, sizes.classes)


def _basic(inputs: int, inner: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        *_conv_norm(inputs, inner, 3, stride),
        nn.ReLU(inplace=True),
        *_conv_norm(inner, inner, 3),
    )


def _bottleneck(inputs: int, inner: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        *_conv_norm(inputs, inner, 1),
        nn.ReLU(inplace=True),
        *_conv_norm(inner, inner, 3, stride),
        nn.ReLU(inplace=True),
        *_conv_norm(inner, inner * _EXPANSION, 1),
    )


def _conv_norm(inputs: int, outputs: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv, nn.BatchNorm2d(outputs)
