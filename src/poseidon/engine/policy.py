"""Step 6 of the journey: when the mean gradients of a step take effect.

Before: the exchanges of ``routes/`` are under way. A wrapper (``poseidon/api.py``) has one engine and one policy.
:class:`UpdateNow` behaves like PyTorch's DDP: when ``backward()`` returns, ``.grad`` is the mean. ``update.py`` defers
updates, ``relaxed.py`` and ``local.py`` let workers drift apart.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from torch import nn

from poseidon.checkpoints.shards import Sharded
from poseidon.engine.engine import Engine


class Policy(ABC):
    """Receives a wrapper's forwards, backwards and updates, and decides what waits for what."""

    uses_engine: bool = True
    """Gradients are exchanged; if false, the policy connects the workers itself."""
    defers: bool = False
    """Means may land after ``backward()`` has returned."""
    serves: bool = False
    """The owners of the parameter server's chunks take the steps."""
    takes_steps: bool = False
    """The policy takes the steps of the user's optimizer, so nothing else may, and no hook may come between."""
    syncs_buffers_early: bool = False
    """Buffers travel right after the forward that changed them instead of before the next one."""
    holds_replicas: bool = True
    """All workers hold the same bits of every parameter whenever a backward begins."""
    is_lasting: bool = True
    """Whether training can go on with other workers, from a copy of the last complete step."""
    is_copyable: bool = True
    """Whether a copy of the wrapper can have its own policy."""

    @property
    def sharded(self) -> Sharded | None:
        """What knows the state that one worker alone has; None: every worker has everything."""
        return None

    @abstractmethod
    def connect(self, module: nn.Module, engine: Engine | None) -> None:
        """Take over the updates of ``module``; ``engine`` is None with one worker or without an exchange."""

    def before_forward(self, module: nn.Module, asks: bool, is_joining: bool) -> None:  # noqa: B027
        """Prepare for a forward; ``asks``: trains, touching parameters one by one; ``is_joining``: under join()."""

    @abstractmethod
    def begin_backward(self, unused: Collection[nn.Parameter] = ()) -> None:
        """Start an exchange unless one is under way; ``unused`` get no gradient."""

    @abstractmethod
    def end_backward(self) -> None:
        """End the backward: no more gradients come."""

    def guard(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for the end of a backward, in which a lost worker breaks the step."""
        return contextlib.nullcontext()

    def finish(self) -> None:  # noqa: B027 - a no-op for most
        """Wait until the step under way is finished."""

    def zero_grad(self, set_to_none: bool, parameters: Sequence[nn.Parameter] | None = None) -> bool:  # noqa: ARG002 - part of the contract
        """Clear gradients once the update that needs them is done; return false if the caller must clear them.

        Those of the optimizer's parameters, or of these.
        """
        return False

    def renewed(self) -> Policy:
        """Return a policy like this one, which is closed, for the same optimizer among other workers."""
        return self

    @abstractmethod
    def close(self) -> None:
        """Finish the step under way and shut the exchange down."""


class UpdateNow(Policy):
    """The means are in ``.grad`` when ``backward()`` returns; the user's optimizer applies them."""

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
