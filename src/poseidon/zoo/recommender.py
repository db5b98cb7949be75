"""A recommender after DLRM: nearly all parameters are rows of embedding tables, and a batch uses few of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from poseidon.zoo.network import Sizes, Task

_TABLES, _ROWS, _VECTOR_SIZE = 8, 100_000, 64
_DENSE_FEATURES = 13
_BAG_SIZE = 4
"""Rows of one table that a sample looks up and sums."""
_SKEW = 8
"""Power of a uniform number that draws rows where clicks can be learned: half of the lookups hit 1/256 of a table."""


class Recommender(nn.Module):
    """Dense features and table lookups become vectors; their pairwise dot products predict a click."""

    def __init__(self, rows: int, vector_size: int, wide: int, narrow: int) -> None:
        super().__init__()
        self.bottom = nn.Sequential(*_perceptron(_DENSE_FEATURES, wide, narrow, vector_size), nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, vector_size, mode="sum") for _ in range(_TABLES))
        pairs = _TABLES * (_TABLES + 1) // 2
        self.top = nn.Sequential(*_perceptron(vector_size + pairs, wide, narrow, 1))
        for weight in self.tables.parameters():
            nn.init.uniform_(weight, -(rows**-0.5), rows**-0.5)

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        """Return one logit per sample from ``dense`` (sample, feature) and ``rows`` (sample, table, bag)."""
        bottom = self.bottom(dense)
        looked_up = [table(rows[:, index]) for index, table in enumerate(self.tables)]
        vectors = torch.stack([bottom, *looked_up], dim=1)
        first, second = torch.triu_indices(_TABLES + 1, _TABLES + 1, offset=1, device=dense.device)
        dots = (vectors @ vectors.transpose(1, 2))[:, first, second]
        logits: Tensor = self.top(torch.cat([bottom, dots], dim=1))
        return logits.squeeze(1)


@dataclass(frozen=True)
class Clicks:
    """Normal dense features, uniformly drawn rows, fair-coin clicks; the loss is binary cross entropy."""

    rows: int

    def sample(self, size: int, seed: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return ``((dense, rows), clicks)``."""
        generator = torch.Generator("cpu").manual_seed(seed)
        dense = torch.randn((size, _DENSE_FEATURES), generator=generator, device="cpu")
        rows = torch.randint(self.rows, (size, _TABLES, _BAG_SIZE), generator=generator, device="cpu")
        clicks = torch.randint(2, (size,), generator=generator, device="cpu")
        return (dense, rows), clicks.float()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean binary cross entropy of logits against clicks."""
        return F.binary_cross_entropy_with_logits(outputs, targets)


def learnable_clicks(task: Task) -> Callable[[int, torch.Generator], tuple[tuple[Tensor, ...], Tensor]]:
    """Return a source of clicks that can be predicted, for the network of ``task``.

    Every row and dense feature has a hidden weight, the same in every process; a sample's click is drawn with the
    probability that their sum gives. Few rows are drawn often and most seldom, as in real logs.
    """
    assert isinstance(task, Clicks)
    hidden = torch.Generator("cpu").manual_seed(0)
    row_weights = torch.randn((_TABLES, task.rows), generator=hidden) / 2
    dense_weights = torch.randn(_DENSE_FEATURES, generator=hidden) / 4
    tables = torch.arange(_TABLES)[None, :, None]

    def draw(size: int, generator: torch.Generator) -> tuple[tuple[Tensor, ...], Tensor]:
        dense = torch.randn((size, _DENSE_FEATURES), generator=generator)
        uniform = torch.rand((size, _TABLES, _BAG_SIZE), generator=generator)
        rows = (task.rows * uniform**_SKEW).long()
        logits = dense @ dense_weights + row_weights[tables, rows].sum((1, 2))
        clicks = torch.rand(size, generator=generator) < torch.sigmoid(logits)
        return (dense, rows), clicks.float()

    return draw


def dlrm(sizes: Sizes) -> tuple[nn.Module, Task]:
    """Return the recommender; the width scales rows, vectors and hidden layers, not the number of tables."""
    rows = sizes.scaled(_ROWS)
    model = Recommender(rows, sizes.scaled(_VECTOR_SIZE), sizes.scaled(512), sizes.scaled(256))
    return model, Clicks(rows)


def _perceptron(*sizes: int) -> list[nn.Module]:
    """Return linear layers between the sizes with a ReLU between every two of them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return layers[:-1]
