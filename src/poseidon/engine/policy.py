"""Step policies: when the mean gradients of a step take effect.

A wrapper (``poseidon/api.py``) has one engine and one policy. :class:`UpdateNow` is what PyTorch's users know: when
``backward()`` returns, ``.grad`` is the mean. ``update.py`` defers, ``relaxed.py`` lets workers drift apart.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Collection

from torch import nn

from poseidon.engine.engine import Engine


class Policy(ABC):
    """Told of a wrapper's forwards, backwards and updates; decides what waits for what."""

    uses_engine: bool = True
    """Gradients are exchanged; otherwise the policy connects the workers in its own way."""
    defers: bool = False
    """Means may land after ``backward()`` has returned."""
    syncs_buffers_early: bool = False
    """Buffers travel behind the forward that changed them instead of before the next one."""
    is_copyable: bool = True
    """Whether a copy of the wrapper can have a policy of its own."""

    @abstractmethod
    def connect(self, module: nn.Module, engine: Engine | None) -> None:
        """Take over the updates of ``module``; ``engine`` is None where it is trained alone or without one."""

    def before_forward(self, module: nn.Module, asks: bool, is_joining: bool) -> None:  # noqa: B027
        """Hear of a forward; ``asks``: it trains, and touches parameters one by one; ``is_joining``: under join()."""

    @abstractmethod
    def begin_backward(self, unused: Collection[nn.Parameter] = ()) -> None:
        """Start an exchange unless one is under way; ``unused`` will get no gradient."""

    @abstractmethod
    def end_backward(self) -> None:
        """Nothing more will come in this backward."""

    def guard(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for the end of a backward, in which a lost worker breaks the step."""
        return contextlib.nullcontext()

    def finish(self) -> None:  # noqa: B027 - nothing to do is the rule
        """Wait until the step under way is finished."""

    def zero_grad(self, set_to_none: bool) -> bool:  # noqa: ARG002 - as the contract has it
        """Clear the gradients of an update that is due once it is done; false if the caller is to clear them."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Finish what is under way and end the exchange for good."""


class UpdateNow(Policy):
    """The means are in ``.grad`` when ``backward()`` returns; updates are the user's own."""

    def __init__(self) -> None:
        self._engine: Engine | None = None

    def connect(self, module: nn.Module, engine: Engine | None) -> None:  # noqa: ARG002, D102 - as in the contract
        self._engine = engine

    def begin_backward(self, unused: Collection[nn.Parameter] = ()) -> None:  # noqa: D102
        assert self._engine is not None
        self._engine.begin_backward(unused)

    def end_backward(self) -> None:  # noqa: D102
        assert self._engine is not None
        self._engine.end_backward()

    def close(self) -> None:  # noqa: D102
        if self._engine is not None:
            self._engine.close()
            self._engine = None
