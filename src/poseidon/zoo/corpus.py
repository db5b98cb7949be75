"""Real text that every Python brings along: the language reference that ``help()`` shows, as numbers of characters."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import import_module

import torch
from torch import Tensor

BLOCK = 2000
"""Characters that stay together when the text is dealt."""
VALIDATION_EVERY = 10
"""One block in so many is kept for validation, so that both parts hold all subjects."""


@dataclass(frozen=True)
class Corpus:
    """A text in two parts, each a vector of character numbers."""

    characters: str
    """The vocabulary: number ``n`` stands for ``characters[n]``."""
    training: Tensor
    validation: Tensor
    digest: str
    """Tells texts of different Python versions apart; results compare only where it is the same."""


@cache
def load_corpus() -> Corpus:
    """Return the topics of ``pydoc_data``, in order of their names; the same for the same version of Python."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    return make_corpus("\n".join(topics[name] for name in sorted(topics)))


def make_corpus(text: str) -> Corpus:
    """Cut a text into blocks, deal them into the two parts, and number its characters."""
    characters = "".join(sorted(set(text)))
    number_of = {character: number for number, character in enumerate(characters)}
    numbers = torch.tensor([number_of[character] for character in text], dtype=torch.long)
    blocks = numbers.split(BLOCK)
    kept = [block for place, block in enumerate(blocks) if (place + 1) % VALIDATION_EVERY == 0]
    others = [block for place, block in enumerate(blocks) if (place + 1) % VALIDATION_EVERY]
    nothing = numbers[:0]
    return Corpus(
        characters,
        torch.cat(others or [nothing]),
        torch.cat(kept or [nothing]),
        hashlib.sha256(text.encode()).hexdigest()[:12],
    )
