"""Losses that a script computes for one sample after another and adds up, found in a loss's graph. Pure.

Detectors do so: every image has its own boxes. Such a loss takes its sample out of what the network gave for the whole
batch (``for scores, target in zip(logits, targets)``), and that is how it is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

ADDING = {"AddBackward0", "AliasBackward0", "CloneBackward0", "SqueezeBackward0", "ToCopyBackward0", "ViewBackward0"}
"""Operations of which a chain of additions consists."""
_GIVING = ("Addmm", "Linear", "Mm", "UnsafeView", "View")
"""What gives a row for each sample; stacks and transposed tensors may have something else along their first axis."""
_FEW = 100
"""Nodes to look at below one summand."""
_MANY = 400
"""Summands of one loss."""


@dataclass(frozen=True)
class SampleLosses:
    """A sum of which some parts belong to one sample each."""

    nodes: tuple[Any, ...]
    """What gave those parts."""
    others: tuple[Any, ...]
    """What gave the rest."""
    sources: tuple[Any, ...]
    """What gave the whole batch, from which the samples were taken."""


def find_sample_losses(node: Any, samples: int) -> SampleLosses | None:
    """Return the parts of a sum, or a single part, if any belongs to one sample; None otherwise."""
    nodes, others, sources = [], [], {}
    for summand in _summands(node):
        taken = list(_takings(summand, samples))
        # What takes several samples, or one among other things, is itself a sum of parts, or no loss of one sample.
        if len({number for number, _ in taken}) == 1 and not (samples == 1 and _is_scaled_sum(summand)):
            nodes.append(summand)
            sources.update({id(source): source for _, source in taken})
        else:
            others.append(summand)
    return SampleLosses(tuple(nodes), tuple(others), tuple(sources.values())) if nodes else None


def _summands(node: Any) -> Iterator[Any]:
    """Give what a chain of additions adds up."""
    waiting = [node]
    for _ in range(_MANY):
        if not waiting:
            return
        inner = waiting.pop()
        children = [child for child, _ in inner.next_functions if child is not None]
        if inner.name() in ADDING and children and _is_single(inner):
            waiting += children
        else:
            yield inner


def _takings(node: Any, samples: int) -> Iterator[tuple[int, Any]]:
    """Give where a sample is taken out of a batch below a node: its number, and the node that gave the batch."""
    waiting, known = [(node, 0)], set()
    for _ in range(_FEW):
        if not waiting:
            return
        inner, output = waiting.pop()
        if (inner, output) in known:
            continue
        known.add((inner, output))
        source = inner.next_functions[0][0] if inner.next_functions else None
        if source is not None and (number := _taken(inner, output, source, samples)) is not None:
            yield number, source
        else:
            waiting += [(child, number) for child, number in inner.next_functions if child is not None]


def _taken(node: Any, output: int, source: Any, samples: int) -> int | None:
    """Return which of a batch's samples an output of a node is; None: it is no single one."""
    name = node.name()
    if name == "SelectBackward0":
        number, count = node._saved_index % samples, node._saved_self_sym_sizes[0]
    elif name == "UnbindBackward0" or (name == "SplitBackward0" and node._saved_split_size == 1):
        number, count = output, len(node._input_metadata)
    else:
        return None
    if node._saved_dim != 0 or count != samples or source.name().endswith("AccumulateGrad"):
        return None  # of a tensor that is trained itself, such as the weights of as many losses
    shape = node._input_metadata[0].shape
    rest = shape[1:] if name == "SplitBackward0" else shape
    # One of as many time steps, or heads, has an axis of samples left.
    is_doubtful = len(rest) > 0 and rest[0] == samples and not source.name().startswith(_GIVING)
    return None if is_doubtful else number


def _is_scaled_sum(node: Any) -> bool:
    """Whether a sum is multiplied or divided: with a single sample, nothing else tells its parts from the whole."""
    while node.name().startswith(("DivBackward", "MulBackward")) and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return bool(node.name() == "AddBackward0")


def _is_single(node: Any) -> bool:
    known: Sequence[Any] = getattr(node, "_input_metadata", ())
    return len(known) == 1 and all(size == 1 for size in known[0].shape)
