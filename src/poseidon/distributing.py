"""``poseidon.distribute``: a model and its optimizer, with exchanges that run into the next forward.

:class:`DeferredDataParallel` is :class:`~poseidon.api.DistributedDataParallel` with an
:class:`~poseidon.engine.update.Updater` between the engine and the optimizer. :class:`RelaxedDataParallel` shares
parameters through a table of the parameter server, with bounded staleness or none.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from poseidon.api import DistributedDataParallel
from poseidon.engine.engine import Engine, Options
from poseidon.engine.hooks import AutogradFrontEnd
from poseidon.engine.relaxed import WIDTH, Ledger, RelaxedUpdater
from poseidon.engine.update import Updater, check_optimizer, defer
from poseidon.errors import ConfigError, UnsupportedError, unknown_name
from poseidon.planning.packing import limit_collective
from poseidon.ps import connect
from poseidon.wire.settings import WireSettings


def distribute(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    consistency: str = "bsp",
    staleness: int = 0,
    max_grad_norm: float | None = None,
    **options: Any,
) -> tuple[DeferredDataParallel | RelaxedDataParallel, Optimizer]:
    """Train ``model`` on all workers; returns the wrapped model and the same optimizer object. Collective.

    With ``consistency="bsp"`` every step uses everybody's gradients, and ``optimizer.step()`` returns at once: each
    layer is updated when its gradient has arrived and its next use comes, so the exchange hides behind the next
    forward too. Reading a parameter, its ``.grad``, a ``state_dict()`` or the optimizer's state waits for just what it
    reads and sees a finished step. The parameters are bit for bit those of
    :class:`~poseidon.DistributedDataParallel` with the same options. Arrays made from a parameter earlier
    (``p.detach().numpy()``) share its memory and are not waited for.

    With ``"ssp"`` a worker may be ``staleness`` steps ahead of the slowest, with ``"asp"`` any number: nobody waits
    for a straggler, a worker that dies is reported and the others go on, and replicas differ by the updates they have
    not seen yet. ``engine/relaxed.py`` says how steps are taken then.

    ``max_grad_norm`` clips the norm of all gradients together (under ssp and asp: of the worker's own). Other
    ``options`` are those of :class:`~poseidon.DistributedDataParallel`, or of :class:`RelaxedDataParallel`.
    """
    check_optimizer(optimizer)
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ConfigError(f"max_grad_norm is {max_grad_norm}; it must be positive")
    if consistency not in ("bsp", "ssp", "asp"):
        raise unknown_name("consistency", consistency, ("bsp", "ssp", "asp"))
    if staleness < 0 or (staleness and consistency != "ssp"):
        raise ConfigError(
            f"staleness={staleness} with consistency={consistency!r}: only ssp has one, and it is not negative"
        )
    if consistency == "bsp":
        return DeferredDataParallel(model, optimizer, max_grad_norm, options), optimizer
    return RelaxedDataParallel(model, optimizer, consistency, staleness, max_grad_norm, **options), optimizer


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
        super().__init__(module, **options)

    @property
    def bucket_bytes_cap(self) -> int:
        """Most bytes that share a collective."""
        return limit_collective(self._bucket_bytes, defers=True)

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

    @torch.compiler.disable
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

    @torch.compiler.disable
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


class RelaxedDataParallel(nn.Module):
    """What :func:`distribute` returns for bounded staleness and none: use it as the model.

    Call :meth:`close` when training is over, or leave it to the interpreter's exit: it waits for the other workers,
    which may need the parameters held here. Buffers (running statistics) are each worker's own after the first step.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        consistency: str,
        staleness: int,
        max_grad_norm: float | None = None,
        *,
        timeout_s: float = 60.0,
        managed: bool = False,
        settings: WireSettings | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        ledger = Ledger([parameter for parameter in module.parameters() if parameter.requires_grad])
        self._job = connect(timeout_s=timeout_s, settings=settings)
        try:
            self._table = self._job.table(
                "parameters",
                ledger.rows,
                WIDTH,
                ledger.dtype_name,
                # Without staleness every read holds exactly the finished steps, which is what "bsp" promises.
                consistency="bsp" if consistency == "ssp" and staleness == 0 else consistency,
                staleness=staleness,
                managed=managed,
            )
            workers = len(self._job.workers)
            self._updater: RelaxedUpdater | None = RelaxedUpdater(
                optimizer, ledger, self._table, workers, max_grad_norm
            )
        except BaseException:
            self._job.__exit__(*sys.exc_info())
            raise
        defer(optimizer, self._updater)
        atexit.register(self.close)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model on the parameters as this worker last saw them."""
        return self.module(*inputs, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """As in the exact wrapper; here gradients never leave their worker, so it changes nothing."""
        yield

    @property
    def staleness_seen(self) -> Counter[int]:
        """How many rows of parameters were read at which staleness, in clocks."""
        return self._table.staleness_seen

    @property
    def losses(self) -> dict[int, int]:
        """Workers that died, each with its last step known here."""
        return self._job.losses

    def close(self) -> None:
        """Wait until the others are done as well, and give model and optimizer back as they were."""
        if self._updater is not None:
            self._updater.close()
            self._updater = None
            atexit.unregister(self.close)
            self._job.close()


class _Turns:
    """Tells the updater of a backward's begin and end, and takes over the buffers at its end."""

    def __init__(self, wrapper: DeferredDataParallel, updater: Updater) -> None:
        self._complete_sync = weakref.WeakMethod(wrapper.complete_sync)
        self._updater = updater

    def begin_backward(self, unused: Collection[nn.Parameter] = ()) -> None:
        self._updater.begin_backward(unused)

    def end_backward(self) -> None:
        complete_sync = self._complete_sync()
        with self._updater.breaking_off():
            if complete_sync is not None:
                complete_sync()
            self._updater.end_backward()

    def close(self) -> None:
        self._updater.close()
