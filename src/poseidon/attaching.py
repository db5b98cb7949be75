"""What users attach to a wrapper: communication hooks, buffer hooks, optimizers in backward. Copies carry hooks along.

So is what lossy routes keep from step to step, for checkpoints: it is no part of the model.
``api.py`` calls it at the right moments.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHookLocation

from poseidon.engine.buffers import BufferHook, BufferSync
from poseidon.engine.engine import Engine
from poseidon.engine.policy import Policy, UpdateNow
from poseidon.errors import ConfigError, UnsupportedError
from poseidon.routes.feedback import Feedback
from poseidon.routes.hooked import Hook, HookedRoute, check_hook, name_of
from poseidon.surface import TorchSurface
from poseidon.team.team import Team


class BackwardTurns:
    """Reports a backward's beginning and end to the policy, and applies the buffers at its end."""

    def __init__(self, policy: Policy, buffers: BufferSync | None) -> None:
        self._policy = policy
        self._buffers = buffers
        self.steps_in_backward: list[nn.Parameter] = []

    def begin_backward(self, unused: Collection[nn.Parameter] = ()) -> None:
        """Start an exchange unless one is under way; ``unused`` get no gradient."""
        self._policy.begin_backward(unused)

    def end_backward(self) -> None:
        """Apply the buffers, let the policy end the backward, and step optimizers that do so in it."""
        with self._policy.guard():
            if self._buffers is not None:
                self._buffers.complete()
            self._policy.end_backward()
        for parameter in self.steps_in_backward:
            for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
                optimizer.step()
            parameter.grad = None

    def close(self) -> None:
        """Shut the exchange down."""
        self._policy.close()


class Attachable(TorchSurface):
    """A wrapper to which hooks and optimizers can be attached, and that can be copied with its hooks."""

    _engine: Engine | None
    _policy: Policy
    _team: Team | None
    _turns: BackwardTurns
    _buffer_sync: BufferSync | None
    _routes: dict[str, str]
    _feedback: Feedback | None

    def __init__(self) -> None:
        super().__init__()
        self._buffer_hook: BufferHook | None = None
        self._buffer_hook_is_late = False
        """The buffer hook runs after the forward instead of before."""
        self._comm_hooks: list[tuple[Hook, object]] = []
        self._hook_name = ""
        self._steps_in_backward: list[nn.Parameter] | None = None
        """Parameters with an optimizer of their own that runs in backward; None before the first forward."""
        self._is_loose = False
        """This is a copy that nobody has trained yet, and so not connected."""

    @property
    def is_lossy(self) -> bool:
        """Whether loss was allowed, and so there is a state of it."""
        return self._feedback is not None

    def lossy_state_dict(self) -> dict[str, Any]:
        """Return what lossy layers keep on this worker, each worker its own: save it beside ``state_dict()``.

        Empty without ``lossy``. :class:`poseidon.Checkpoint` saves it by itself.
        """
        if self._feedback is None:
            return {}
        self._policy.finish()
        return self._feedback.state_dict()

    def load_lossy_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what this worker kept; what several workers kept is loaded by :meth:`load_lossy_shares`."""
        self.load_lossy_shares([state])

    def load_lossy_shares(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on with the sum of what some workers kept, none of them or several, for another number of workers."""
        if self._feedback is not None:
            self._policy.finish()
            self._feedback.load_shares([state for state in states if state])

    @abstractmethod
    def _connect(self, process_group: dist.ProcessGroup | None, init_sync: bool) -> None:
        """Connect to the other workers. Collective."""

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Average all gradients by ``hook(state, bucket)``, one bucket after the other, instead of by the plan.

        ``hook`` is called as torch's class calls it, with a :class:`~poseidon.routes.hooked.HookBucket`, and returns a
        ``torch.futures.Future`` of the bucket's new values. Collective; once, before the first backward.
        """
        try:
            self._check_hook(hook)
            if self._engine is not None:
                self._engine.use_only(HookedRoute(state, hook))
        except Exception as error:
            if self._engine is not None:
                self._engine.last_error = str(error)
            raise
        self._comm_hooks.append((hook, state))
        self._hook_name = name_of(hook)

    def _check_hook(self, hook: Hook) -> None:
        check_hook(hook)
        if self._policy.takes_steps:
            raise UnsupportedError(
                "register_comm_hook with poseidon.distribute: a hook's gradients are complete when backward() returns; "
                "use poseidon.DistributedDataParallel"
            )
        if self._comm_hooks:
            raise UnsupportedError(
                "register_comm_hook or register_builtin_comm_hook can only be called once; this model has "
                f"{name_of(self._comm_hooks[0][0])}"
            )
        if self._routes:
            raise ConfigError(f"routes={self._routes!r} with a communication hook: all gradients go through the hook")
        if self._feedback is not None:
            raise ConfigError("lossy with a communication hook: all gradients go through the hook; drop one of them")

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hooks = {"ALLREDUCE": default_hooks.allreduce_hook, "FP16_COMPRESS": default_hooks.fp16_compress_hook}
        self.register_comm_hook(self.process_group, hooks[comm_hook_type.name])
        self._hook_name = str(comm_hook_type)

    def _register_buffer_comm_hook(
        self, state: object, hook: Any, comm_hook_location: Any = _BufferCommHookLocation.POST_FORWARD
    ) -> None:
        if not callable(hook):
            raise TypeError(f"the buffer hook must be callable; it is {hook!r}")
        if self._policy.takes_steps:
            raise UnsupportedError(
                "buffer hooks with poseidon.distribute: it sends buffers while the wire is idle; use "
                "poseidon.DistributedDataParallel"
            )
        self._buffer_hook = partial(hook, state)
        self._buffer_hook_is_late = comm_hook_location == _BufferCommHookLocation.POST_FORWARD

    def sync_buffers(self, source: int) -> None:
        """Copy ``source``'s buffers to all workers, as torch's DDP does before each forward. Collective."""
        if self._buffer_sync is None:
            return
        if self._buffer_hook is None:
            self._buffer_sync.sync(source)
        else:
            self._buffer_sync.run(self._buffer_hook)

    def _find_steps_in_backward(self) -> list[nn.Parameter]:
        """Take over the optimizers that ``_apply_optimizer_in_backward`` attached to parameters.

        Their own hooks would step before the gradient is the mean.
        """
        found = [parameter for parameter in self._module_parameters if hasattr(parameter, "_in_backward_optimizers")]
        if not found:
            return []
        if self._policy.takes_steps:
            raise UnsupportedError(
                "poseidon.distribute takes the optimizer's steps itself, but parameters have optimizers of their own "
                "(_apply_optimizer_in_backward); use poseidon.DistributedDataParallel"
            )
        from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

        for parameter in found:
            for handle in param_to_optim_hook_handle_map.get(parameter, []):
                handle.remove()
        self._turns.steps_in_backward = found
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Omit process-local state: a copy that is trained creates its own, on the default group."""
        if not self._policy.is_copyable:
            raise UnsupportedError(
                "a distributed model cannot be copied with its optimizer; copy model.module, or save model.state_dict()"
            )
        if self._team is not None and self.process_group is not dist.group.WORLD:
            raise UnsupportedError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group; copy "
                "model.module and wrap the copy"
            )
        here = (
            "_engine",
            "_front_end",
            "_team",
            "_buffer_sync",
            "_release",
            "_turns",
            "_steps_in_backward",
            "process_group",
        )
        return {**self.__dict__, **dict.fromkeys(here), "_policy": UpdateNow()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group = dist.group.WORLD if dist.is_initialized() else None
        # One worker alone may make a copy, to evaluate averaged weights or to save it, so this waits for nobody.
        self._is_loose = True

    def _connect_copy(self) -> None:
        """Connect a copy to those of the other workers, unless it is connected. Collective."""
        if not self._is_loose:
            return
        self._is_loose = False
        self._connect(None, init_sync=True)
        hooks, self._comm_hooks = self._comm_hooks, []
        for hook, hook_state in hooks:
            self.register_comm_hook(hook_state, hook)
