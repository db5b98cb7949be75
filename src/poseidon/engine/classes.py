"""A parameter's class, replaced for a while by one that sees what happens to it: for ``pending.py`` and ``watched.py``.

The replacement mixes a class of ours into the parameter's own, so that whoever asks for that finds it.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from functools import cache
from typing import Any

from torch import nn


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
def _mixed(mixin: type, plain: type) -> type:
    return type(f"{mixin.__name__}{plain.__name__}", (mixin, plain), {})


def replace_class(parameter: nn.Parameter, mixin: type) -> None:
    """Mix a class into a parameter's own, unless it is."""
    if not isinstance(parameter, mixin):
        parameter.__class__ = _mixed(mixin, type(parameter))


def restore_class(parameter: nn.Parameter, mixin: type) -> bool:
    """Give a parameter its own class back; return whether it had another one."""
    if not isinstance(parameter, mixin):
        return False
    parameter.__class__ = type(parameter).__bases__[1]
    return True
