"""The systems that a benchmark compares, each through its public interface alone.

Every system trains the same network from the same seed with the same optimizer on the same batch; they differ
only in how gradients become a mean. A new one is a function that wraps a model, added to :data:`SYSTEMS`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from poseidon.errors import ConfigError, unknown_name
from poseidon.lab.system_names import POWERSGD_RANK, SHORT, read_system
from poseidon.zoo import Network

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.01, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), 1e-4),
}
PRECISIONS: dict[str, torch.dtype | None] = {"float32": None, "bf16": torch.bfloat16}
"""What forward computes in; None: without autocast."""
# PowerSGD sends whole gradients until this step; 2 is the least it accepts with error feedback.
POWERSGD_START = 2
ONE_BUCKET_MB = 1e6
"""More than any model."""

Batch = tuple[tuple[Any, ...], Tensor]
"""Inputs, and targets of the loss."""


@dataclass
class Trainer:
    """One system's training loop."""

    network: Network
    module: nn.Module
    """The model as the system wrapped it."""
    optimizer: torch.optim.Optimizer
    batches: Sequence[Batch]
    """Of every step; gradients of all are accumulated."""
    precision: str = "float32"

    def step(self) -> Tensor:
        """Train one step; return the last batch's loss before the update, which may still be pending."""
        self.optimizer.zero_grad()
        no_sync = getattr(self.module, "no_sync", contextlib.nullcontext)
        *others, last = self.batches
        for batch in others:
            with no_sync():
                self._backward(batch)
        loss = self._backward(last)
        self.optimizer.step()
        return loss

    def _backward(self, batch: Batch) -> Tensor:
        inputs, targets = batch
        with autocast(self.precision, targets.device):
            loss = self.network.loss(self.module(*inputs), targets)
        (loss / len(self.batches) if len(self.batches) > 1 else loss).backward()
        return loss.detach()

    def note(self) -> str:
        """Return the plan of a system that has one: how many layers take which route, and what else was tried."""
        plan = getattr(self.module, "plan", None)
        counts = Counter(getattr(plan, "routes", {}).values())
        note = ", ".join(f"{count} x {route}" for route, count in sorted(counts.items()))
        tried = [one for one in getattr(plan, "tried", ()) if one.measured_s is not None]
        if len(tried) > 1:
            times = ", ".join(f"{one.name} {one.measured_s * 1e3:.1f}" for one in tried)
            note += f" (kept: {getattr(plan, 'name', '')}; tried, ms: {times})"
        return note

    def close(self) -> None:
        """Stop the system's threads and close its connections, if any."""
        close = getattr(self.module, "close", None)
        if callable(close):
            close()


Options = Mapping[str, Any]
Wrap = Callable[[nn.Module, torch.optim.Optimizer, Options], tuple[nn.Module, torch.optim.Optimizer]]


def _linear(model: nn.Module, optimizer: torch.optim.Optimizer, _: Options) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, optimizer


def _ddp(model: nn.Module, optimizer: torch.optim.Optimizer, _: Options) -> tuple[nn.Module, torch.optim.Optimizer]:
    return _wrap_ddp(model), optimizer


def _ddp_gloo(
    model: nn.Module, optimizer: torch.optim.Optimizer, _: Options
) -> tuple[nn.Module, torch.optim.Optimizer]:
    return _wrap_ddp(model, dist.new_group(backend="gloo")), optimizer


def _ddp_bf16(
    model: nn.Module, optimizer: torch.optim.Optimizer, _: Options
) -> tuple[nn.Module, torch.optim.Optimizer]:
    wrapped = _wrap_ddp(model)
    wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
    return wrapped, optimizer


def _ddp_powersgd(
    model: nn.Module, optimizer: torch.optim.Optimizer, _: Options
) -> tuple[nn.Module, torch.optim.Optimizer]:
    # Its hook starts collectives in callbacks. With gloo nothing keeps those of several buckets in one order on all
    # ranks, and they get mixed up; a single bucket has none to mix up with.
    is_gloo = next(model.parameters()).device.type == "cpu"
    wrapped = _wrap_ddp(model, bucket_cap_mb=ONE_BUCKET_MB if is_gloo else None)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=POWERSGD_START
    )
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped, optimizer


def _poseidon(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: Options
) -> tuple[nn.Module, torch.optim.Optimizer]:
    from poseidon import DistributedDataParallel

    return DistributedDataParallel(model, **options), optimizer


def _poseidon_distribute(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: Options
) -> tuple[nn.Module, torch.optim.Optimizer]:
    from poseidon import distribute

    return distribute(model, optimizer, **options)


SYSTEMS: dict[str, Wrap] = {
    "linear": _linear,
    "ddp": _ddp,
    "ddp-gloo": _ddp_gloo,
    "ddp-bf16": _ddp_bf16,
    "ddp-powersgd": _ddp_powersgd,
    "poseidon": _poseidon,
    "poseidon-distribute": _poseidon_distribute,
}


def check_system(name: str, device: str) -> None:
    """Raise unless there is a system of this name, and it runs on this kind of device."""
    system, options = _read_system(name)
    if options and not system.startswith("poseidon"):
        raise ConfigError(f"{name}: {system} takes no options here; those of Poseidon's systems do")
    if system == "ddp-bf16" and device != "cuda":
        raise ConfigError("ddp-bf16 needs --device cuda: torch's bf16 hook does not work over gloo")


def _read_system(text: str) -> tuple[str, dict[str, Any]]:
    name, options = read_system(text)
    if name not in SYSTEMS:
        raise unknown_name("system", name, [*SYSTEMS, *SHORT])
    return name, options


def make_trainer(
    name: str,
    network: Network,
    batches: Sequence[Batch],
    optimizer: str = "sgd",
    precision: str = "float32",
) -> Trainer:
    """Return a system's training loop for a network already on its device."""
    module, stepper = wrap(name, network.model, OPTIMIZERS[optimizer](network.model))
    return Trainer(network, module, stepper, batches, precision)


def wrap(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return model and optimizer as a system wraps them."""
    system, options = _read_system(name)
    return SYSTEMS[system](model, optimizer, options)


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Return the context in which forward computes."""
    dtype = PRECISIONS[precision]
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None)


def _wrap_ddp(
    model: nn.Module, group: dist.ProcessGroup | None = None, bucket_cap_mb: float | None = None
) -> nn.parallel.DistributedDataParallel:
    device = next(model.parameters()).device
    devices = [device.index] if device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(
        model, device_ids=devices, process_group=group, bucket_cap_mb=bucket_cap_mb
    )
