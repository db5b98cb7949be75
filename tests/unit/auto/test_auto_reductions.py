"""What a loss is a sum or a mean over, and what its parts weigh: any split must give the whole's gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from poseidon.auto.reductions import read_terms
from poseidon.auto.weighing import Counts, Portion, describe, differ, mark, pack, scalings, weigh

torch.manual_seed(0)
ROWS, CLASSES = 12, 5
X = torch.randn(ROWS, 4, dtype=torch.float64)
LABELS = torch.randint(0, CLASSES, (ROWS,))
LABELS[[0, 1, 3, 9]] = -100
LENGTHS = torch.tensor([3.0, 1, 2, 7, 2, 5, 1, 1, 4, 6, 2, 3], dtype=torch.float64)
WEIGHT = torch.rand(4, CLASSES, dtype=torch.float64)
CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 0.1, 2.0, 1.0], dtype=torch.float64)

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# ruff: noqa: ARG005 - every loss gets all there is
LOSSES: dict[str, Loss] = {
    "mean": lambda w, x, y, n: (x @ w).square().mean(),
    "mse sum": lambda w, x, y, n: F.mse_loss(x @ w, torch.ones(len(x), CLASSES).double(), reduction="sum"),
    "two sums": lambda w, x, y, n: (x @ w).square().sum() - 0.5 * torch.sum(1 + (x @ w).exp()),
    "ignored targets": lambda w, x, y, n: F.cross_entropy(x @ w, y),
    "class weights": lambda w, x, y, n: F.cross_entropy(x @ w, y.clamp(min=0), weight=CLASS_WEIGHTS),
    "smoothed": lambda w, x, y, n: F.cross_entropy(x @ w, y, label_smoothing=0.1),
    "over lengths": lambda w, x, y, n: ((x @ w).mean(1) * n).sum() / n.sum(),
    "batchmean": lambda w, x, y, n: F.kl_div(
        (x @ w).log_softmax(1), (x @ w).detach().softmax(1), reduction="batchmean"
    ),
    "times the batch": lambda w, x, y, n: (F.l1_loss(x @ w, torch.ones(len(x), CLASSES).double()) + 0.1) * len(x),
    "by the whole batch": lambda w, x, y, n: (x @ w).square().sum() / ROWS,
    "with a penalty": lambda w, x, y, n: F.cross_entropy(x @ w, y) + 0.01 * (w**2).sum(),
    "sum with a penalty": lambda w, x, y, n: (x @ w).square().sum() + 0.01 * (w * w).sum(),
    "terms together": lambda w, x, y, n: torch.stack([F.cross_entropy(x @ w, y), (x @ w).abs().mean()]).sum() / 4,
    "scaled": lambda w, x, y, n: F.cross_entropy(x @ w, y) / 3 * 65536.0,
    "orthogonal": lambda w, x, y, n: (x @ w).square().mean() + (w @ w.t() - torch.eye(4)).square().sum(),
    "columns": lambda w, x, y, n: (x @ w.repeat(1, 12)).mean(0).sum(),
    "summed columns": lambda w, x, y, n: (x @ w).sum(0).sum(),
    "axis by axis": lambda w, x, y, n: (x @ w).square().sum(1).sum(0),
    "weighted": lambda w, x, y, n: 6.0 * (x @ w).square().mean(),
    "embedded": lambda w, x, y, n: F.embedding(y % 4, w).square().sum(),
    "products": lambda w, x, y, n: (w[0] * x[:, :1] * n[:, None]).sum(),
    "chosen": lambda w, x, y, n: (x @ w)[n > 2].square().mean(),
    "chosen targets": lambda w, x, y, n: F.mse_loss((x @ w)[y >= 0], torch.ones(int((y >= 0).sum()), CLASSES).double()),
    "masked": lambda w, x, y, n: ((x @ w).square().sum(1) * (n > 6)).sum() / (n > 6).sum().clamp(min=1),
    "dot": lambda w, x, y, n: torch.dot((x @ w).square().mean(1), n) / n.sum(),
    "all but": lambda w, x, y, n: 1 - (x @ w).sum(),
    "without some": lambda w, x, y, n: torch.nanmean(torch.where((n > 2)[:, None], x @ w, torch.nan)),
    "sample by sample": lambda w, x, y, n: sum(row.square().sum() / k for row, k in zip(x @ w, n)) / len(x),  # noqa: B905
    "samples added up": lambda w, x, y, n: sum(F.l1_loss(row, 0 * row) * k for row, k in zip(x @ w, n)),  # noqa: B905
    "samples by pieces": lambda w, x, y, n: sum(row.exp().mean() for row in (x @ w).split(1)) / n.sum(),
    "samples and a mean": lambda w, x, y, n: sum(row.abs().max() for row in x @ w) / len(x) + (x @ w).square().mean(),
    "two lists": lambda w, x, y, n: sum(r.sum() for r in x @ w) + sum(r.exp().mean() for r in x @ w) / len(x),
    "halved": lambda w, x, y, n: ((x @ w) - 1).square().sum() / 2,
    "accumulated": lambda w, x, y, n: ((x @ w).square().sum(1) * n).sum() / n.sum() / 2,
    "looked up": lambda w, x, y, n: w[y % 4].square().sum(),
    "selected": lambda w, x, y, n: w.index_select(0, y % 4).exp().sum() / len(x),
    "gathered": lambda w, x, y, n: w[0].gather(0, y % CLASSES).square().sum(),
    "distances": lambda w, x, y, n: torch.cdist(x, w.t()).sum(),
    "normalised": lambda w, x, y, n: F.layer_norm(x, (4,), w[:, 0], w[:, 1]).square().sum(),
    "by time": lambda w, x, y, n: (x @ w).t().square().sum(),
    "learned weight": lambda w, x, y, n: (x @ w).exp().mean() + w.mean().exp() * (x @ w).square().sum() + w.mean(),
    "learned divisor": lambda w, x, y, n: F.cross_entropy(x @ w, y) / (2 * w.mean() ** 2) + (x @ w).exp().mean(),
    "learned weight of two": lambda w, x, y, n: w.mean() * ((x @ w).square().sum() + (x @ w).exp().sum()),
    "twice": lambda w, x, y, n: (lambda one: one + 0.5 * one)((x @ w).square().sum()),
    "finite": lambda w, x, y, n: (lambda one: torch.where(one < 1e9, one, 0.0))((x @ w).sum()) + (x @ w).exp().mean(),
    "joined": lambda w, x, y, n: torch.cat([r[: int(k)] for r, k in zip((x @ w).exp(), n)]).mean(),  # noqa: B905
    "chosen sum": lambda w, x, y, n: (x @ w).square()[n > 2].sum() + (x @ w).exp().mean(),
    "chosen and divided": lambda w, x, y, n: ((x @ w)[n > 2].exp() * 3).sum() / (n > 2).sum() + (x @ w).exp().mean(),
    "in pieces": lambda w, x, y, n: sum(F.l1_loss(p, 0 * p, reduction="sum") for p in (x @ w).split(2)) / len(x),
    "in pieces by count": lambda w, x, y, n: (
        sum(F.cross_entropy(a, b, reduction="sum") for a, b in zip((x @ w).split(2), y.split(2)))  # noqa: B905
        / (y >= 0).sum()
    ),
}


NOT_ALONE = ("joined", "learned divisor")
"""Where a worker with a single sample cannot tell it from the batch, or one without a target has no number."""


def gradient(loss: Loss, rows: slice) -> Tensor:
    w = WEIGHT.clone().requires_grad_()
    loss(w, X[rows], LABELS[rows], LENGTHS[rows]).backward()
    assert w.grad is not None
    return w.grad


@pytest.mark.parametrize("bounds", [(0, 6, 12), (0, 4, 8, 12), (0, 5, 12), (0, 3, 4, 12)])
@pytest.mark.parametrize("name", list(LOSSES))
def test_parts_weigh_what_they_do_in_the_whole(name: str, bounds: tuple[int, ...]) -> None:
    if name in NOT_ALONE and bounds == (0, 3, 4, 12):
        bounds = (0, 3, 6, 12)
    _check_parts(LOSSES[name], bounds)


def _check_parts(loss: Loss, bounds: tuple[int, ...]) -> None:
    parts = [slice(a, b) for a, b in itertools.pairwise(bounds)]
    portions = [Portion(part.stop - part.start, ROWS, part.stop - part.start, len(parts)) for part in parts]
    weights = [WEIGHT.clone().requires_grad_() for _ in parts]
    values = [loss(w, X[part], LABELS[part], LENGTHS[part]) for w, part in zip(weights, parts, strict=True)]
    terms = [read_terms([value], p.samples, p.total) for value, p in zip(values, portions, strict=True)]
    rows = [pack(mine, p.real) for mine, p in zip(terms, portions, strict=True)]
    total = torch.zeros_like(WEIGHT)
    for w, value, mine, portion in zip(weights, values, terms, portions, strict=True):
        factors = weigh(mine, rows, portion, Counts())
        nodes, disagrees = scalings(mine, factors)
        assert not disagrees
        assert not differ(rows)
        for node, factor in nodes.items():
            node.register_prehook(lambda g, f=factor / portion.weight: tuple(each * f for each in g))
        for term, factor in zip(mine, factors, strict=True):
            assert describe(term, factor, portion).startswith("the loss is")
        value.backward(torch.tensor(portion.weight, dtype=torch.float64))
        assert w.grad is not None
        total += w.grad / len(parts)
    torch.testing.assert_close(total, gradient(loss, slice(None)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["halved", "accumulated"])
def test_a_constant_that_is_one_workers_number_of_samples_is_a_constant(name: str) -> None:
    test_parts_weigh_what_they_do_in_the_whole(name, (0, 2, 7, 12))


@pytest.mark.parametrize("bounds", [(0, 4, 8, 12), (0, 5, 12), (0, 3, 6, 9, 12)])
def test_twice_the_samples_are_a_count(bounds: tuple[int, ...]) -> None:
    halved: Loss = lambda w, x, y, n: (x @ w).square().sum() / (2 * len(x))  # noqa: E731
    _check_parts(halved, bounds)


def test_a_part_that_cannot_be_read_is_named_as_one() -> None:
    class Compiled(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: object, value: Tensor) -> Tensor:
            return value.sum()

        @staticmethod
        def backward(_ctx: object, gradient: Tensor) -> Tensor:
            return gradient.expand(6, CLASSES)

    w = WEIGHT.clone().requires_grad_()
    found = read_terms([Compiled.apply(X[:6] @ w) + (X[:6] @ w).sum()], 6, ROWS)
    assert sorted((term.is_sum, len(term.nodes)) for term in found) == [(False, 0), (True, 1)]


def test_means_over_samples_need_nothing() -> None:
    w = WEIGHT.clone().requires_grad_()
    for loss in (F.mse_loss(X @ w, torch.zeros(ROWS, CLASSES).double()), (X @ w).mean() / 4, 0.1 * (w**2).sum()):
        terms, portion = read_terms([loss], 6, ROWS), Portion(6, ROWS, 6, 2)
        assert weigh(terms, [pack(terms, 1.0)] * 2, portion, Counts()) == [1.0] * len(terms)


def test_a_repeated_sample_counts_once() -> None:
    portion = Portion(samples=2, total=3, added=1, workers=3)
    value = (torch.cat([X[:1], X[:1]]) @ WEIGHT.clone().requires_grad_()).sum()
    terms = read_terms([value], 2, 3)
    assert weigh(terms, [pack(terms, portion.real)] * 3, portion, Counts()) == [1.5]  # a half of it, on three workers


def test_workers_with_other_graphs_weigh_by_samples() -> None:
    w = WEIGHT.clone().requires_grad_()
    portion = Portion(6, 12, 6, 2)
    terms = read_terms([F.cross_entropy(X[:6] @ w, LABELS[:6])], 6, 12)
    rows = [pack(terms, 1.0), pack([], 1.0)]
    assert weigh(terms, rows, portion, Counts()) == [1.0]
    # What is surely divided by a worker's own samples is no sum in such a step either.
    terms = read_terms([F.cross_entropy(X[:6] @ w, LABELS[6:].clamp(min=0), reduction="sum") / 6], 6, 12)
    assert weigh(terms, [pack(terms, 1.0), pack([], 1.0)], portion, Counts()) == [1.0]


def test_tokens_counted_over_several_batches_are_a_count_even_if_equal_on_all_workers() -> None:
    # As Hugging Face's Trainer divides: by a tensor, of all batches of a step.
    w = WEIGHT.clone().requires_grad_()
    portion, window = Portion(6, ROWS, 6, 2), 4
    terms = read_terms(
        [F.cross_entropy(X[:6] @ w, LABELS[6:].clamp(min=0), reduction="sum") / torch.tensor(6 * window)], 6, ROWS
    )
    assert weigh(terms, [pack(terms, 1.0)] * 2, portion, Counts()) == [1.0]
    terms = read_terms([F.cross_entropy(X[:6] @ w, LABELS[6:].clamp(min=0), reduction="sum") / (6 * window)], 6, ROWS)
    assert weigh(terms, [pack(terms, 1.0)] * 2, portion, Counts()) == [2.0]  # a number is a constant of the script


def test_a_constant_stays_one_where_a_worker_repeats_a_sample() -> None:
    # The script divides by the batch size it asked for; the last batch has 3 samples, and one worker repeats its own.
    portions = [Portion(2, 3, 1, 2), Portion(2, 3, 2, 2)]
    w = WEIGHT.clone().requires_grad_()
    terms = read_terms([(X[:2] @ w).square().sum() / 8], 2, 3)
    rows = [pack(terms, portion.real) for portion in portions]
    assert [weigh(terms, rows, portion, Counts()) for portion in portions] == [[1.0], [2.0]]


def test_several_losses_are_read_together() -> None:
    w = WEIGHT.clone().requires_grad_()
    losses = [(X[:6] @ w).square().mean(), (X[:6] @ w).sum()]
    assert [term.is_sum for term in read_terms(losses, 6, ROWS)] == [False, True]
    assert read_terms([*losses, X[:6] @ w], 6, ROWS) == [], "one of them is no number"


def test_terms_that_another_worker_does_not_have_are_noticed() -> None:
    w = WEIGHT.clone().requires_grad_()
    z = X[:6] @ w
    of_classes = [pack(read_terms([sum(z[:k].mean() for k in range(1, count))], 6, ROWS), 1.0) for count in (4, 5)]  # type: ignore[list-item]
    assert differ(of_classes)
    assert not differ(of_classes[:1] * 2)


def test_a_learned_weight_of_a_sum_and_a_mean_cannot_be_right_for_both() -> None:
    w = WEIGHT.clone().requires_grad_()
    portion = Portion(6, ROWS, 6, 2)
    for inner, disagrees in (((X[:6] @ w).exp().mean(), True), ((X[:6] @ w).exp().sum(), False)):
        terms = read_terms([w.mean() * ((X[:6] @ w).square().sum() + inner)], 6, ROWS)
        assert scalings(terms, weigh(terms, [pack(terms, 1.0)] * 2, portion, Counts()))[1] is disagrees


def test_a_weight_of_as_many_losses_as_there_are_samples_is_no_sample() -> None:
    weights = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    terms = read_terms(
        [(X[:6] @ WEIGHT.clone().requires_grad_()).exp().mean() * weights[0].exp() + weights[0]], 6, ROWS
    )
    assert [term.is_sum for term in terms] == [False]


def test_a_sum_that_cannot_be_read_is_named_beside_a_term_that_can() -> None:
    w = WEIGHT.clone().requires_grad_()
    z = X[:6] @ w
    by_class = torch.zeros(5).double().index_add(0, LABELS[:6].clamp(min=0), z.square().sum(1))
    assert [len(term.nodes) for term in read_terms([by_class.sum() + z.exp().mean()], 6, ROWS)].count(0) == 1


def test_a_constant_of_earlier_steps_is_one_where_a_short_batch_has_as_many_samples() -> None:
    known = Counts()
    for samples, factor in ((6, 2.0), (4, 2.0)):
        w = WEIGHT.clone().requires_grad_()
        terms = read_terms([(X[:samples] @ w).square().sum() / 4], samples, 2 * samples)
        portion = Portion(samples, 2 * samples, samples, 2)
        assert weigh(terms, [pack(terms, 1.0)] * 2, portion, known) == [factor]


def test_workers_that_add_up_the_same_samples_have_the_same_mark() -> None:
    def marked(rows: slice, reduction: str, weight: Tensor) -> int:
        loss = F.cross_entropy(X[rows] @ weight, LABELS[rows].clamp(min=0), reduction=reduction)
        return mark([loss], read_terms([loss], 6, ROWS))

    w = WEIGHT.clone().requires_grad_()
    first, second = slice(0, 6), slice(6, 12)
    assert marked(first, "sum", w) == marked(first, "sum", w) != marked(second, "sum", w)
    assert marked(first, "mean", w) == 0, "its count tells already what it weighs"
    nothing = torch.zeros_like(WEIGHT, requires_grad=True)
    assert marked(first, "sum", nothing) != marked(second, "sum", nothing)
