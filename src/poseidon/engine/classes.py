"""A parameter's class, replaced for a while by one that sees what happens to it: for ``pending.py`` and ``watched.py``.

The replacement mixes a class of ours into the parameter's own, so that whoever asks for that finds it. Transforms of
``torch.func`` do not ask: they wrap a tensor before anything is done with it, and are told here to put it in place.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch._functorch import eager_transforms, vmap


class Replacement:
    """Mixed into a parameter's class for a while: a copy is made of a parameter that has its own class again."""

    @abstractmethod
    def _poseidon_open(self) -> None:
        """Put everything in place, and give the parameter its own class back."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._poseidon_open()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._poseidon_open()
        return self.__reduce_ex__(protocol)


@cache
def mixed(mixin: type, plain: type) -> type:
    """Return ``plain`` with a class of ours mixed in; ``__bases__[1]`` of it is ``plain`` again.

    Whoever swaps classes does so in line: it happens for each parameter in each step, where every call counts.
    """
    return type(f"{mixin.__name__}{plain.__name__}", (mixin, plain), {})


def _opening(wrap: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(wrap)
    def opened(value: Any, *arguments: Any) -> Any:
        if isinstance(value, Replacement):
            value._poseidon_open()
        return wrap(value, *arguments)

    return opened


for _module, _name in ((eager_transforms, "_wrap_for_grad"), (vmap, "_add_batch_dim")):
    if hasattr(_module, _name):
        setattr(_module, _name, _opening(getattr(_module, _name)))
