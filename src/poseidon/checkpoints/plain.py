"""Plain data, of which states consist: what containers are made of other items, and what is copied as a whole. Pure."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

_KEPT_CLASSES = (Counter, OrderedDict)
"""Of mappings that a state may need as they are, such as a scheduler's milestones; others become plain ones."""


def like_mapping(value: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return a mapping of these items, of the class of another one where that may matter."""
    return type(value)(items) if type(value) in _KEPT_CLASSES else items  # type: ignore[call-arg]


def like_sequence(value: Sequence[Any], items: Sequence[Any]) -> Sequence[Any]:
    """Return a list or tuple of these items, of the class of another one."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # type: ignore[call-arg]


def own_value(value: Any) -> Any:
    """Return a value that is no container of others and no tensor, such that nobody else changes it.

    NumPy's numbers become Python's, which every reader of a checkpoint knows.
    """
    if isinstance(value, set | bytearray):
        return copy.copy(value)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return value.item()
    return value
