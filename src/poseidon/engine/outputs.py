"""What a forward returns: its tensors, however nested, and the parameters they do not depend on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists, dicts and dataclasses; other objects are opaque."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of nested tuples, lists and dicts with every tensor changed; other objects pass through."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    if type(value) is dict:
        return {key: map_tensors(item, change) for key, item in value.items()}
    return value


def find_leaves(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves of the autograd graph behind ``outputs``, in an order that depends only on the graph."""
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


def unreached(outputs: Sequence[Tensor], parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that no output depends on."""
    reached = {id(leaf) for leaf in find_leaves(outputs)}
    reached.update(id(tensor) for tensor in outputs if isinstance(tensor, nn.Parameter))
    return [parameter for parameter in parameters if id(parameter) not in reached]


def move_to(device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function that moves a tensor to ``device``, asynchronously where possible."""
    return lambda tensor: tensor.to(device, non_blocking=True)
