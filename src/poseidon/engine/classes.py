"""A parameter's class, replaced for a while by one that sees what happens to it: for ``pending.py`` and ``watched.py``.

The replacement mixes a class of ours into the parameter's own, so that whoever asks for that finds it. Some code
does not ask, and is told here to let ours go first: transforms of ``torch.func``, which wrap a tensor before anything
is done with it; ``nn.Parameter``, which wants the exact class of what it is made of; ``torch.jit.trace``, which
records what is done meanwhile; scripted functions and ``to_dlpack``, which read in C++; and other classes of tensors
that see operations, as nested ones do. PyTorch asks the class of the first argument, which is a layer's input more
often than its weight.
"""

from __future__ import annotations

import copy
import inspect
from abc import abstractmethod
from collections.abc import Callable
from functools import cache, wraps
from types import FunctionType
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor, nn
from torch._functorch import eager_transforms, vmap
from torch.jit import _trace
from torch.utils._pytree import tree_leaves


class Replacement:
    """Mixed into a parameter's class for a while: a copy is made of a parameter that has its own class again."""

    @abstractmethod
    def _poseidon_open(self) -> None:
        """Put everything in place, and give the parameter its own class back."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        kind = type(self)
        self._poseidon_open()
        if type(self) is not kind:
            return copy.deepcopy(self, memo)
        # This thread is putting it in place, as an optimizer of one's own may that copies what it steps.
        alike: Any = copy.copy(self)
        alike.grad = self.grad  # type: ignore[attr-defined]
        made = memo[id(self)] = copy.deepcopy(alike, memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind = type(self)
        self._poseidon_open()
        if type(self) is not kind:
            return self.__reduce_ex__(protocol)
        return _without_ours(super().__reduce_ex__(protocol), kind)  # as above


_OURS = ("_poseidon_land", "_poseidon_watcher")
"""Attributes of a parameter while its class is replaced."""


def _without_ours(parts: Any, kind: type) -> Any:
    """Return the parts of a copy as a parameter of its own class has them."""
    if parts is kind:
        return kind.__bases__[1]
    if type(parts) is tuple:
        return tuple(_without_ours(part, kind) for part in parts)
    if type(parts) is dict:
        return {name: part for name, part in parts.items() if name not in _OURS}
    return parts


@cache
def mixed(mixin: type, plain: type) -> type:
    """Return ``plain`` with a class of ours mixed in; ``__bases__[1]`` of it is ``plain`` again.

    Whoever swaps classes does so in line: it happens for each parameter in each step, where every call counts.
    """
    return type(f"{mixin.__name__}{plain.__name__}", (mixin, plain), {})


_TAKERS = (
    *((eager_transforms, "_wrap_for_grad"), (vmap, "_add_batch_dim")),
    *((torch.utils.dlpack, "to_dlpack"), (torch, "to_dlpack")),
)
"""Functions that take one tensor as it is."""
_YIELDS = "_poseidon_yields"
others_yield = False
"""Whether :func:`make_others_yield` was called."""


def make_others_yield() -> None:
    """Have all who do not ask a parameter's class leave an operation to a replaced one first; classes to come, too.

    Whoever replaces a class asks in line whether this was done: it does so in each step. A program that never does
    finds PyTorch as it is.
    """
    global others_yield
    others_yield = True
    setattr(nn.Parameter, "__new__", _opening_new(nn.Parameter.__new__))  # noqa: B010 - mypy takes it for a method
    _trace.trace_module = torch.jit.trace_module = _opening_module(torch.jit.trace_module)
    setattr(torch.jit.ScriptFunction, "__call__", _opening_call(torch.jit.ScriptFunction.__call__))  # noqa: B010 - as above
    for module, name in _TAKERS:
        if hasattr(module, name):
            setattr(module, name, _opening(getattr(module, name)))
    # Not searched for in each step: a class may be defined, or imported, between an update and the first touch.
    setattr(Tensor, "__init_subclass__", classmethod(_yield_from_birth))  # noqa: B010 - mypy takes it for a method
    kinds = Tensor.__subclasses__()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        _make_yield(kind)


def _yield_from_birth(kind: type[Tensor], /, **named: Any) -> None:
    super(Tensor, kind).__init_subclass__(**named)
    _make_yield(kind)


def _make_yield(kind: type) -> None:
    # Not only its own: it may come from a class that is no tensor.
    seeing = inspect.getattr_static(kind, "__torch_function__", None)
    is_theirs = isinstance(seeing, classmethod | staticmethod | FunctionType) and not issubclass(kind, Replacement)
    if is_theirs and seeing is not _PLAIN and not hasattr(getattr(seeing, "__func__", seeing), _YIELDS):
        setattr(kind, "__torch_function__", _yielding(seeing))  # noqa: B010 - mypy takes it for a method


_PLAIN = inspect.getattr_static(Tensor, "__torch_function__")
"""Leaves operations to other classes by itself."""


def _yielding(seeing: Any) -> Any:
    function, is_static = getattr(seeing, "__func__", seeing), isinstance(seeing, staticmethod)

    @wraps(function)
    def see(kind: Any, func: Any, types: Any, *rest: Any, **named: Any) -> Any:
        if any(issubclass(each, Replacement) for each in types):
            return NotImplemented  # then PyTorch asks the next argument's class
        # What is left out stays so: a class may have a default of its own for it.
        return function(func, types, *rest, **named) if is_static else function(kind, func, types, *rest, **named)

    setattr(see, _YIELDS, True)
    # PyTorch still takes a plain method, and complains of it: it shall find one.
    return see if isinstance(seeing, FunctionType) else classmethod(see)


def _opening(wrap: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(wrap)
    def opened(value: Any, *arguments: Any) -> Any:
        if isinstance(value, Replacement):
            value._poseidon_open()
        return wrap(value, *arguments)

    return opened


def _opening_new(make: Callable[..., Any]) -> Any:
    @wraps(make)
    def opened(kind: type, data: Any = None, *arguments: Any, **named: Any) -> Any:
        if isinstance(data, Replacement):  # a parameter made of one asks for its class before anything else
            data._poseidon_open()
        return make(kind, data, *arguments, **named)

    return staticmethod(opened)


def _opening_call(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def opened(*arguments: Any, **named: Any) -> Any:
        for value in (*arguments, *named.values()):
            # Most arguments are tensors, which are leaves, and it takes longer to hear that than to see it.
            for leaf in (value,) if isinstance(value, Tensor) else tree_leaves(value):
                if isinstance(leaf, Replacement):
                    leaf._poseidon_open()
        return call(*arguments, **named)

    return opened


def _opening_module(trace: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(trace)
    def opened(module: nn.Module, *arguments: Any, **named: Any) -> Any:
        for parameter in module.parameters():  # what a replacement calls would be a part of the record
            if isinstance(parameter, Replacement):
                parameter._poseidon_open()
        return trace(module, *arguments, **named)

    return opened
