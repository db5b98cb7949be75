"""A network of the zoo: a model and a task that makes its batches and scores its outputs.

Torch is imported only for annotations, so listing the zoo costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """The sizes a network is built with."""

    width: float
    """Factor on channels, hidden sizes, and the rows of embeddings; 1.0 is the published network."""
    dropout: float = 0.0
    """Probability of every dropout layer; a network without dropout has 0.0 at full size."""
    image_size: int = 0
    """Height and width of the input in pixels; 0 if the input is not an image."""
    classes: int = 0
    """Outputs of the classifier, never scaled by ``width``; 0 without a classifier."""

    def scaled(self, size: int) -> int:
        """Return ``size`` times the width, at least 1."""
        return max(1, round(size * self.width))


class Task(Protocol):
    """Synthetic data of the right shape, and the loss to train with."""

    def sample(self, size: int, seed: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the inputs and targets of ``size`` samples on the CPU, always the same for a seed."""

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the mean loss over the batch as a scalar."""


@dataclass(frozen=True)
class Network:
    """A model with its own data and loss: ``loss(model(*inputs), targets).backward()`` is one pass."""

    name: str
    """The name it was built by."""
    model: nn.Module
    """In training mode; weights drawn from torch's global generator."""
    task: Task
    """Makes the batches and scores the outputs."""

    def batch(self, size: int, seed: int = 0, device: torch.device | str = "cpu") -> tuple[tuple[Any, ...], Tensor]:
        """Return ``(inputs, targets)``, drawn on the CPU so that a seed means the same on every device.

        Every tensor has the sample as its first dimension, so slicing gives each worker its share.
        """
        inputs, targets = self.task.sample(size, seed)
        return tuple(part.to(device) for part in inputs), targets.to(device)

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the mean loss over the batch as a scalar."""
        return self.task.loss(outputs, targets)
