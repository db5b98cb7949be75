"""Where samples of a batch meet in a loss: it is found, and nothing else is."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from poseidon.auto.mixing import NORMALISED, find_mixing

SAMPLES = 6
torch.manual_seed(0)
X, OTHER = torch.randn(SAMPLES, 5), torch.randn(SAMPLES, 5)
Y = torch.randint(0, 2, (SAMPLES,))
PERMUTED = torch.tensor([1, 2, 0, 5, 3, 4])
NET = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 4))
Loss = Callable[[Tensor, Tensor], Tensor]


def views(z: Tensor, other: Tensor) -> Tensor:
    both = F.normalize(torch.cat([z, other]), dim=1)
    table = both @ both.T / 0.5
    table.fill_diagonal_(-1e9)
    return F.cross_entropy(table, torch.arange(2 * SAMPLES).roll(SAMPLES))


def dice(z: Tensor, _: Tensor) -> Tensor:
    guess = z[:, 0].sigmoid()
    return 1 - (2 * (guess * Y).sum() + 1) / (guess.sum() + Y.sum() + 1)


# ruff: noqa: ARG005 - every loss gets both
MIXED: dict[str, tuple[Loss, str]] = {
    "two views": (views, "compared with each other (mm)"),
    "pairs of pictures and words": (lambda z, o: F.cross_entropy(z @ o.t(), torch.arange(SAMPLES)), "(mm)"),
    "hardest triplets": (lambda z, o: torch.cdist(z, z).max(1).values.mean(), "(cdist)"),
    "differences": (lambda z, o: (z[:, None] - z[None]).pow(2).sum(-1).exp().mean(), "(sub)"),
    "cosines": (lambda z, o: F.cosine_similarity(z[:, None], z[None], dim=-1).mean(), "(expand)"),
    "root of a mean": (lambda z, o: F.mse_loss(z, o).sqrt(), "the sqrt of a sum or mean"),
    "log of a mean": (lambda z, o: 3 * torch.log((z - o).square().mean()), "the log of a sum or mean"),
    "dice": (dice, "the quotient of a sum or mean"),
    "product": (lambda z, o: z.mean() * o.mean(), "the product of a sum or mean"),
    "variance": (lambda z, o: F.relu(1 - z.var(0)).mean(), "the var of a batch"),
    "centred": (lambda z, o: (z - z.mean(0)).square().mean(), "a mean over a batch"),
    "balanced": (lambda z, o: F.mse_loss(z, o) + (z.softmax(1).mean(0) ** 2).sum(), "a mean over a batch"),
    "ranked": (lambda z, o: z[:, 0].log_softmax(0).mean(), "a logsoftmax over a batch"),
    "survival": (lambda z, o: torch.logcumsumexp(z[:, 0], 0).mean(), "a logcumsumexp over"),
    "hardest": (lambda z, o: z.square().sum(1).topk(3).values.mean(), "the topk of a batch"),
    "all distances": (lambda z, o: -F.pdist(z).mean(), "(pdist)"),
    "worst": (lambda z, o: z.square().max(), "the max of a batch"),
    "shares": (lambda z, o: (torch.full((SAMPLES,), 1 / SAMPLES) * z.sum(1)).sum(), "weights that add up to one"),
    "normalised": (lambda z, o: F.batch_norm(z, None, None, training=True).square().mean(), NORMALISED),
    "rolled": (lambda z, o: F.relu(z[:, 0] - z[:, 0].roll(1) + 1).mean(), "(roll)"),
    "turned round": (lambda z, o: F.triplet_margin_loss(z, o, z.flip(0)), "(flip)"),
    "permuted": (lambda z, o: F.triplet_margin_loss(z, o, o[PERMUTED]), "(index)"),
    "permuted and joined": (lambda z, o: torch.cat([z, o.index_select(0, PERMUTED)], 1).exp().mean(), "(index)"),
    "mixed": (lambda z, o: F.cross_entropy(0.7 * z + 0.3 * z[PERMUTED], Y), "(index)"),
    "neighbours": (lambda z, o: (z[1:] - z[:-1]).abs().mean(), "(slice)"),
    "halves": (lambda z, o: F.mse_loss(*z.chunk(2)), "(split)"),
    "some and others": (lambda z, o: (z[Y[0] == Y][:1] * z[Y[0] != Y][:1]).exp().mean(), "(index)"),
}


@pytest.mark.parametrize("name", list(MIXED))
def test_samples_that_meet_are_found(name: str) -> None:
    loss, words = MIXED[name]
    found = find_mixing(loss(NET(X), NET(OTHER)), SAMPLES)
    assert any(words in one for one in found), found


APART: dict[str, Loss] = {
    "mean": lambda z, o: F.cross_entropy(z, Y),
    "roots of means": lambda z, o: (z - o).square().mean(1).sqrt().mean(),
    "triplets": lambda z, o: F.triplet_margin_loss(z, o, z + o),
    "cosine": lambda z, o: 1 - F.cosine_similarity(z, o).mean(),
    "learned weight": lambda z, o: F.mse_loss(z, o) * torch.exp(-NET[2].bias[0]) + NET[2].bias[0],
    "penalty": lambda z, o: (
        F.mse_loss(z, o) + NET[0].weight.norm() + (NET[0].weight @ NET[0].weight.T).pow(2).sum().sqrt()
    ),
    "centred weights": lambda z, o: (X @ (NET[0].weight - NET[0].weight.mean(0)).T).square().mean(),
    "as many classes as samples": lambda z, o: F.cross_entropy(z @ torch.randn(4, SAMPLES), Y),
    "joined features": lambda z, o: torch.cat([z, o[:, :2]], 1).square().mean(),
    "sum": lambda z, o: (z - o).square().sum() / SAMPLES,
    "evaluated": lambda z, o: F.batch_norm(z, torch.zeros(4), torch.ones(4)).square().mean(),
    "instances": lambda z, o: F.instance_norm(z[:, :, None] * torch.ones(3)).square().mean(),
    "layers": lambda z, o: F.layer_norm(z, (4,)).softmax(-1).logsumexp(1).mean(),
    "terms together": lambda z, o: torch.stack([F.mse_loss(z, o), F.cross_entropy(z, Y)]).mean(),
    "time first": lambda z, o: torch.stack([z, o, z + o]).mean(0).square().mean(),
    "sorted by length": lambda z, o: F.cross_entropy(z[PERMUTED] + 2 * z[PERMUTED].tanh(), Y[PERMUTED]),
    "own columns": lambda z, o: (z[torch.arange(SAMPLES), Y] - o[range(SAMPLES), 1 - Y]).exp().mean(),
    "both masked": lambda z, o: F.mse_loss(z[Y[0] == Y], o[Y[0] == Y]),
    "in their turn": lambda z, o: F.mse_loss(z.index_select(0, torch.arange(SAMPLES)), o[: len(o)]),
    "halves of two views": lambda z, o: 1 - F.cosine_similarity(*torch.cat([z, o]).chunk(2)).mean(),
    "shifted columns": lambda z, o: (z[:, 1:] - z[:, :-1]).abs().mean() + (z - z.roll(1, 1)).abs().mean(),
    "beside a table": lambda z, o: (z + NET[2].weight.sum() * NET[2].bias.roll(1)).square().mean(),
}


@pytest.mark.parametrize("name", list(APART))
def test_samples_that_go_their_own_ways_are_not(name: str) -> None:
    assert find_mixing(APART[name](NET(X), NET(OTHER)), SAMPLES) == []


class Fleeting:
    """A node of a graph as torch shows it: an object for as long as somebody holds it, then another."""

    _held: ClassVar[weakref.WeakValueDictionary[int, Fleeting]] = weakref.WeakValueDictionary()

    def __init__(self, chain, place):
        self._chain, self._place = chain, place
        if chain[place].startswith("NativeBatchNorm"):
            self._saved_training = True

    def name(self):
        return self._chain[self._place]

    @property
    def next_functions(self):
        place = self._place + 1
        if place == len(self._chain):
            return ()
        found = self._held.get(place)
        if found is None:
            found = self._held[place] = Fleeting(self._chain, place)
        return ((found, 0),)


@pytest.mark.parametrize("between", [1, 2, 3, 5, 8])
def test_nodes_that_get_the_memory_of_others_are_not_taken_for_these(between):
    chain = ["MeanBackward0", *["ReluBackward0"] * between, "NativeBatchNormBackward0"]
    loss = SimpleNamespace(grad_fn=Fleeting(chain, 0), numel=lambda: 1)
    assert find_mixing(loss, 8) == [NORMALISED]
