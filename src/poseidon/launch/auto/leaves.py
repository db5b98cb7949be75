"""Tensors that a backward will give gradients to, found by walking the graph: for scripts without an optimizer."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import Node


def find_leaves(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves of the graph behind ``outputs``, in an order that follows from the graph alone."""
    found: dict[int, Tensor] = {}
    seen: set[Node] = set()
    stack = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.setdefault(id(leaf), leaf)
        stack.extend(following for following, _ in node.next_functions if following is not None)
    return list(found.values())
