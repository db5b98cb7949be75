"""Layer types by name: the built-in ones, and those a program registers."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable
from typing import TypeVar

from poseidon.caffe.layers.base import Layer
from poseidon.caffe.schema import LayerParameter
from poseidon.errors import ConfigError

log = logging.getLogger("poseidon.caffe")

_TYPES: dict[str, type[Layer]] = {}
_L = TypeVar("_L", bound=type[Layer])


def register(type_name: str) -> Callable[[_L], _L]:
    """Make a class available as ``type: "type_name"`` in prototxts; a type can be registered once."""

    def add(cls: _L) -> _L:
        if type_name in _TYPES:
            raise ConfigError(f"layer type {type_name!r} is already registered, by {_TYPES[type_name].__qualname__}")
        cls.type = type_name
        _TYPES[type_name] = cls
        return cls

    return add


def create(param: LayerParameter) -> Layer:
    """Return the layer that a LayerParameter describes."""
    cls = _TYPES.get(param.type)
    if cls is None:
        close = difflib.get_close_matches(param.type, _TYPES, n=3)
        hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        raise ConfigError(
            f"layer {param.name!r} has unknown type {param.type!r}; {hint}known types: {', '.join(sorted(_TYPES))}"
        )
    log.info("Creating layer %s", param.name)
    return cls(param)


def known_types() -> list[str]:
    """Return the names of all layer types, sorted."""
    return sorted(_TYPES)
