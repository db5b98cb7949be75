"""A flag for hooks that must ignore the calls made inside their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class Nesting:
    """Entered as a context around a hook's work; ``is_inside`` tells nested calls to leave everything alone."""

    def __init__(self) -> None:
        self.is_inside = False

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Set the flag inside this context; contexts may nest."""
        before, self.is_inside = self.is_inside, True
        try:
            yield
        finally:
            self.is_inside = before


APPLYING = Nesting()
"""Inside, a Keras optimizer applies gradients that were averaged already, and may let another one do it."""
