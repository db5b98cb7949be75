"""Compiled and graphed parts of a model read parameters without ``__torch_function__``, so these must land before."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch._compile import _disable_dynamo as uncompiled
from torch.utils.hooks import RemovableHandle

from poseidon.engine.pending import land

__all__ = ["CompiledParts", "has_compiled_parts", "uncompiled"]
# ``uncompiled`` is torch.compiler.disable for functions; it imports the compiler with the first call instead of now.
# That takes as long as importing torch, and worker processes of other frameworks never need it.


def has_compiled_parts(module: nn.Module) -> bool:
    """Return whether the module or any part of it is compiled."""
    return any(
        _is_wrapped(part) or part._compiled_call_impl is not None or _is_graphed(part) for part in _parts_of(module)
    )


class CompiledParts:
    """Lands the parameters of a compiled part just before the part runs, so that the others may still travel."""

    def __init__(self) -> None:
        self._handles: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()

    def take_over(self, module: nn.Module) -> bool:
        """Return whether every compiled part of ``module`` now lands its parameters by itself.

        One that was compiled in place (``part.compile()``) cannot: its hooks are part of its graph. A module that is
        compiled as a whole needs all its parameters at once.
        """
        for part in _parts_of(module):
            is_wrapped = "_orig_mod" in part._modules  # as in _is_wrapped; not called, as there are many parts
            if part._compiled_call_impl is not None or (part is module and is_wrapped):
                return False
            if (is_wrapped or ("forward" in part.__dict__ and _is_graphed(part))) and part not in self._handles:
                self._handles[part] = part.register_forward_pre_hook(_land_part)
        return True

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


def _parts_of(module: nn.Module) -> list[nn.Module]:
    """Return the module and all parts of it, as they are now; asked in every step, so not by way of ``modules()``."""
    found = {module: None}
    waiting = [module]
    while waiting:
        for part in waiting.pop()._modules.values():
            if part is not None and part not in found:
                found[part] = None
                waiting.append(part)
    return list(found)


def _is_wrapped(module: nn.Module) -> bool:
    """Return whether ``torch.compile(module)`` made it."""
    return "_orig_mod" in module._modules


def _is_graphed(module: nn.Module) -> bool:
    """Return whether ``torch.cuda.make_graphed_callables`` made its forward."""
    return getattr(module.__dict__.get("forward"), "__module__", "") == "torch.cuda.graphs"


def _land_part(part: nn.Module, _: Any) -> None:
    land(*part.parameters())
