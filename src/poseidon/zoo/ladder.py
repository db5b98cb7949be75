"""Ten equal layers with full gradients and hardly any arithmetic: a network reduced to its traffic.

No gradient has a short form, so the exchange is as long as possible; with paced compute it shows what a schedule hides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from poseidon.zoo.network import Sizes, Task

_RUNGS = 10
_ROWS, _COLUMNS = 1000, 1500


class Rung(nn.Module):
    """One layer: scales its input by the column means of its weight."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(rows, columns))

    def forward(self, x: Tensor) -> Tensor:
        """Return an output of the input's shape."""
        return torch.tanh(x * self.weight.mean(0))


@dataclass(frozen=True)
class Signals:
    """Normal inputs and targets; the loss is the mean squared error."""

    columns: int

    def sample(self, size: int, seed: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return ``((inputs,), targets)``."""
        generator = torch.Generator("cpu").manual_seed(seed)
        inputs, targets = torch.randn((2, size, self.columns), generator=generator, device="cpu")
        return (inputs,), targets

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error."""
        return F.mse_loss(outputs, targets)


def ladder(sizes: Sizes) -> tuple[nn.Module, Task]:
    """Return ten layers of 1.5 million parameters each."""
    rows, columns = sizes.scaled(_ROWS), sizes.scaled(_COLUMNS)
    return nn.Sequential(*(Rung(rows, columns) for _ in range(_RUNGS))), Signals(columns)
