"""Where rows of different samples are computed with each other, because one side has them in another order. Pure.

Scripts take other samples of a batch as negatives by rolling, flipping or permuting what a model made of it, and
compare neighbours by slices. In a part of a batch these are other pairs than in the whole.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from poseidon.auto.reductions import has_samples, sizes_of

_JOINING = (
    "Add",
    "BinaryCrossEntropy",
    "Cat",
    "Div",
    "HuberLoss",
    "KlDiv",
    "Maximum",
    "Minimum",
    "MseLoss",
    "Mul",
    "SmoothL1Loss",
    "Sub",
)
"""Operations on rows of one tensor and those of another, place by place."""
_LONGEST = 30
"""Operations in a row that are looked through."""


def shape_of(node: Any) -> tuple[int, ...]:
    """Return the sizes of what a node gave in the forward."""
    known = getattr(node, "_input_metadata", None)
    return tuple(known[0].shape) if known else ()


def find_meeting(node: Any, samples: int) -> str:
    """Say how the rows of one operand were arranged that meets rows of other samples; empty if none does."""
    name, edges = node.name(), [edge for edge in node.next_functions if edge[0] is not None]
    if not name.startswith(_JOINING) or len(edges) < 2 or any(_is_single(*edge) for edge in edges):
        return ""
    if name.startswith("Cat") and node._saved_dim in (0, (1 << 64) - len(shape_of(node))):
        return ""
    orders = [_order(edge, samples) for edge in edges]
    if len(set(orders)) < 2 or not all(has_samples_in(child, samples) for child, _ in edges):
        return ""
    return next(str(order[0]) for order in orders if order)


def _is_single(node: Any, output: int) -> bool:
    known = getattr(node, "_input_metadata", ())
    return output >= len(known) or math.prod(known[output].shape) < 2


def has_samples_in(node: Any, samples: int) -> bool:
    """Whether what a node gave was computed from samples."""
    return None in [child for child, _ in node.next_functions] or has_samples(node, samples)


def _order(edge: tuple[Any, int], samples: int) -> tuple[Hashable, ...]:
    """Return how a tensor's rows were arranged last; nothing if they are samples in their order, as far as is known."""
    node, output = edge
    for _ in range(_LONGEST):
        if order := _arranged(node, output, samples):
            return order
        below = [edge for edge in node.next_functions if edge[0] is not None]
        if len(below) != 1:
            return ()
        ((node, output),) = below
    return ()


def _arranged(node: Any, output: int, samples: int) -> tuple[Hashable, ...]:
    name = node.name().split("Backward")[0]
    sizes = sizes_of(node) or shape_of(node)
    if sizes[:1] != (samples,) or samples in sizes[1:]:
        return ()  # another axis may be that of the samples
    if name in ("Roll", "Flip"):
        dims = tuple(node._saved_dims)
        is_first = 0 in dims or -len(sizes) in dims or (not dims and len(sizes) == 1)
        return (name.lower(), dims, getattr(node, "_saved_shifts", ())) if is_first else ()
    if name == "Slice" and node._saved_dim == 0 and shape_of(node) != sizes:
        return ("slice", node._saved_start, node._saved_end, node._saved_step)
    if name in ("Split", "SplitWithSizes") and node._saved_dim == 0 and len(node._input_metadata) > 1:
        return ("split", output)
    if name == "Index":
        return _chosen(node._saved_indices, samples)
    if name == "IndexSelect" and node._saved_dim == 0:
        return _chosen([node._saved_index], samples)
    return ()


def _chosen(indices: Sequence[Tensor | None], samples: int) -> tuple[Hashable, ...]:
    """Return which rows were chosen, unless it is each in its turn."""
    rows = indices[0]
    if rows is None or rows.ndim != 1:
        return ()
    numbers = rows.nonzero().squeeze(1) if rows.dtype in (torch.bool, torch.uint8) else rows % samples
    numbers = numbers.cpu()
    if torch.equal(numbers, torch.arange(samples, device="cpu")):
        return ()
    return ("index", numbers.numpy().tobytes())
