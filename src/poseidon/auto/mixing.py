"""Where the samples of a batch meet, so that parts of it cannot give what the whole does; read from a loss's graph.

Above the reduction over samples a loss must be linear: the root of a mean is not the mean of roots. Below it every
sample must go its own way: no statistics of the batch, no comparisons between samples. Sizes tell which axis has the
samples, so this may miss something where sizes coincide; it looks at several batches. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from poseidon.auto.arrangement import find_meeting, has_samples_in, shape_of
from poseidon.auto.reductions import PASSING, has_samples, joins_terms, sizes_of
from poseidon.auto.samplewise import ADDING, find_sample_losses

_LINEAR = PASSING | {
    "DiagonalBackward0",
    "ExpandBackward0",
    "IndexBackward0",
    "MaskedFillBackward0",
    "MaskedSelectBackward0",
    "PermuteBackward0",
    "SliceBackward0",
    "SplitBackward0",
    "TBackward0",
    "TransposeBackward0",
    "UnbindBackward0",
    "UnsafeViewBackward0",
    "WhereBackward0",
}
_WHOLE = {"DotBackward0", "MeanBackward0", "NansumBackward0", "SumBackward0"}
"""Linear in each sample, over all axes."""
_ALONG = {"MeanBackward1", "SumBackward1"}
"""Linear, over some axes."""
_BENT = {
    "AmaxBackward0",
    "AminBackward0",
    "CummaxBackward0",
    "CumminBackward0",
    "CumprodBackward0",
    "KthvalueBackward0",
    "LinalgVectorNormBackward0",
    "LogsumexpBackward0",
    "MaxBackward0",
    "MaxBackward1",
    "MedianBackward0",
    "MedianBackward1",
    "MinBackward0",
    "MinBackward1",
    "ModeBackward0",
    "NanmedianBackward0",
    "NanmedianBackward1",
    "NormBackward0",
    "NormBackward1",
    "ProdBackward0",
    "ProdBackward1",
    "StdBackward0",
    "StdMeanBackward0",
    "TopkBackward0",
    "VarBackward0",
    "VarMeanBackward0",
}
"""Reductions that are not linear."""
_MIXING = {"CumsumBackward0", "LogcumsumexpBackward0", "LogSoftmaxBackward0", "SoftmaxBackward0", "SortBackward0"}
"""Operations along an axis that keep its size."""
_NORMALISING = ("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "BatchNorm")
_PAIRING = ("Add", "Bmm", "Cdist", "Div", "EuclideanDist", "Expand", "Maximum", "Minimum", "Mm", "Mul", "Sub")
_ABOVE, _BENT_ABOVE, _BELOW = "above", "above, not linear", "below"
_NODES = 1500
"""Nodes to look at in one graph."""
NORMALISED = "batch normalisation takes the averages of each worker's part of a batch"


@dataclass(frozen=True)
class _Visit:
    node: Any
    where: str
    bent: str = ""
    """What is not linear above the reduction."""


def find_mixing(loss: Tensor, samples: int) -> list[str]:
    """Say in words where samples of a batch meet in a loss; nothing if they do not, or it cannot be told."""
    if loss.grad_fn is None or loss.numel() != 1 or samples < 2:
        return []
    return list(dict.fromkeys(_walk(loss.grad_fn, samples)))


def _walk(root: Any, samples: int) -> Iterator[str]:
    # Nodes themselves, not their ids: torch makes an object of a node when it is asked for, and frees it with the last
    # reference, so that another node may have its id next.
    waiting, known = [_Visit(root, _ABOVE)], set()
    searched: set[Any] = set()
    for _ in range(_NODES):
        if not waiting:
            return
        visit = waiting.pop()
        node, name = visit.node, visit.node.name()
        is_readable = name[-1].isdigit() or name.startswith("torch::")  # others are written in Python
        if (node, visit.where) in known or not is_readable:
            continue
        known.add((node, visit.where))
        children = [child for child, _ in node.next_functions if child is not None]
        if name.startswith(_NORMALISING):
            # Normalisation of instances is that of a batch of one with more channels.
            if getattr(node, "_saved_training", False) and shape_of(node)[:1] != (1,):
                yield NORMALISED
            waiting += [_Visit(child, _BELOW) for child in children]
            continue
        if visit.where == _ABOVE and node not in searched and (own := find_sample_losses(node, samples)) is not None:
            searched.update(own.others)
            waiting += [_Visit(child, _ABOVE) for child in own.others]
            waiting += [_Visit(source, _BELOW) for source in own.sources]
            continue
        if name in ADDING:
            searched.update(children)
        if met := find_meeting(node, samples):
            yield f"samples of a batch are compared with each other ({met})"
        is_linear = name in _WHOLE or name in _ALONG or getattr(node, "_saved_reduction", 0) in (1, 2)
        if _reduces(node, samples, visit.where != _BELOW) and not (
            visit.where != _BELOW and joins_terms(node, samples)
        ):
            if not is_linear:
                yield f"the {_word(node)} of a batch's samples is taken"
            elif visit.where == _BENT_ABOVE:
                yield f"the {visit.bent} of a sum or mean over samples is taken"
            elif visit.where == _BELOW:
                yield f"a {_word(node)} over a batch's samples is computed with again"
            elif _has_shares(node, samples):
                yield "samples are multiplied by weights that add up to one in each worker's part of a batch"
            waiting += [_Visit(child, _BELOW) for child in children]
        elif visit.where == _BELOW:
            if name in _MIXING and _axis(shape_of(node), samples) in _axes(node, len(shape_of(node))):
                yield f"a {_word(node)} over a batch's samples is taken"
            elif _compares(node, samples):
                yield f"samples of a batch are compared with each other ({_word(node)})"
            waiting += [_Visit(child, _BELOW) for child in children]
        else:
            waiting += _descend(visit, children, samples)


def _descend(visit: _Visit, children: Sequence[Any], samples: int) -> list[_Visit]:
    """Go on above the reduction."""
    name = visit.node.name()
    bent = _Visit(visit.node, _BENT_ABOVE, visit.bent or _word(visit.node))
    if name in _LINEAR or name in _WHOLE or name in _ALONG:
        return [_Visit(child, visit.where, visit.bent) for child in children]
    if name.startswith(("MulBackward", "DivBackward")):
        first, second = ([*(child for child, _ in visit.node.next_functions), None])[:2]
        is_below = second is not None and _has_reduction(second, samples)
        is_bent = is_below and (name.startswith("Div") or (first is not None and _has_reduction(first, samples)))
        if not is_bent:
            return [_Visit(child, visit.where, visit.bent) for child in children]
        word = visit.bent or ("quotient" if name.startswith("Div") else "product")
        return [_Visit(child, _BENT_ABOVE, word) for child in children]
    return [_Visit(child, bent.where, bent.bent) for child in children]


def _has_reduction(node: Any, samples: int) -> bool:
    waiting, known = [node], set()
    for _ in range(_NODES):
        if not waiting:
            return False
        inner = waiting.pop()
        if inner in known:
            continue
        known.add(inner)
        if _reduces(inner, samples):
            return True
        waiting += [child for child, _ in inner.next_functions if child is not None]
    return False


def _reduces(node: Any, samples: int, is_outermost: bool = False) -> bool:
    """Whether a node reduces over the samples of a batch."""
    name, sizes = node.name(), sizes_of(node)
    if getattr(node, "_saved_reduction", 0) in (1, 2):
        return is_outermost or _axis(sizes, samples) is not None
    if not sizes or not (name in _WHOLE or name in _ALONG or name in _BENT):
        return False
    axes = range(len(sizes)) if name in _WHOLE or not hasattr(node, "_saved_dim") else _axes(node, len(sizes))
    is_whole = len(axes) == len(sizes) and math.prod(sizes) > 1
    return (is_whole or _axis(sizes, samples) in axes) and has_samples(node, samples)


def _axes(node: Any, count: int) -> Sequence[int]:
    """Return the axes along which a node works; those counted from the end are stored as huge numbers."""
    axes = getattr(node, "_saved_dim", None)
    if axes is None or axes == ():
        return range(count)
    signed = [axis - (1 << 64) if axis >= 1 << 63 else axis for axis in ([axes] if isinstance(axes, int) else axes)]
    return [axis % count if count else 0 for axis in signed]


def _axis(sizes: Sequence[int], samples: int) -> int | None:
    """Return which axis has the samples, as far as sizes tell."""
    found = [axis for axis, size in enumerate(sizes) if size == samples]
    if found and found[0] and sizes[0] and sizes[0] % samples == 0:
        return None  # samples may be joined along the first axis, and another has as many by chance
    if len(found) == 1:
        return found[0]
    return 0 if not found and sizes and sizes[0] and sizes[0] % samples == 0 else None


def _compares(node: Any, samples: int) -> bool:
    """Whether a node makes a table of all pairs of samples, or a list."""
    sizes = shape_of(node)
    if node.name() == "PdistBackward0":
        return sizes_of(node)[0] % samples == 0 and has_samples(node, samples)
    if (
        not node.name().startswith(_PAIRING)
        or len(sizes) < 2
        or sizes[0] != sizes[1]
        or sizes[0] < 2
        or sizes[0] % samples
    ):
        return False
    children = [child for child, _ in node.next_functions if child is not None]
    if node.name() == "ExpandBackward0":
        return shape_of(children[0])[:2] == (1, sizes[1]) and has_samples_in(children[0], samples)
    plain = [_beneath(child) for child in children]
    pairs = [child for child in plain if shape_of(child)[:2] != sizes[:2]]
    return len(pairs) > 1 and len(pairs) == len(children) and sum(has_samples_in(child, samples) for child in pairs) > 1


def _beneath(node: Any) -> Any:
    """Look through what only repeats."""
    while node.name() in ("ExpandBackward0", "CloneBackward0", "UnsafeViewBackward0") and node.next_functions[0][0]:
        node = node.next_functions[0][0]
    return node


def _has_shares(node: Any, samples: int) -> bool:
    """Whether a sum is over samples times weights that add up to one."""
    inner = node.next_functions[0][0]
    if node.name() not in ("SumBackward0", "DotBackward0") or inner is None or not inner.name().startswith("Mul"):
        return False
    for name in ("_saved_self", "_saved_other"):
        weights = getattr(inner, name, None)
        if not isinstance(weights, Tensor) or weights.requires_grad or not weights.is_floating_point():
            continue
        if weights.numel() >= samples and math.isclose(float(weights.sum()), 1.0, abs_tol=1e-4):
            return True
    return False


def _word(node: Any) -> str:
    """Return what a node is called in a script, about."""
    word: str = node.name().split("Backward")[0].removeprefix("LinalgVector")
    return word.lower()
