"""One forward of a wrapped model: what goes before and after it, so that its backward exchanges gradients.

``api.py`` makes the connection to the other workers, and this uses it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from poseidon.attaching import Attachable
from poseidon.engine import compiled
from poseidon.engine.compiled import has_compiled_parts, uncompiled
from poseidon.engine.discover import check_still_frozen
from poseidon.engine.hooks import AutogradFrontEnd
from poseidon.engine.outputs import map_tensors, move_to, tensors_in, unreached
from poseidon.joining import ShadowHook
from poseidon.surface import refuse_distributed_autograd


class Forwarding(Attachable):
    """A wrapper that runs its model and watches for the backward of its outputs."""

    device_ids: list[int | torch.device] | None
    require_backward_grad_sync: bool
    _front_end: AutogradFrontEnd | None
    _frozen: list[tuple[str, nn.Parameter]]
    """What required no gradient when the units were found."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model; the backward of its outputs exchanges gradients unless inside :meth:`no_sync`."""
        # Asked first: to leave a graph that is not being made takes as long as a small layer.
        if torch.compiler.is_compiling():
            return self._forward_in_graph(inputs, kwargs)
        if self._is_loose:
            self._connect_if_trained()
        if self._engine is None or self._is_recomputing():
            inputs, kwargs = self._moved(inputs, kwargs)
            return self.module(*inputs, **kwargs)
        inputs, kwargs = self._before_forward(False, inputs, kwargs)
        outputs = self.module(*inputs, **kwargs)
        self._after_forward(outputs)
        return outputs

    def _forward_in_graph(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model while a graph of it is made, of which our own work is no part."""
        if self._is_loose:
            _apart(self._connect_if_trained)
        if self._engine is None or _apart(self._is_recomputing):
            inputs, kwargs = self._moved(inputs, kwargs)
            return self.module(*inputs, **kwargs)
        inputs, kwargs = _apart(self._before_forward, True, inputs, kwargs)
        outputs = self.module(*inputs, **kwargs)
        _apart(self._after_forward, outputs)
        return outputs

    def expect_backward(self, outputs: Any) -> None:
        """Have the next backward, which starts from ``outputs``, exchange gradients, although no forward has ended.

        For loops in which the model's forward calls ``backward()`` itself; that forward runs inside :meth:`no_sync`.
        """
        if self._engine is not None:
            self._engine.arm(True, self._engine.batch)
            self._watch(outputs)

    @property
    def reducer(self) -> Reducer:
        """What code written for torch's class prepares a backward with."""
        return Reducer(self)

    def _connect_if_trained(self) -> None:
        """Connect a copy whose backward may follow."""
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self._module_parameters):
            self._connect_copy()

    def _is_recomputing(self) -> bool:
        """Whether this forward only recomputes activations, in a backward of the model's own outputs."""
        assert self._front_end is not None
        return torch._C._current_graph_task_id() != -1 and self._front_end.is_in_backward

    def _before_forward(
        self, is_compiling: bool, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Let the policy finish what this forward does not wait for by itself, and return the inputs, in place."""
        if not compiled.is_kept_out and "torch._dynamo" in sys.modules:  # in line, as it is asked in every step
            compiled.keep_out()
        asks = self.module.training and torch.is_grad_enabled() and not is_compiling
        if self._engine is not None and self._engine.plan is None and (is_compiling or has_compiled_parts(self.module)):
            self._engine.keep_forms()
        self._policy.before_forward(self.module, asks, self._join_config.enable)
        if self._buffer_sync is not None:
            self._buffer_sync.complete()
        return self._prepare(inputs, kwargs)

    def _prepare(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert self._engine is not None
        is_synced = torch.is_grad_enabled() and self.require_backward_grad_sync
        if torch.is_grad_enabled():
            refuse_distributed_autograd()
            if self._frozen:
                check_still_frozen(self._frozen)
            if self._steps_in_backward is None:
                self._steps_in_backward = self._find_steps_in_backward()
        source = 0
        if self._join_config.enable:
            Join.notify_join_context(self)
            source = ShadowHook(self).announce(is_synced)
        inputs, kwargs = self._moved(inputs, kwargs)
        if torch.is_grad_enabled():
            # A forward without gradients (evaluation, a target network) must not affect a backward still to come.
            tensors = tensors_in((inputs, kwargs))
            samples = len(tensors[0]) if tensors and tensors[0].dim() else 0
            self._engine.arm(is_synced, sum(map(torch.numel, tensors)), samples)
        if self.require_forward_param_sync and not self._buffer_hook_is_late:
            self.sync_buffers(source)
        return inputs, kwargs

    def _after_forward(self, outputs: Any) -> None:
        assert self._engine is not None
        if self.require_forward_param_sync and self._buffer_hook_is_late:
            self.sync_buffers(0)
        # Like torch: again after a forward that may have changed them, unless gradients are being accumulated.
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        if not (torch.is_grad_enabled() and self._engine.is_armed):
            return
        self._watch(outputs)
        if self._policy.syncs_buffers_early and not self._join_config.enable:
            # The wire is idle here; in the next forward the buffers would queue behind gradients.
            self._policy.finish()
            if self._buffer_sync is not None:
                self._buffer_sync.start(0)
            self.require_forward_param_sync = False

    def _watch(self, outputs: Any) -> None:
        """Watch for the backward that starts from these outputs."""
        assert self._engine is not None
        assert self._front_end is not None
        hidden: list[Any] = []
        tensors = tensors_in(outputs, hidden)
        unused: list[nn.Parameter] = []
        if self.find_unused_parameters and not self.static_graph:
            # Outputs hidden in an opaque object may depend on anything.
            unused = unreached(tensors, self._engine.parameters) if tensors else []
        self._front_end.watch_outputs(tensors, unused, bool(hidden))

    def _moved(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self.device_ids:
            return inputs, kwargs
        change = move_to(self.device)
        return map_tensors(inputs, change), map_tensors(kwargs, change)


class Reducer:
    """As much of torch's reducer as others call around a backward: pipelines, Accelerate, Lightning's own strategy."""

    def __init__(self, wrapper: Forwarding) -> None:
        self._wrapper = wrapper

    def prepare_for_backward(self, outputs: list[Tensor]) -> None:
        """Have the next backward exchange gradients, though its forward ran under ``no_sync()``."""
        self._wrapper.expect_backward(outputs)

    def _rebuild_buckets(self) -> bool:
        """Return that buckets are as they were: a plan makes them."""
        return False

    def _delay_all_reduce(self) -> None:
        """Do nothing: a static graph's first backward exchanges its gradients as others do."""


@uncompiled
def _apart(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function outside the graph that is being made."""
    return function(*args)
