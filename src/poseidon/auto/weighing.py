"""What the terms of a loss weigh, from what all workers say of theirs.

Each packs its terms, as :mod:`poseidon.auto.reductions` reads them, into numbers that are gathered. From all of them a
worker computes factors for its own terms, so that the mean of the workers' gradients is that of the whole batch.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from poseidon.auto.reductions import FEW, SLOTS, LossTerm

_SURE = 8
"""Added to a term's form if its count is one for sure."""
_TIMES = 16
"""Added if it is multiplied by the number of samples."""


@dataclass(frozen=True)
class Portion:
    """One worker's part of a batch."""

    samples: int
    """Samples that it has, repeated ones too."""
    total: int
    """Samples of all parts that count."""
    added: int
    """Its samples that count."""
    workers: int

    @property
    def real(self) -> float:
        """The share of its samples that counts."""
        return self.added / self.samples if self.samples else 1.0

    @property
    def weight(self) -> float:
        """Factor of a mean over samples."""
        return self.added * self.workers / self.total if self.total else 1.0


def pack(terms: Sequence[LossTerm], real: float) -> list[int]:
    """Return what the workers tell each other: always as many numbers. ``real`` is the share of samples that counts."""
    words = [_bits(real)]
    for term in terms:
        words += [term.form + _SURE * term.is_count + _TIMES * term.is_times_samples, _bits(term.count or 0.0)]
    return words + [0, 0] * (SLOTS - len(terms))


def mark(losses: Sequence[Tensor], terms: Sequence[LossTerm]) -> int:
    """Return a number that workers have in common only where they add up the same samples; 0 if all are means."""
    if terms and all(term.nodes and not term.is_sum for term in terms):
        return 0
    # Targets as well: a network that begins with zeros says the same of all samples.
    waiting, targets = [loss.grad_fn for loss in losses], []
    for _ in range(FEW):
        if not waiting:
            break
        node = waiting.pop()
        targets.append(getattr(node, "_saved_target", None))
        waiting += [child for child, _ in getattr(node, "next_functions", ()) if child is not None]
    parts = [*losses, *(target for target in targets if isinstance(target, Tensor))]
    words = [part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for part in parts]
    return 1 + zlib.crc32(b"".join(words))


class Counts:
    """Which divisors count something, by what they were so far; the same on all workers."""

    def __init__(self) -> None:
        self._varied: set[tuple[int, ...]] = set()
        self._constants: set[tuple[float, ...]] = set()
        """Those that were no number of the loss's rows."""

    def is_count(self, forms: Sequence[int], number: int, words: Sequence[tuple[int, float]]) -> bool:
        """Return whether the divisor of a term is a count, and not a constant of the script."""
        if len({round(count, 6) for _, count in words}) > 1:
            self._varied.add((number, *forms))
        if (number, *forms) in self._varied:
            return True
        constant = (words[0][1], number, *forms)
        if not all(word & _SURE for word, _ in words):
            self._constants.add(constant)
        # In a shorter batch there may be as many samples as a constant says.
        return constant not in self._constants


def weigh(terms: Sequence[LossTerm], rows: Sequence[Sequence[int]], portion: Portion, known: Counts) -> list[float]:
    """Return a factor for each term, so that the workers' mean is the whole batch's; ``rows`` are what all packed.

    Workers whose graphs differ cannot compare, but where all is divided by one count of each; then what is surely
    divided by a count is a mean over samples.
    """
    reals = [_float(row[0]) for row in rows]
    forms = [[word % _SURE for word in row[1::2]] for row in rows]
    is_alike = all(each == forms[0] for each in forms)
    common = 0.0 if is_alike else _common_total(rows, reals)
    factors = []
    for number, term in enumerate(terms):
        words = [(row[2 * number + 1], _float(row[2 * number + 2])) for row in rows]
        total = math.fsum(count * real for (_, count), real in zip(words, reals, strict=True))
        has_count = term.count is not None and is_alike and total > 0
        if common:
            factor = (term.count or 0.0) * portion.real * portion.workers / common
        elif has_count and (not term.is_sum or known.is_count(forms[0], number, words)):
            factor = (term.count or 0.0) * portion.real * portion.workers / total
        else:
            is_divided = not is_alike and term.count is not None and term.is_count
            factor = portion.real * portion.workers if term.is_sum and not is_divided else portion.weight
        if math.isclose(factor, portion.weight):
            factor = portion.weight
        # Of a single sample nobody can tell it from a factor of 1, so that another worker must have more.
        is_times = term.is_times_samples and is_alike and all(word & _TIMES for word, _ in words)
        if is_times and (portion.samples > 1 or portion.total > portion.workers):
            factor *= portion.total / portion.samples
        factors.append(factor)
    return factors


def differ(rows: Sequence[Sequence[int]]) -> bool:
    """Whether the workers' losses have other terms, so that nobody can say which of them belong together."""
    forms = [[word % _SURE for word in row[1::2]] for row in rows]
    return any(each != forms[0] for each in forms) and None in map(_common_count, rows)


def _common_total(rows: Sequence[Sequence[int]], reals: Sequence[float]) -> float:
    """Return by what all terms of all workers' losses together are divided; 0 if not all are sums divided so."""
    counts = [_common_count(row) for row in rows]
    return 0.0 if None in counts else math.fsum(map(math.prod, zip(counts, reals, strict=True)))  # type: ignore[arg-type]


def _common_count(row: Sequence[int]) -> float | None:
    """Return by what all terms of a worker's loss are divided, if all are sums and that is a count."""
    words = [(word, count) for word, count in zip(row[1::2], row[2::2], strict=True) if word]
    is_one = len(set(words)) == 1 and words[0][0] == 2 + 2 + _SURE
    return _float(words[0][1]) if is_one else None


def scalings(terms: Sequence[LossTerm], factors: Sequence[float]) -> tuple[dict[Any, float], bool]:
    """Return by what each node's gradient is scaled, and whether terms that share a node disagree about it."""
    found: dict[Any, float] = {}
    disagrees = False
    for term, factor in zip(terms, factors, strict=True):
        for node in term.nodes:
            disagrees |= not math.isclose(found.setdefault(node, factor), factor)
    return found, disagrees


def describe(term: LossTerm, factor: float, portion: Portion) -> str:
    """Say in words what a term was taken for."""
    hint = "(--loss mean takes it for a mean over samples)"
    if term.is_times_samples:
        return f"the loss is multiplied by a batch's size: it counts as a sum over samples {hint}"
    if term.is_sum and math.isclose(factor, portion.real * portion.workers):
        adds = "the workers' gradients are added up"
        if term.count is None:
            return (
                f"the loss is a sum over samples: {adds} (--loss mean takes it for a mean over samples, as it must be "
                "where the script divides gradients or its learning rate by a batch's size itself)"
            )
        return (
            "the loss is a sum over samples, divided by a number that counts as a constant, because it is the same on "
            f"all workers and not the size of their parts: {adds} (--loss mean takes it for a mean over samples, as it "
            "must be where the script counts that number in the batches it gets, such as those of an accumulated step)"
        )
    return f"the loss is a mean over targets or their weights: workers weigh by how many they have {hint}"


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
