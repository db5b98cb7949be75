"""Replace attributes of foreign modules such that everything can be undone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Patches:
    """Attributes replaced so far; :meth:`undo` puts them back in reverse order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replace a function by one that calls ``around(original, *args, **kwargs)``."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        self.replace(owner, name, wrapper)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a module or class."""
        is_inherited = name not in owner.__dict__
        before = None if is_inherited else owner.__dict__[name]
        setattr(owner, name, value)
        self._undo.append(lambda: delattr(owner, name) if is_inherited else setattr(owner, name, before))

    def on_undo(self, action: Callable[[], None]) -> None:
        """Register another action for :meth:`undo`."""
        self._undo.append(action)

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()
