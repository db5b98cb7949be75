"""A small net and its samples, for tests that need no other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROWS = 6
"""Samples of a batch."""


def small_net() -> nn.Sequential:
    """Return the net, the same on all workers."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return a worker's samples of a step, with their classes."""
    generator = torch.Generator("cpu").manual_seed(100 * step + rank)
    x = torch.randn(ROWS, 8, generator=generator, device="cpu")
    y = torch.randint(0, 4, (ROWS,), generator=generator, device="cpu")
    return x.to(torch.get_default_device()), y.to(torch.get_default_device())
