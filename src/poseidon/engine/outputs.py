"""What a forward returns: its tensors, however nested, and the parameters they do not depend on."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.utils.rnn import PackedSequence

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    np.ndarray,
    np.generic,
    Enum,
)


def tensors_in(value: Any, opaque: list[Any] | None = None) -> list[Tensor]:
    """Return the tensors in nested tuples, lists, dicts and dataclasses, in order.

    Other objects cannot be searched; those that may hold tensors are added to ``opaque``.
    """
    found: list[Tensor] = []
    waiting = [value]
    while waiting:  # a loop and no generator: it runs in every forward
        one = waiting.pop()
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, list | tuple | set | frozenset):
            waiting += [*one][::-1]
        elif isinstance(one, dict) or isinstance(one, Mapping):  # noqa: SIM101 - the first is much faster
            waiting += [*one.values()][::-1]
        elif dataclasses.is_dataclass(one) and not isinstance(one, type):
            waiting += [getattr(one, field.name) for field in dataclasses.fields(one)][::-1]
        elif opaque is not None and not isinstance(one, _PLAIN):
            opaque.append(one)
    return found


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of nested tuples, lists and dicts with every tensor changed; other objects pass through.

    The lengths in a packed sequence stay as they are: torch wants them on the CPU.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, PackedSequence):
        orders = (None if one is None else change(one) for one in (value.sorted_indices, value.unsorted_indices))
        return type(value)(change(value.data), value.batch_sizes, *orders)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, dict):
        changed = copy.copy(value)  # an ordered one, or one with defaults, stays what it is
        for key, item in value.items():
            changed[key] = map_tensors(item, change)
        return changed
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
