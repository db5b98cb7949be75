"""Compiled parts of a model: their graphs read parameters without ``__torch_function__``, so these must land before."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from poseidon.engine.pending import land


def has_compiled_parts(module: nn.Module) -> bool:
    """Return whether the module or any part of it is compiled."""
    return any(_is_wrapped(part) or part._compiled_call_impl is not None for part in module.modules())


class CompiledParts:
    """Lands the parameters of a compiled part just before the part runs, so that the others may still travel."""

    def __init__(self) -> None:
        self._handles: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()

    def take_over(self, module: nn.Module) -> bool:
        """Return whether every compiled part of ``module`` now lands its parameters by itself.

        One that was compiled in place (``part.compile()``) cannot: its hooks are part of its graph. A module that is
        compiled as a whole needs all its parameters at once.
        """
        parts = [part for part in module.modules() if _is_wrapped(part)]
        if module in parts or any(part._compiled_call_impl is not None for part in module.modules()):
            return False
        for part in parts:
            if part not in self._handles:
                self._handles[part] = part.register_forward_pre_hook(_land_part)
        return True

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


def _is_wrapped(module: nn.Module) -> bool:
    """Return whether ``torch.compile(module)`` made it."""
    return "_orig_mod" in module._modules


def _land_part(part: nn.Module, _: Any) -> None:
    land(*part.parameters())
