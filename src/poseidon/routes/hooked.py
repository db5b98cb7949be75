"""Step 3, hooked: full gradients, averaged by a communication hook of the user's (``register_comm_hook``).

The hook gets one bucket after the other, in one order on all workers, and returns a future of the bucket's new
values. What arrives is whatever the hook makes of it: PowerSGD and the compressing hooks are lossy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from poseidon.errors import ConfigError, UnsupportedError
from poseidon.planning.cluster import Cluster
from poseidon.planning.costs import Cost, allreduce_cost
from poseidon.planning.route import Route
from poseidon.routes.base import Brought, Context, Exchange, Exchanger, LiveItem
from poseidon.routes.catalogue import COLLECTIVES
from poseidon.units import Load, Unit

Hook = Callable[[Any, Any], Any]
"""Takes a state and a :class:`HookBucket`; returns a ``torch.futures.Future`` of a tensor."""


class HookBucket:
    """What a hook sees of a bucket: the methods of ``torch.distributed.GradBucket``."""

    def __init__(self, index: int, is_last: bool, flat: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        self._index = index
        self._is_last = is_last
        self._buffer = flat
        self._parameters = list(parameters)

    def index(self) -> int:
        """Return the position among the buckets of a backward."""
        return self._index

    def is_last(self) -> bool:
        """Return whether this is the last bucket of a backward."""
        return self._is_last

    def buffer(self) -> Tensor:
        """Return all gradients of the bucket as one flat tensor."""
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace the flat tensor, by one in a shorter type, say."""
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        """Return views of the flat tensor, one per parameter, in its shape."""
        if self._buffer.is_sparse:
            return [self._buffer]
        parts = self._buffer.split([parameter.numel() for parameter in self._parameters])
        return [part.view(parameter.shape) for part, parameter in zip(parts, self._parameters, strict=True)]

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters, in the order of :meth:`gradients`."""
        return self._parameters


@dataclass(frozen=True)
class HookedRoute(Route):
    """The only route of a model with a communication hook."""

    state: Any
    hook: Hook

    name = "hook"
    summary = "full gradients, packed into buckets, averaged by the user's communication hook"

    @property
    def queue(self) -> str:
        """One order on all workers: hooks use collectives."""
        return COLLECTIVES

    def accepts(self, unit: Unit) -> bool:  # noqa: ARG002
        """Return true: a sparse gradient is a bucket of its own."""
        return True

    def cost(self, unit: Unit, load: Load | None, cluster: Cluster) -> Cost:
        """Count what an allreduce would take; nobody knows what the hook sends."""
        return allreduce_cost(unit, load, cluster)

    def open(self, context: Context) -> Exchanger:
        """Return what calls the hook."""
        return _HookedExchanger(context, self)


class _HookedExchanger(Exchanger):
    def __init__(self, context: Context, route: HookedRoute) -> None:
        self._team = context.team
        self._route = route
        self._count = 0
        """Buckets of a backward: as there is one route, the planned schedule and the one after no_sync() agree."""

    def prepare(self, items: Sequence[LiveItem]) -> None:
        # Two schedules may be in force; with one route they are cut alike.
        self._count = 1 + max(item.item.number for item in items)

    @torch.no_grad()
    def start(self, item: LiveItem, brought: Sequence[Brought], step: int) -> Exchange:  # noqa: ARG002
        is_sparse = item.unit.spec.is_sparse
        flat, place = _sparse_gradient(item.unit.weight) if is_sparse else item.pack(), item.item.number
        bucket = HookBucket(place, place == self._count - 1, flat, item.parameters)
        future = self._route.hook(self._route.state, bucket)
        if not isinstance(future, torch._C.Future):
            raise UnsupportedError(
                f"rank {self._team.rank}: the communication hook {name_of(self._route.hook)} callback must return a "
                f"torch.futures.Future object, but got {type(future)} for bucket {place}"
            )
        if is_sparse:
            return _SparseExchange(item.unit.weight, future)
        return _HookedExchange(flat, future, self._route.hook)


class _HookedExchange(Exchange):
    def __init__(self, flat: Tensor, future: torch._C.Future[Any], hook: Hook) -> None:
        self._flat = flat
        self._future = future
        self._hook = hook

    def finish(self, is_used: bool) -> None:  # noqa: ARG002
        # The hook chose its process group, whose own timeout ends this wait.
        value = self._future.wait()
        if isinstance(value, list | tuple) and len(value) == 1:
            value = value[0]
        if not isinstance(value, Tensor) or value.numel() != self._flat.numel():
            seen = f"{value.numel()} values" if isinstance(value, Tensor) else type(value)
            raise UnsupportedError(
                f"the communication hook {name_of(self._hook)} returned a future of {seen}; expected one tensor with "
                f"the {self._flat.numel()} values of its bucket"
            )
        if value.data_ptr() != self._flat.data_ptr() or value.dtype is not self._flat.dtype:
            self._flat.copy_(value.view(-1))


class _SparseExchange(Exchange):
    def __init__(self, weight: nn.Parameter, future: torch._C.Future[Any]) -> None:
        self._weight = weight
        self._future = future

    def finish(self, is_used: bool) -> None:
        value = self._future.wait()
        if is_used:
            self._weight.grad = value[0] if isinstance(value, list | tuple) else value


def _sparse_gradient(weight: nn.Parameter) -> Tensor:
    if weight.grad is not None:
        return weight.grad
    indices = torch.empty(1, 0, dtype=torch.int64, device=weight.device)
    values = torch.empty(0, *weight.shape[1:], dtype=weight.dtype, device=weight.device)
    return torch.sparse_coo_tensor(indices, values, weight.shape, check_invariants=False)


def check_hook(hook: Any) -> None:
    """Refuse what cannot be a communication hook, as torch's class does."""
    if not callable(hook):
        raise TypeError(f"Communication hook must be callable. It is {hook!r}")
    try:
        signature = inspect.signature(hook, eval_str=True)
    except NameError:  # an annotation written as text, with names that only a type checker knows
        signature = inspect.signature(hook)
    if "bucket" not in signature.parameters:
        raise ConfigError(f"Communication hook {name_of(hook)}: it must take a state and an argument named bucket")
    seen = signature.parameters["bucket"].annotation
    torch_bucket = dist.GradBucket  # type: ignore[attr-defined]
    if seen not in (inspect.Parameter.empty, torch_bucket, HookBucket, Any) and not isinstance(seen, str):
        raise ConfigError(f"Communication hook: bucket annotation should be dist.GradBucket. It is {seen!r}")
    returned = signature.return_annotation
    if returned not in (inspect.Signature.empty, torch.futures.Future[Tensor], Any) and not isinstance(returned, str):
        raise ConfigError(
            f"Communication hook: return annotation should be torch.futures.Future[torch.Tensor]. It is {returned!r}"
        )


def name_of(hook: Any) -> str:
    """Return a hook's name, for messages."""
    return str(getattr(hook, "__qualname__", hook))
