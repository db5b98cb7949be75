"""``poseidon.distribute``: a model and its optimizer, with exchanges that run into the next forward.

:class:`DeferredDataParallel` is :class:`~poseidon.api.DistributedDataParallel` with an
:class:`~poseidon.engine.update.Updater` between the engine and the optimizer.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from poseidon.api import DistributedDataParallel
from poseidon.engine.engine import Engine, Options
from poseidon.engine.hooks import AutogradFrontEnd
from poseidon.engine.update import Updater, check_optimizer, defer
from poseidon.errors import UnsupportedError


def distribute(
    model: nn.Module, optimizer: Optimizer, *, max_grad_norm: float | None = None, **options: Any
) -> tuple[DeferredDataParallel, Optimizer]:
    """Train ``model`` on all workers; ``optimizer.step()`` returns at once. Collective.

    Returns the wrapped model and the same optimizer object, whose ``step()`` only notes what is due: each layer is
    updated when its gradient has arrived and its next use comes, so the exchange hides behind the next forward too.
    Reading a parameter, its ``.grad``, a ``state_dict()`` or the optimizer's state waits for just what it reads and
    sees a finished step. The parameters are bit for bit those of :class:`~poseidon.DistributedDataParallel` with the
    same plan.

    ``max_grad_norm`` clips the norm of all gradients together, which must all be there first. Other ``options`` are
    those of :class:`~poseidon.DistributedDataParallel`. Arrays made from a parameter earlier
    (``p.detach().numpy()``) share its memory and are not waited for.
    """
    check_optimizer(optimizer)
    wrapped = DeferredDataParallel(model, optimizer, max_grad_norm, options)
    return wrapped, optimizer


class DeferredDataParallel(DistributedDataParallel):
    """What :func:`distribute` returns: use it as the model."""

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, max_grad_norm: float | None, options: dict[str, Any]
    ) -> None:
        # Before all else: the base class connects as it is made.
        self._optimizer = optimizer
        self._max_grad_norm = max_grad_norm
        self._updater: Updater | None = None
        self._half_synced: list[Callable[[], None]] = []
        # One copy of each gradient fewer: nobody but the update reads it from its bucket.
        options.setdefault("gradient_as_bucket_view", True)
        # A layer's next forward waits for its whole bucket, so buckets are smaller than where all wait for the last.
        options.setdefault("bucket_cap_mb", 8)
        super().__init__(module, **options)

    def finish_step(self) -> None:
        """Wait until the step under way is finished: every update done, nothing on the wire."""
        if self._updater is not None:
            self._updater.land_all()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model; each layer waits for its own update only."""
        if not (self.training and torch.is_grad_enabled()) or self._is_compiled():
            self._finish_step_eagerly()
        return super().forward(*inputs, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; those of an update that is due once it is done."""
        if self._updater is None:
            super().zero_grad(set_to_none)
        else:
            self._updater.zero_grad(set_to_none)

    def close(self) -> None:
        """Finish the step under way, stop exchanging and give model and optimizer back as they were."""
        self._updater = None
        super().close()

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedError(
            "a distributed model cannot be copied with its optimizer; copy model.module, or save model.state_dict()"
        )

    def _is_compiled(self) -> bool:
        # A compiled graph reads its parameters without asking.
        return torch.compiler.is_compiling() or self._has_compiled_parts

    @property
    def _has_compiled_parts(self) -> bool:
        return any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in self.module.modules())

    @torch.compiler.disable
    def _finish_step_eagerly(self) -> None:
        self.finish_step()

    def _adapted(self, options: Options) -> Options:
        return dataclasses.replace(options, defers=True)

    def _make_front_end(self, engine: Engine) -> AutogradFrontEnd:
        self._updater = Updater(engine, self._optimizer, self._max_grad_norm)
        defer(self._optimizer, self._updater)
        return AutogradFrontEnd(engine, _Turns(self, self._updater))

    def _before_forward(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert self._updater is not None
        self._updater.is_paused = self._join_config.enable
        if self._join_config.enable:
            self.finish_step()
        self.complete_sync()
        moved: tuple[tuple[Any, ...], dict[str, Any]] = super()._before_forward(inputs, kwargs)
        return moved

    def _after_forward(self, outputs: Any) -> None:
        assert self._engine is not None
        super()._after_forward(outputs)
        if torch.is_grad_enabled() and self._engine.is_armed and not self._join_config.enable:
            # Nothing is under way here; in the next forward the buffers would queue behind gradients.
            self.finish_step()
            self._half_synced = self._start_sync(0)
            self._will_sync_buffers = False

    def complete_sync(self) -> None:
        """Take over the buffers that were sent after the last forward."""
        completions, self._half_synced = self._half_synced, []
        for complete in completions:
            complete()


class _Turns:
    """Tells the updater of a backward's begin and end, and takes over the buffers at its end."""

    def __init__(self, wrapper: DeferredDataParallel, updater: Updater) -> None:
        self._complete_sync = weakref.WeakMethod(wrapper.complete_sync)
        self._updater = updater

    def begin_backward(self, unused: Collection[nn.Parameter] = ()) -> None:
        self._updater.begin_backward(unused)

    def end_backward(self) -> None:
        complete_sync = self._complete_sync()
        if complete_sync is not None:
            complete_sync()
        self._updater.end_backward()

    def close(self) -> None:
        self._updater.close()
