"""What a loss is a sum or a mean over, read from its graph, so that parts of a batch weigh what they do in the whole.

A loss is a combination of terms, each of which reduces many values to one. Where that is a mean over samples, the
workers' gradients weigh by their samples, and nothing here is needed. A sum over samples (``reduction="sum"``, or a
mean times the batch's size) must be added up. A mean over something else, such as the tokens that are not padding or
the weights of classes, weighs by how many each worker has. Graphs that cannot be read (compiled ones) count as means.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from poseidon.auto.samplewise import ADDING, find_sample_losses

PASSING = {
    "AddBackward0",
    "AddBackward1",
    "AliasBackward0",
    "CatBackward0",
    "CloneBackward0",
    "NegBackward0",
    "ReshapeAliasBackward0",
    "RsubBackward0",
    "RsubBackward1",
    "SelectBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "StackBackward0",
    "SubBackward0",
    "SubBackward1",
    "ToCopyBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
}
"""Operations on single values that pass a gradient on."""
_ELEMENTWISE = PASSING | {"AbsBackward0", "DivBackward0", "ExpBackward0", "MulBackward0", "PowBackward0", "TBackward0"}
_CHOOSING = {
    "IndexBackward0",
    "IndexSelectBackward0",
    "MaskedSelectBackward0",
    "SliceBackward0",
    "SplitBackward0",
    "SplitWithSizesBackward0",
}
_PRODUCTS = ("Addmm", "Addmv", "Baddbmm", "Bmm", "Convolution", "Dot", "Linear", "Mkldnn", "Mm", "Mv")
_NORMS = ("CudnnBatchNorm", "MiopenBatchNorm", "NativeBatchNorm", "NativeGroupNorm", "NativeLayerNorm")
_RECURRENT = ("CudnnRnn", "MiopenRnn")
_MEAN, _SUM = 1, 2
"""torch's numbers for reductions."""
_SUMS = ("SumBackward0", "SumBackward1", "NansumBackward0", "DotBackward0")
FEW = 200
"""Nodes to look at for one loss."""
SLOTS = 64
"""Terms that workers compare."""


@dataclass(frozen=True)
class LossTerm:
    """One reduction of a loss on one worker."""

    nodes: tuple[Any, ...]
    """The graph's nodes, where its gradient is scaled; none: a part that cannot be read, as a compiled one."""
    is_sum: bool = False
    """Whether it is a sum over samples, as long as :attr:`count` is not a count."""
    count: float | None = None
    """What the values are divided by, if not the number of samples."""
    is_count: bool = True
    """Whether :attr:`count` surely counts something of this worker's own part, and is not a constant."""
    is_times_samples: bool = False
    """Whether it is multiplied by the number of this worker's samples, as far as one worker can tell."""
    rows: int = 0
    """How many rows are added up, if it is a sum."""

    @property
    def form(self) -> int:
        """A number for what workers must have in common."""
        return 1 + self.is_sum + 2 * (self.count is not None)


class _Divisor(NamedTuple):
    value: float
    is_measured: bool
    """Whether the script computed it as a tensor."""


@dataclass(frozen=True)
class _Place:
    """A node of a loss's graph, and what lies above it."""

    node: Any
    factors: tuple[int, ...] = ()
    divisors: tuple[_Divisor, ...] = ()
    product: Any = None
    """The topmost product with a learned weight."""

    def below(self, node: Any) -> _Place:
        return replace(self, node=node)

    def seen_from(self, term: LossTerm) -> LossTerm:
        """Return a term with the nodes where its gradient is scaled."""
        return term if self.product is None else replace(term, nodes=(self.product,))


def read_terms(losses: Sequence[Tensor], samples: int, total: int) -> list[LossTerm]:
    """Return the terms of losses, or none if not all can be read; ``total`` is the number of all workers' samples."""
    found = []
    for loss in losses:
        if loss.grad_fn is None or loss.numel() != 1 or samples < 1:
            return []
        terms = list(_walk(loss.grad_fn, samples, total))
        if not terms:
            return []
        found += _sure_of_pieces(terms, samples, total)
    return found if len(found) <= SLOTS else []


def _sure_of_pieces(terms: Sequence[LossTerm], samples: int, total: int) -> list[LossTerm]:
    """See that a divisor of several sums is the number of all their rows, as where a loss is computed in pieces.

    Not the size of the whole batch, which as many sums over a part as there are workers have, too.
    """
    rows: Counter[float] = Counter()
    for term in terms:
        if term.is_sum and term.count is not None:
            rows[term.count] += term.rows
    sure = {count for count, number in rows.items() if count == number and not count == total != samples}
    return [
        replace(term, is_count=term.is_count or term.count in sure) if term.is_sum and term.count is not None else term
        for term in terms
    ]


def _walk(root: Any, samples: int, total: int) -> Iterator[LossTerm]:
    waiting = [_Place(root)]
    searched: set[Any] = set()
    """Parts of sums that were already searched for losses of single samples; not their ids, which others may get."""
    for _ in range(FEW):
        if not waiting:
            return
        place = waiting.pop()
        node, divisors = place.node, place.divisors
        name = node.name()
        children = [child for child, _ in node.next_functions if child is not None]
        if name.startswith(("MulBackward", "DivBackward")) and len(children) == 1:
            number = _constant(node)
            if number is not None and name.startswith("Div"):
                place = replace(place, divisors=(*divisors, _Divisor(float(number), _is_measured(node))))
            elif isinstance(number, int):  # a batch's size is one; most weights of losses are not
                place = replace(place, factors=(*place.factors, number))
            waiting.append(place.below(children[0]))
        elif (weighed := _learned_weight(node, children, samples)) is not None:
            # The weight gets a gradient as well, so that the product is what must be scaled.
            waiting.append(replace(place.below(weighed), product=place.product or node))
        elif node not in searched and (own := find_sample_losses(node, samples)) is not None:
            searched.update(own.others)
            waiting += [place.below(child) for child in own.others]
            yield place.seen_from(_divided(LossTerm(own.nodes, is_sum=True), divisors, (samples,), samples, total))
        elif name in PASSING or joins_terms(node, samples) or _chooses_terms(node):
            waiting += [place.below(child) for child in children]
            if name in ADDING:
                searched.update(children)
        elif (term := _term(node, samples)) is not None:
            if term.is_sum:
                yield place.seen_from(_divided(term, divisors, sizes_of(node), samples, total))
            else:
                is_times_samples = any(factor == samples != total for factor in place.factors)
                yield place.seen_from(replace(term, is_times_samples=is_times_samples))
        elif _is_python(name) or _hides_a_sum(node, samples):
            yield LossTerm(())


def _learned_weight(node: Any, children: Sequence[Any], samples: int) -> Any:
    """Return the loss that a node multiplies with, or divides by, what was computed from parameters alone; or None."""
    if not node.name().startswith(("MulBackward", "DivBackward")) or len(children) != 2 or not _is_scalar(node):
        return None
    losses = [child for child in children if _is_of_samples(child, samples)]
    is_divisor = node.name().startswith("Div") and losses == [children[1]]
    return None if len(losses) != 1 or is_divisor else losses[0]


def _is_of_samples(node: Any, samples: int) -> bool:
    """Whether a value was computed from samples, by its own node or those below."""
    return _is_python(node.name()) or has_samples(SimpleNamespace(next_functions=((node, 0),)), samples)


def _is_scalar(node: Any) -> bool:
    return all(math.prod(known.shape) == 1 for known in node._input_metadata)


def _chooses_terms(node: Any) -> bool:
    """Whether a node passes single values on, or zero in their place, as where a loss is no number."""
    return node.name() in ("WhereBackward0", "MaskedFillBackward0") and _is_scalar(node)


def _hides_a_sum(node: Any, samples: int) -> bool:
    """Whether a part that was not understood is a sum, of something that comes from samples."""
    return (getattr(node, "_saved_reduction", None) == _SUM or node.name() in _SUMS) and (
        _reduced_before(node, samples) != "MeanBackward1" and has_samples(node, samples)
    )


def _term(node: Any, samples: int) -> LossTerm | None:
    """Return what a node reduces; None: it is no reduction, or not one over samples."""
    reduction = getattr(node, "_saved_reduction", None)
    sizes = sizes_of(node)
    if reduction == _MEAN and hasattr(node, "_saved_total_weight"):
        return LossTerm((node,), count=float(node._saved_total_weight))
    if reduction == _MEAN or node.name() == "MeanBackward0":
        # The elements may be chosen by a mask, so that workers have different numbers of them.
        is_chosen = reduction == _MEAN or has_samples(node, samples)
        return LossTerm((node,), count=float(math.prod(sizes)) if sizes and is_chosen else None)
    if not (reduction == _SUM or node.name() in _SUMS) or not sizes:
        return None
    before = _reduced_before(node, samples)
    is_odd = before is None and sizes[0] % samples != 0 and samples not in sizes
    if is_odd and not _is_of_chosen(node, sizes[0], samples):
        return None
    is_over_samples = before != "MeanBackward1" and has_samples(node, samples)
    return LossTerm((node,), is_sum=True, rows=sizes[0]) if is_over_samples else None


def _is_of_chosen(node: Any, rows: int, samples: int) -> bool:
    """Whether the rows that a sum adds up were chosen from samples or their tokens, by a mask, say."""
    waiting = [child for child, _ in node.next_functions if child is not None]
    for _ in range(FEW):
        if not waiting:
            return False
        inner = waiting.pop()
        if all(tuple(known.shape)[:1] != (rows,) for known in inner._input_metadata):
            continue
        sizes = sizes_of(inner)
        if inner.name() in _CHOOSING and sizes:
            return sizes[0] % samples == 0 or samples in sizes
        waiting += [child for child, _ in inner.next_functions if child is not None]
    return False


def _divided(term: LossTerm, divisors: Sequence[_Divisor], sizes: Sequence[int], samples: int, total: int) -> LossTerm:
    """Note by what a sum is divided, and whether that is a number of its own samples or tokens."""
    products = {math.prod(sizes[: place + 1]) for place in range(len(sizes))} | {samples}
    for divisor, is_measured in divisors:
        # Constants of a script are numbers; a whole number in a tensor was counted, perhaps over several batches.
        if is_measured and divisor == int(divisor):
            return replace(term, count=0.0 if divisor == 1 and _is_masked_out(term.nodes[0]) else divisor)
    for divisor, _ in divisors:
        # The size of the whole batch is a constant of the script, unless workers differ.
        if (divisor in products or divisor == 2 * samples) and not divisor == total != samples:
            return replace(term, count=divisor)
    if not divisors:
        return term
    # As many elements as a mask has chosen, or a constant, such as a half or the steps that are accumulated.
    small = [divisor for divisor, _ in divisors if divisor == int(divisor) and 1 < divisor <= sizes[0]]
    return replace(term, count=(small or [divisors[0].value])[0], is_count=False)


def _is_masked_out(node: Any) -> bool:
    """Whether a sum is over nothing but zeros: scripts then divide by one instead of none."""
    inner = node.next_functions[0][0]
    if inner is None or not inner.name().startswith("MulBackward"):
        return False
    masks = [getattr(inner, name, None) for name in ("_saved_self", "_saved_other")]
    return any(isinstance(mask, Tensor) and not mask.requires_grad and not mask.any() for mask in masks)


def joins_terms(node: Any, samples: int) -> bool:
    """Whether a node adds up or averages several terms of a loss, each a single value."""
    if node.name() not in ("SumBackward0", "MeanBackward0"):
        return False
    sizes = sizes_of(node)
    child = node.next_functions[0][0]
    # Rows of several values each are no terms, but what was chosen of each sample, say.
    is_joint = child is not None and child.name() in ("StackBackward0", "CatBackward0")
    is_joint = is_joint and len(sizes) == 1 and len(child.next_functions) == sizes[0]
    return not sizes or (is_joint and tuple(sizes) != (samples,))


def has_samples(node: Any, samples: int) -> bool:
    """Whether what is summed was computed from samples, and not from parameters alone, as a penalty is.

    Samples enter where a parameter is multiplied with something that needs no gradient, or looked up in. Penalties are
    small: what goes on for long is a network.
    """
    waiting = [child for child, _ in node.next_functions]
    for _ in range(FEW):
        if not waiting:
            return False
        inner = waiting.pop()
        if inner is None:
            continue
        name, children = inner.name(), [child for child, _ in inner.next_functions]
        if name.startswith(("Embedding", "Cdist", *_RECURRENT)) or (name.startswith(_PRODUCTS) and None in children):
            return True
        if _is_python(name) or (name.startswith(_NORMS) and children[0] is None):
            return True
        if name.startswith("MulBackward") and None in children and samples in _other_sizes(inner):
            return True
        if any(samples in sizes for sizes in _index_sizes(inner)):
            return True
        waiting += children
    return True


def _reduced_before(node: Any, samples: int) -> str | None:
    """Return how samples were already reduced where only columns are summed: the name of that node."""
    children = [child for child, _ in node.next_functions if child is not None]
    for _ in range(FEW):
        if len(children) != 1:
            return None
        inner = children[0]
        name = inner.name()
        if name in ("MeanBackward1", "SumBackward1"):
            sizes, axes = sizes_of(inner), getattr(inner, "_saved_dim", ())
            axes = [axes] if isinstance(axes, int) else list(axes)
            # An axis counted from the end is stored as a huge number.
            first = {0, (1 << 64) - len(sizes), -len(sizes)}
            if sizes and sizes[0] % samples == 0 and first & set(axes):
                return str(name)
        elif name not in _ELEMENTWISE:
            return None
        children = [child for child, _ in inner.next_functions if child is not None]
    return None


def _is_python(name: str) -> bool:
    """Whether a node was written in Python, as compiled graphs and our own layers that hand over factors are."""
    return not name[-1].isdigit() and "AccumulateGrad" not in name


def _index_sizes(node: Any) -> Iterator[Sequence[int]]:
    """Give the sizes of what a node looks up by."""
    indices = getattr(node, "_saved_indices", None)
    for saved in (getattr(node, "_saved_index", None), *(indices if isinstance(indices, tuple | list) else ())):
        if isinstance(saved, Tensor):
            yield tuple(saved.shape)


def _other_sizes(node: Any) -> Sequence[int]:
    saved = getattr(node, "_saved_other" if node.next_functions[0][0] is not None else "_saved_self", None)
    return tuple(saved.shape) if isinstance(saved, Tensor) else ()


def sizes_of(node: Any) -> Sequence[int]:
    """Return the sizes of what a node reduces."""
    if hasattr(node, "_saved_self_sym_sizes"):
        return tuple(node._saved_self_sym_sizes)
    saved = getattr(node, "_saved_self", None)
    if not isinstance(saved, Tensor):
        saved = getattr(node, "_saved_tensor", None)
    return tuple(saved.shape) if isinstance(saved, Tensor) else ()


def _constant(node: Any) -> int | float | None:
    """Return the number that a node multiplies with, or divides by."""
    is_first = node.next_functions[0][0] is not None
    saved = getattr(node, "_saved_other" if is_first else "_saved_self", None)
    if isinstance(saved, Tensor):
        saved = saved.item() if saved.numel() == 1 else None
    return saved if isinstance(saved, int | float) else None


def _is_measured(node: Any) -> bool:
    """Whether a divisor is a tensor of the script's, and not a number, which torch keeps as a tensor too."""
    saved = getattr(node, "_saved_other", None)
    if not isinstance(saved, Tensor):
        return False
    # Numbers do not promote a type.
    small = torch.float16 if saved.is_floating_point() else torch.int8
    return torch.result_type(torch.ones((), dtype=small, device=saved.device), saved) != small
