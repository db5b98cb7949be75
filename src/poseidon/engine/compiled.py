"""Compiled and graphed parts of a model read parameters without ``__torch_function__``.

So whatever is due to their parameters is done just before such a part runs, whoever calls it. Scripted parts read them
in many ways (other methods, ``save``), so nothing may ever be due to theirs. PyTorch's transformers ask, in an
evaluation, whether a parameter sees operations, and compute in another way if one does; so it is done before they ask.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo as uncompiled
from torch.jit import ScriptModule

from poseidon.engine.classes import Replacement

__all__ = ["CompiledParts", "has_compiled_parts", "has_scripted_parts", "uncompiled"]
# ``uncompiled`` is torch.compiler.disable for functions; it imports the compiler with the first call instead of now.
# That takes as long as importing torch, and worker processes of other frameworks never need it.


_ASKING = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Modules whose faster way gives other last bits, and zeros for what is padded."""
_OURS = ("engine", "joining", "routes", "sums", "tables", "team", "wire")
"""Rooms and files of which no graph may hold anything."""
is_kept_out = False
"""Whether :func:`keep_out` was called."""


def keep_out() -> None:
    """Have torch's compiler leave our work alone; call it once ``torch._dynamo`` is imported.

    A compiled function that holds a whole step would otherwise compile what hooks do in its backward, and what
    ``step()`` does.
    """
    global is_kept_out
    is_kept_out = True
    from torch._dynamo import trace_rules

    for name in _OURS:
        trace_rules.add(f"poseidon.{name}")


def has_compiled_parts(module: nn.Module) -> bool:
    """Return whether the module or any part of it is compiled, graphed or scripted."""
    return bool(_find_compiled(module))


def has_scripted_parts(module: nn.Module) -> bool:
    """Return whether the module or any part of it is scripted or traced."""
    return any(isinstance(part, ScriptModule) for part in module.modules())


class CompiledParts:
    """Lands the parameters of a compiled part just before the part runs, so that the others may still travel."""

    def __init__(self) -> None:
        self._taken: weakref.WeakKeyDictionary[nn.Module, Callable[[], None]] = weakref.WeakKeyDictionary()
        self._evaluated: list[_Evaluated] = []

    def take_asking(self, module: nn.Module) -> None:
        """Let every part that asks whether parameters see operations put them in place before an evaluation."""
        for part in module.modules():
            if isinstance(part, _ASKING) and (part._compiled_call_impl is None or _is_evaluated(part)):
                evaluated = _EVALUATED[part] if _is_evaluated(part) else _Evaluated(part)
                evaluated.users += 1
                self._evaluated.append(evaluated)

    def take_over(self, module: nn.Module) -> None:
        """Let every compiled part of ``module``, as they are now, put its parameters in place by itself."""
        for part in _find_compiled(module):
            is_in_place = part._compiled_call_impl is not None
            is_new = part not in self._taken or (is_in_place and not isinstance(part._compiled_call_impl, _Opening))
            if is_new and not isinstance(part, ScriptModule):
                self._taken[part] = _open_in_call(part) if is_in_place else _open_before(part)

    def close(self) -> None:
        """Leave the parts as they were."""
        for undo in self._taken.values():
            undo()
        self._taken.clear()
        for evaluated in self._evaluated:
            evaluated.undo()
        self._evaluated.clear()


class _Opening:
    """The compiled call of a part, which puts its parameters in place first: a hook would be part of its graph."""

    def __init__(self, part: nn.Module, call: Callable[..., Any]) -> None:
        self.users = 0
        """Distributed models may share a part."""
        self._part = weakref.ref(part)
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        part = self._part()
        assert part is not None, "a module that is gone was called"
        _open_part(part)
        return self._call(*args, **kwargs)

    def undo(self) -> None:
        """Leave the part as it was, after the last user, unless it was compiled anew."""
        self.users -= 1
        part = self._part()
        if not self.users and part is not None and part._compiled_call_impl is self:
            part._compiled_call_impl = self._call


class _Evaluated:
    """A part that asks, with a call of ours, which ``nn.Module`` looks for first.

    A hook would keep it from its faster way.
    """

    def __init__(self, part: nn.Module) -> None:
        self.users = 0
        """Distributed models may share a part."""
        self._part = weakref.ref(part)
        self._call = part._compiled_call_impl = _opening_evaluations(self._part)
        _EVALUATED[part] = self

    def is_in_place(self, part: nn.Module) -> bool:
        """Return whether the part has not been compiled since."""
        return part._compiled_call_impl is self._call

    def undo(self) -> None:
        """Leave the part as it was, after the last user, unless it has been compiled."""
        self.users -= 1
        part = self._part()
        if self.users or part is None:
            return
        _EVALUATED.pop(part, None)
        if self.is_in_place(part):
            del part._compiled_call_impl


_EVALUATED: weakref.WeakKeyDictionary[nn.Module, _Evaluated] = weakref.WeakKeyDictionary()


def _opening_evaluations(found: weakref.ref[nn.Module]) -> Callable[..., Any]:
    # A function: what else is there would keep torch.jit.script from the part.
    def call(*args: Any, **kwargs: Any) -> Any:
        part = found()
        assert part is not None, "a module that is gone was called"
        if not (part.training or torch.is_grad_enabled()):
            _open_part(part)
        return part._call_impl(*args, **kwargs)

    return call


def _is_evaluated(part: nn.Module) -> bool:
    evaluated = _EVALUATED.get(part)
    return evaluated is not None and evaluated.is_in_place(part)


def _open_in_call(part: nn.Module) -> Callable[[], None]:
    call = part._compiled_call_impl
    assert call is not None
    opening = call if isinstance(call, _Opening) else _Opening(part, call)
    opening.users += 1
    part._compiled_call_impl = opening
    return opening.undo


def _open_before(part: nn.Module) -> Callable[[], None]:
    return part.register_forward_pre_hook(_open_part).remove


def _open_part(part: nn.Module, _: Any = None) -> None:
    for parameter in part.parameters():
        if isinstance(parameter, Replacement):
            parameter._poseidon_open()


def _find_compiled(module: nn.Module) -> list[nn.Module]:
    """Return the compiled parts, as they are now, that are in no other; asked in every step, so all in line."""
    found: list[nn.Module] = []
    seen = {module}
    waiting = [module]
    while waiting:
        part = waiting.pop()
        if (
            isinstance(part, ScriptModule)
            # By part.compile().
            or (part._compiled_call_impl is not None and not _is_evaluated(part))
            or "_orig_mod" in part._modules  # by torch.compile(part)
            or ("forward" in part.__dict__ and _has_compiled_forward(part))
        ):
            found.append(part)
            continue
        for child in part._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    return found


def _has_compiled_forward(module: nn.Module) -> bool:
    """Return whether ``torch.cuda.make_graphed_callables`` or ``torch.compile`` made its forward."""
    forward = module.__dict__["forward"]
    return getattr(forward, "__module__", "") == "torch.cuda.graphs" or hasattr(forward, "_torchdynamo_orig_callable")
