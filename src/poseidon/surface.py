"""What torch's class offers around training, for code that reads it: averagers, optimizers and other libraries.

Nothing here takes part in an exchange; ``api.py`` does, and fills in the attributes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd
import torch.distributed.rpc
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable

from poseidon.errors import UnsupportedError


class TorchSurface(nn.Module, Joinable):
    """Attributes and helpers of :class:`torch.nn.parallel.DistributedDataParallel`, beside its training."""

    broadcast_bucket_size = 250 * 2**20
    """Bytes in one message, for :meth:`_default_broadcast_coalesced`."""
    module: nn.Module
    device: torch.device
    process_group: Any
    """The group that exchanges gradients; None with one worker and no process group."""
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    static_graph: bool
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    _ignored: set[str]
    _authoritative_rank: int | None = None
    """Whose model all workers took at the end of the last join()."""
    _joins: bool = False
    """join() was used."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)

    @property
    def broadcast_buffers(self) -> bool:
        """The older name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @property
    def device_type(self) -> str:
        """Such as "cuda"."""
        return self.device.type

    @property
    def is_multi_device_module(self) -> bool:
        """Whether the parameters are on several devices."""
        return len({parameter.device for parameter in self._module_parameters}) > 1

    @property
    def parameters_to_ignore(self) -> set[str]:
        """Names of the parameters and buffers that each worker keeps to itself."""
        return self._ignored

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The buffers that are synchronized, by name."""
        return {name: buffer for name, buffer in self.module.named_buffers() if name not in self._ignored}

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The buffers that are synchronized."""
        return list(self.named_module_buffers.values())

    def will_sync_module_buffers(self) -> bool:
        """Return whether the next forward synchronizes buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self.modules_buffers)

    @property
    def join_device(self) -> torch.device:
        """Part of torch's generic join protocol."""
        return self.device

    @property
    def join_process_group(self) -> Any:
        """Part of torch's generic join protocol."""
        return self.process_group

    @property
    def _module_parameters(self) -> list[nn.Parameter]:
        return [parameter for name, parameter in self.module.named_parameters() if name not in self._ignored]

    @property
    def _distributed_rank(self) -> int:
        return dist.get_rank(self.process_group)

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, params_and_buffers_to_ignore: Any) -> None:
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in params_and_buffers_to_ignore:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    def _default_broadcast_coalesced(
        self, bufs: list[Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        tensors, size = bufs or self.modules_buffers, bucket_size or self.broadcast_bucket_size
        dist._broadcast_coalesced(self.process_group, tensors, size, authoritative_rank)  # type: ignore[attr-defined]

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return what is known of torch's entries; nothing is logged."""
        return {
            "module_name": type(self.module).__name__,
            "rank": self._distributed_rank,
            "world_size": dist.get_world_size(self.process_group),
            "num_parameter_tensors": sum(p.requires_grad for p in self._module_parameters),
            "broadcast_buffers": int(self.forward_sync_buffers),
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "join_uneven_inputs": int(self._joins),
            **self._logged(),
        }

    def _logged(self) -> dict[str, Any]:
        """Return what only the engine knows."""
        return {}

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Ignored: outputs are never cloned."""

    def _register_fused_optim(
        self, optim: type, *args: Any, optim_params: list[nn.Parameter] | None = None, **kwargs: Any
    ) -> None:
        from torch.distributed.algorithms._optimizer_overlap import _as_overlapped_optim  # type: ignore[attr-defined]

        try:
            _as_overlapped_optim(optim, optim_params, *args, **kwargs).register_ddp(self)
        except NotImplementedError as error:
            raise UnsupportedError(
                f"{optim.__name__} does not support overlapped DDP; call its step() after backward"
            ) from error

    def _update_process_group(self, new_process_group: Any) -> None:  # noqa: ARG002
        raise UnsupportedError(
            "the process group of a wrapped model cannot be replaced; call close() and wrap the module again with it"
        )


_TORCH_ONLY = {
    "mixed_precision": "use torch.autocast",
    "delay_all_reduce_named_params": "the plan orders all exchanges",
    "param_to_hook_all_reduce": "the plan orders all exchanges",
}
_WITHOUT_EFFECT = {
    "batched_grad_copy": "gradients are always copied in batches",
    "skip_all_reduce_unused_params": "unused parameters cost only their share of a bucket",
    "check_reduction": "every reduction is checked; torch's own class ignores it as well",
}


_OF_DISTRIBUTE = ("consistency", "staleness", "sync_every", "outer", "update", "max_grad_norm")
"""Options that need the optimizer."""


def refuse_torch_only(arguments: Mapping[str, Any]) -> None:
    """Raise for options of torch's class that mean something here but cannot be had."""
    for name, value in arguments.items():
        if name in _WITHOUT_EFFECT:
            continue
        if name in _OF_DISTRIBUTE:
            raise UnsupportedError(
                f"{name}={value!r} needs the optimizer, which poseidon.DistributedDataParallel does not see; use "
                f"model, optimizer = poseidon.distribute(model, optimizer, {name}={value!r}, ...)"
            )
        if name not in _TORCH_ONLY:
            raise TypeError(f"DistributedDataParallel() got an unexpected keyword argument {name!r}")
        if value:
            raise UnsupportedError(
                f"{name}={value!r} is not available in poseidon.DistributedDataParallel; {_TORCH_ONLY[name]}"
            )


def group_of(device_mesh: Any, process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group to exchange in, given torch's two ways to name it."""
    if device_mesh is None:
        return process_group
    if process_group is not None:
        raise UnsupportedError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh.ndim != 1 or device_mesh._get_root_mesh() != device_mesh:
        raise UnsupportedError(
            f"Only 1D device mesh is supported, but got {device_mesh}, or it is part of a larger one; pass the "
            "process group of the workers that hold equal parameters"
        )
    group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
    return group


def warn_of_broadcast_buffers(is_overruled: bool) -> None:
    """Warn as torch's class does, of an argument that it has renamed."""
    text = "`broadcast_buffers` is deprecated, as in PyTorch: use `forward_sync_buffers`"
    if is_overruled:
        text = "Both `broadcast_buffers` and `forward_sync_buffers` were specified; the former is ignored"
    warnings.warn(text, FutureWarning, stacklevel=3)


def refuse_distributed_autograd() -> None:
    """Raise in a forward whose gradients a distributed autograd context would collect, instead of ``.grad``."""
    if not (dist.rpc.is_available() and dist.rpc._is_current_rpc_agent_set()):  # type: ignore[attr-defined]
        return
    try:
        context = dist.autograd._current_context()  # type: ignore[attr-defined]
    except RuntimeError:  # this thread is in none
        return
    raise UnsupportedError(
        f"the model runs in a distributed autograd context ({context._context_id()}): its gradients go to that context "
        "and would not be averaged; run forward and backward outside dist_autograd.context(), or use torch's own class"
    )
