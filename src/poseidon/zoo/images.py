"""The task of all convolutional networks here: classify images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Images:
    """Images of normally distributed pixels with uniformly drawn labels; the loss is cross entropy."""

    channels: int
    image_size: int
    classes: int

    def sample(self, size: int, seed: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return ``((images,), labels)``."""
        generator = torch.Generator("cpu").manual_seed(seed)
        shape = (size, self.channels, self.image_size, self.image_size)
        images = torch.randn(shape, generator=generator, device="cpu")
        labels = torch.randint(self.classes, (size,), generator=generator, device="cpu")
        return (images,), labels

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of logits against labels."""
        return F.cross_entropy(outputs, targets)
